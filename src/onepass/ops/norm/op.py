"""`layer_norm` and `rms_norm`: one registered operator and its backward, and the public functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onepass.core import check
from onepass.core.bind import batch_first, bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake
from onepass.core.sharding import REPLICATE, Way, beside, gradient, row_dims

from . import reference, torch_path
from .options import NONE, QUANTIZE, Needs, Options, check_arguments, flattened, grouped, shared_table

# how torch.compile and torch.export take norms without options: "torch" as torch's operations, which Inductor fuses
# with what stands beside them and whose calls take the host half as long; "kernels" as the kernels of eager
COMPILED = os.environ.get("ONEPASS_COMPILED_NORMS", "torch")
if COMPILED not in ("torch", "kernels"):
    raise ValueError(f"ONEPASS_COMPILED_NORMS must be 'torch' or 'kernels', got {COMPILED!r}")


def forward_ways(x: Any, residual: Any, gate: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, residual, gate, weight and bias, with y, s, e4m3 values, scales and statistics.

    Weights that differ between rows are sharded with them. A result that is left out is empty, the same everywhere.
    """
    options = Options(*rest)
    present = options.keep_y, residual is not None, options.quantize, options.quantize
    ways: list[Way] = []
    for d in row_dims(x):
        results = tuple(d if yes else REPLICATE for yes in present)
        ways.append(((*results, d + 1), (d, d, d, beside(weight, x.ndim, d), beside(bias, x.ndim, d))))
    return ways


def backward_ways(dy: Any, ds: Any, x: Any, gate: Any, stats: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard dy, ds, x, gate, statistics, weight and bias, with dx, dz, dw, db and dx again."""
    x_dtype, need_x, need_z, need_w, need_b = rest[-5:]
    copied = need_x and x_dtype != x.tensor_meta.dtype
    ways: list[Way] = []
    for d in row_dims(x):
        w, b = beside(weight, x.ndim, d), beside(bias, x.ndim, d)
        rows = gradient(d, need_x), gradient(d, need_z), gradient(d, copied)
        results = (*rows[:2], gradient(w, need_w), gradient(b, need_b), rows[2])
        ways.append((results, (d, d, d, d, d + 1, w, b)))
    return ways


# an operator cannot return None: its results that are left out are empty tensors
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
InDims = tuple[int | None, ...]


def _on_triton(*rows: Tensor | None) -> bool:
    return uses_triton(rows[0]) and all(t is None or t.dtype != torch.float64 for t in rows)  # type: ignore[arg-type]


def _forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: tuple[Any, ...], keep: bool = True,
) -> Results:  # fmt: skip
    """Return y, s, e4m3 codes, scales and statistics; None for those that the options leave out."""
    o = Options(*options)
    if not x.numel():
        return _shapes(x, residual, o)
    if _on_triton(x, residual, gate):
        from . import launch

        table = shared_table(x, weight, bias)
        if launch.has_forward(x, gate, table, o):
            return launch.forward(x, residual, gate, weight, bias, table, o, keep)
    s = x if residual is None else torch.add(x, residual).contiguous()
    y, coded, stats = torch_path.forward(x, s, gate, weight, bias, o)
    codes, scales = (None, None) if coded is None else (coded[0].view(torch.uint8), coded[1])
    return y if o.keep_y else None, None if residual is None else s, codes, scales, stats


def _shapes(x: Tensor, residual: Tensor | None, o: Options) -> Results:
    """Return results of the right shapes: scales are 1, statistics 0, the others uninitialised."""

    def rows(dtype: torch.dtype | None) -> Tensor:
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    s = None if residual is None else rows(torch.promote_types(x.dtype, residual.dtype))
    scales_shape = (*x.shape[:-1], x.shape[-1] // 128 if o.quantize == 2 else 1)
    stats_dtype = torch.float64 if torch.float64 in (x.dtype, None if s is None else s.dtype) else torch.float32
    return (
        rows(o.dtype) if o.keep_y else None,
        s,
        rows(torch.uint8) if o.quantize else None,
        torch.ones(scales_shape, dtype=torch.float32, device=x.device) if o.quantize else None,
        x.new_zeros((1 + o.has_mean + o.stable, *x.shape[:-1]), dtype=stats_dtype),
    )


def _all(results: Results, x: Tensor) -> Five:
    dtypes = x.dtype, x.dtype, torch.uint8, torch.float32, torch.float32
    every = (x.new_empty(0, dtype=dtype) if t is None else t for t, dtype in zip(results, dtypes, strict=True))
    return tuple(every)  # type: ignore[return-value]


def _forward_all(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool, sigmoid: bool,
    quantize: int, dtype: torch.dtype | None, keep_y: bool,
) -> Five:  # fmt: skip
    options = eps, offset, has_mean, stable, twice, gate_first, sigmoid, quantize, dtype, keep_y
    return _all(_forward(x, residual, gate, weight, bias, options), x)


def _backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, options: tuple[Any, ...], x_dtype: torch.dtype, needs: tuple[bool, ...],
) -> Results:  # fmt: skip
    """Return dx, dz, dw and db, and where x is a sum, dx in the dtype of what was added; None if not needed."""
    o, need = Options(*options), Needs(*needs)
    if not x.numel():
        empty = zip((x, gate, weight, bias), need, strict=True)
        dx, dz, dw, db = (None if t is None or not wanted else t.new_zeros(t.shape) for t, wanted in empty)
        return dx, dz, dw, db, None
    # the kernels and torch's operator read memory by address; a batching rule may pass a strided view
    stats = stats.contiguous()
    if _on_triton(x, gate):
        from . import launch

        table = shared_table(x, weight, bias)
        if launch.has_backward(x, dy, gate, table, o.stable):
            return launch.backward(dy, ds, x, gate, stats, weight, bias, table, o, x_dtype, need)
    return *torch_path.backward(dy, ds, x, gate, stats, weight, bias, o, need), None


def _backward_all(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool,
    sigmoid: bool, quantize: int, dtype: torch.dtype | None, keep_y: bool, x_dtype: torch.dtype, need_x: bool,
    need_z: bool, need_w: bool, need_b: bool,
) -> Five:  # fmt: skip
    options = eps, offset, has_mean, stable, twice, gate_first, sigmoid, quantize, dtype, keep_y
    needs = need_x, need_z, need_w, need_b
    *gradients, copy = _backward(dy, ds, x, gate, stats, weight, bias, options, x_dtype, needs)
    # an operator has the same results for every width: a copy of dx that no kernel has written is made here
    if copy is None and gradients[0] is not None and x_dtype != x.dtype:
        copy = gradients[0].to(x_dtype)
    dtypes = (*((x if t is None else t).dtype for t in (x, gate, weight, bias)), x_dtype)
    every = zip((*gradients, copy), dtypes, strict=True)
    return tuple(x.new_empty(0, dtype=dtype) if t is None else t for t, dtype in every)  # type: ignore[return-value]


forward_op = register("norm", _forward_all, forward_ways)
backward_op = register("norm_backward", _backward_all, backward_ways)


@register_fake(forward_op)
def _fake(x: Tensor, residual: Tensor | None, *rest: Any) -> Five:
    gate, weight, bias, *options = rest
    check_arguments(x, residual, gate, weight, bias, tuple(options))
    return _all(_shapes(x, residual, Options(*options)), x)


@register_fake(backward_op)
def _fake_backward(dy: Tensor, ds: Tensor | None, x: Tensor, *rest: Any) -> Five:
    gate, _, weight, bias, *_, x_dtype, need_x, need_z, need_w, need_b = rest
    copy = x.new_empty(x.shape if need_x and x_dtype != x.dtype else 0, dtype=x_dtype)
    wanted = zip((x, gate, weight, bias), (need_x, need_z, need_w, need_b), strict=True)
    gradients = (
        x.new_empty(0 if t is None or not need else t.shape, dtype=(x if t is None else t).dtype) for t, need in wanted
    )
    return *gradients, copy  # type: ignore[return-value]


def _public(results: Results) -> Any:
    """Return y; (y, s); or, of a call in 8 bits and of the operator, y, s, codes and scales."""
    y, s, codes, *_ = results
    if codes is not None:
        return results[:4]
    return y if s is None else (y, s)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    x, residual, gate, weight, bias, *options = inputs
    # an eager call has them in one tuple, the operator each by itself
    ctx.options = options[0] if len(options) == 1 else tuple(options)
    ctx.n_options = len(options)
    ctx.set_materialize_grads(False)
    if output[3] is not None:
        ctx.mark_non_differentiable(output[3])
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.save_for_backward(x if residual is None else output[1], gate, output[4], weight, bias)


def _gradients(ctx: Any, run: Any, dy: Tensor | None, ds: Tensor | None = None, *_: Any) -> tuple[Tensor | None, ...]:
    need_x, need_r, need_z, need_w, need_b, *_ = ctx.needs_input_grad
    x_dtype, r_dtype = ctx.dtypes
    dx = dr = dz = dw = db = None
    ds = None if r_dtype is None else ds
    # y that is in 8 bits alone has an empty tensor for its gradient
    if dy is not None and ctx.options[-1]:
        s, gate, stats, weight, bias = ctx.saved_tensors
        needs = need_x or need_r, need_z, need_w, need_b
        ds, dz, dw, db, copy = run(dy, ds, s, gate, stats, weight, bias, ctx.options, x_dtype, needs)
        dx = copy if needs[0] and x_dtype != s.dtype else None
    # x and residual have the same gradient: one tensor for both, as torch.add returns
    if ds is not None:
        if need_x and dx is None:
            dx = ds if ds.dtype == x_dtype else ds.to(x_dtype)
        if need_r:
            dr = ds.to(r_dtype)
    rows = dx if need_x else None, dr, dz if need_z else None
    return *rows, dw if need_w else None, db if need_b else None, *(None,) * ctx.n_options


def _vmap_forward(size: int, in_dims: InDims, *args: Any) -> Any:
    """Treat the batch as more rows; None (no rule) if weight or bias is batched."""
    if in_dims[3] is not None or in_dims[4] is not None:
        return None
    rows = [None if t is None else batch_first(t, d, size) for t, d in zip(args[:3], in_dims, strict=False)]
    options = Options(*args[5:])
    # a result that is left out is empty in each element of the batch
    present = options.keep_y, rows[1] is not None, options.quantize, options.quantize, True
    results = zip(forward_op(*rows, *args[3:]), present, strict=True)
    return tuple(t if yes else t.new_empty((size, 0)) for t, yes in results), (0, 0, 0, 0, 1)


def _vmap_backward(
    size: int, in_dims: InDims, dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor,
    *rest: Any,
) -> Any:  # fmt: skip
    """Treat the batch as more rows; None (no rule) if dw or db is needed: each batch element has its own."""
    need_x, need_z, need_w, need_b = rest[-4:]
    if in_dims[5] is not None or in_dims[6] is not None or need_w or need_b or not (need_x or need_z):
        return None
    rows = [None if t is None else batch_first(t, d, size) for t, d in zip((dy, ds, x, gate), in_dims, strict=False)]
    x_dtype = rest[-5]
    present = need_x, need_z, False, False, need_x and x_dtype != x.dtype
    gradients = backward_op(*rows, batch_first(stats, in_dims[4], size).movedim(0, 1), *rest)
    return gradients, tuple(0 if yes else None for yes in present)


def _infer(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: tuple[Any, ...],
) -> Any:  # fmt: skip
    return _public(_forward(x, residual, gate, weight, bias, options, False))


norm: Callable[..., Any] = bind(
    name="layer_norm, rms_norm",
    forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op, check=check_arguments,
    inference=_infer, save=_save, gradients=_gradients, public=_public, replay=True, native=torch_path.native,
    vmap_forward=_vmap_forward, vmap_backward=_vmap_backward,
)  # fmt: skip


Scaled = Literal["row", "block"]
Activation = Literal["silu", "sigmoid"]
Rounding = Literal["once", "twice"]
# an int or a sequence is the normalized_shape of a call as torch's
Weight = Tensor | int | Sequence[int] | None
_SHAPES = (tuple, list, int, torch.SymInt)


class Quantized(NamedTuple):
    """A norm in 8 bits, y ≈ values · scales, made with ``quantize=``.

    Attributes:
        values: ``(..., N)`` in ``float8_e4m3fn``.
        scales: fp32, ``(..., 1)`` or ``(..., N / 128)``: of rows or of blocks of 128 columns.
        y: the norm itself, if ``out_dtype`` names its dtype; values and scales are made from it, and gradients flow
            through it alone.
    """

    values: Tensor
    scales: Tensor
    y: Tensor | None


def _with_options(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool,
    stable: bool, rounding: str, residual: Tensor | None, gate: Tensor | None, gate_first: bool, gate_act: str,
    groups: int, quantize: str | None, out_dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    if rounding not in ("once", "twice"):
        raise ValueError(f"{op}: rounding must be 'once' or 'twice', got {rounding!r}")
    if quantize not in QUANTIZE:
        raise ValueError(f"{op}: quantize must be 'row', 'block' or None, got {quantize!r}")
    if gate_act not in ("silu", "sigmoid"):
        raise ValueError(f"{op}: gate_act must be 'silu' or 'sigmoid', got {gate_act!r}")
    if gate is None and (gate_first or gate_act != "silu"):
        raise ValueError(f"{op}: {'gate_first' if gate_first else 'gate_act'} needs a gate")
    if groups != 1:
        x, (weight, bias, residual, gate) = grouped(op, groups, x, weight, bias, residual, gate, quantize)
    keep_y = quantize is None or out_dtype is not None
    options = Options(
        eps, offset, has_mean, stable, rounding == "twice", gate_first, gate_act == "sigmoid",
        QUANTIZE.index(quantize), out_dtype, keep_y,
    )  # fmt: skip
    results = norm(x, residual, gate, weight, bias, tuple(options))
    if quantize is not None:
        y, s, codes, scales = results
        quantized = Quantized(codes.view(torch.float8_e4m3fn), scales, y if keep_y else None)
        return quantized if residual is None else (quantized, s)
    out = _y_and_s(results, residual)
    if groups == 1:
        return out
    return out.flatten(-2) if residual is None else tuple(t.flatten(-2) for t in out)


def _y_and_s(results: Any, residual: Tensor | None) -> Any:
    """Return y, or with a residual (y, s); the operator has four results."""
    if residual is None:
        return results if isinstance(results, Tensor) else results[0]
    return results[:2]


def _no_options(
    gate: Tensor | None, gate_first: bool, gate_act: str, groups: int, quantize: str | None,
    out_dtype: torch.dtype | None,
) -> bool:  # fmt: skip
    gated = gate is not None or gate_first or gate_act != "silu"
    return not gated and quantize is None and out_dtype is None and groups == 1


def _one_weight(weight: Tensor | None, bias: Tensor | None) -> bool:
    # a value that is not a tensor raises later
    return getattr(weight, "ndim", 1) == 1 and getattr(bias, "ndim", 1) == 1


def _decomposes() -> bool:
    """Return whether a compiler sees this call and takes it as torch's operations; see COMPILED."""
    return COMPILED == "torch" and torch.compiler.is_compiling()


def _contiguous(results: Any) -> Any:
    """Return torch's results with the strides of the kernels', so that a view of them fits compiled or not."""
    return tuple(t.contiguous() for t in results) if isinstance(results, tuple) else results.contiguous()


def _as_torchs(
    op: str, x: Tensor, weight: Any, bias: Any, more: tuple[Any, ...], eps: float | None
) -> tuple[int, Tensor | None, Tensor | None, float | None]:
    """Return over how many dimensions a call as torch's goes, weight, bias and eps, or say how to write it."""
    if not isinstance(weight, _SHAPES):
        given, kind = next((n for n in (*more, bias) if isinstance(n, float)), "..."), type(weight).__name__
        keywords = f"{op}: options are keywords: write {op}(x, weight, bias, eps={given}), or as torch"
        raise TypeError(f"{keywords} {op}(x, (n,), weight); weight is of type {kind}")
    check.floating(op, "x", x)
    shape = tuple(weight) if isinstance(weight, (tuple, list)) else (weight,)
    if not all(isinstance(n, (int, torch.SymInt)) for n in shape):
        check.tensor(op, "weight", weight)
    if not shape or shape != x.shape[-len(shape) :]:
        raise ValueError(f"{op}: x must end in normalized_shape {shape}, got {tuple(x.shape)}")
    more = (None, *more) if op == "rms_norm" else more
    if len(more) > 2:
        raise TypeError(f"{op}: too many positional arguments; options are keywords")
    return len(shape), bias, more[0] if more else None, more[1] if len(more) > 1 else eps


def _over_last(n: int, norm: Callable[..., Any], x: Tensor, *others: Tensor | None, **options: Any) -> Any:
    """Return a norm over the last n dimensions, which it takes as one."""
    flat, (weight, bias, residual, gate) = flattened(norm.__name__, n, x, *others)
    vectors = (weight,) if bias is None else (weight, bias)
    found = norm(flat, flat.shape[-1:], *vectors, residual=residual, gate=gate, **options)
    # scales of rows in 8 bits stay as they are
    return tree_map(lambda t: t.view(x.shape) if t is not None and t.shape == flat.shape else t, found)


@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: None = ..., gate: Tensor | None = ..., gate_first: bool = ...,
    gate_act: Activation = ..., groups: int = ..., quantize: None = ..., out_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: Tensor, gate: Tensor | None = ..., gate_first: bool = ...,
    gate_act: Activation = ..., groups: int = ..., quantize: None = ..., out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: None = ..., gate: Tensor | None = ..., gate_first: bool = ...,
    gate_act: Activation = ..., groups: int = ..., quantize: Scaled, out_dtype: torch.dtype | None = ...,
) -> Quantized: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: Tensor, gate: Tensor | None = ..., gate_first: bool = ...,
    gate_act: Activation = ..., groups: int = ..., quantize: Scaled, out_dtype: torch.dtype | None = ...,
) -> tuple[Quantized, Tensor]: ...  # fmt: skip
def layer_norm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *more: Any,
    eps: float = 1e-5,
    offset: float = 0.0,
    stable: bool = False,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    gate_act: Activation = "silu",
    groups: int = 1,
    quantize: Scaled | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    r"""Normalise each row of the last dimension by its mean and variance, in one pass over ``x``.

    .. math:: y = (w + \mathrm{offset})\,\frac{s - \mathrm{mean}(s)}{\sqrt{\mathrm{var}(s) + \varepsilon\, m^2}} + b,
        \qquad s = x \;(+\ \mathrm{residual})

    with :math:`m = 1`. ``stable=True`` sets :math:`m = \max(s)`, which normalises :math:`s/m` and keeps rows of huge
    activations in range. :math:`\max(s) \le 0` would flip the sign of the row or divide by zero; such a row has
    :math:`m = \max|s|`, and a row of zeros has m = 1. Statistics are in fp32 (fp64 for fp64 inputs).

    The adaptive norm of diffusion transformers is ``layer_norm(x, scale[:, None], shift[:, None], offset=1.0)``. Calls
    as torch's, ``layer_norm(x, normalized_shape, weight, bias, eps)``, work too, also over several last dimensions.

    A row of one value v is the bias exactly, on a GPU if fp32 holds N·v and one program the row (16384 columns). Else
    the mean may be off by its rounding, and y by :math:`|w v|\,2^{-23}/\sqrt{\varepsilon}`.

    Args:
        x: ``(..., N)``, fp32, fp16, bf16 or fp64, any strides.
        weight: ``(N,)`` or None; any of these dtypes, also another than that of x. Rows may have different weights: any
            shape that broadcasts to x from neighbouring dimensions, such as ``(heads, N)`` or ``(batch, 1, N)``.
        bias: like weight; if both are given they have one shape.
        *more: bias and eps of a call as torch's.
        eps: added to the variance; ≥ 0, but in a call as torch's.
        offset: added to the weight (1.0 for a model that stores weight − 1); ignored without weight.
        stable: normalise :math:`s/m` instead of :math:`s`; not with a gate.
        residual: ``(..., N)`` or None; added to x first, and the sum is returned too.
        gate: ``(..., N)`` or None; y is multiplied by silu(gate), or with ``gate_first`` s before the norm.
        gate_first: the gate multiplies s, not y.
        gate_act: ``"silu"``, or ``"sigmoid"``, which multiplies by sigmoid(gate) (Kimi Linear).
        groups: number of groups of neighbouring columns in a row, each with its own statistics.
        quantize: return y in e4m3 with fp32 scales, one for each ``"row"`` or ``"block"`` of 128 columns; a scale maps
            the largest number to 448.
        out_dtype: of y; None: that of x. With ``quantize`` y is returned beside its 8-bit form only if this is given.

    Returns:
        y, of the shape of ``x``; with ``residual`` the pair ``(y, s)``, where s has the dtype of ``x + residual``;
        with ``quantize`` a `Quantized` in the place of y.

    Gradients flow to x, residual, gate, weight and bias, through y and s. Backward computes only the needed ones, and
    repeats them bit for bit from run to run. It keeps x (or s), the gate and 8 bytes per row, 12 if stable. On a GPU,
    options that rows wider than 16384 columns (backward: 8192) have no kernel for run as torch operations.

    Raises:
        TypeError: a tensor is not floating-point, or eps is not a number.
        ValueError: shapes don't fit, eps is negative, an option is unknown or does not go with another, or the tensors
            are on different devices.
        NotImplementedError: for a forward-mode derivative; for a second derivative, unless torch's own operator
            computed y (some plain eager calls on a CPU).

    Source: Ba, Kiros, Hinton 2016, arXiv:1607.06450; ``stable`` is the option of triton-transformer, after CogView,
    arXiv:2105.13290; adaptive norms: Peebles, Xie 2022, arXiv:2212.09748.

    Example:
        >>> import torch, onepass
        >>> onepass.layer_norm(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
        tensor([[-1.0000,  1.0000],
                [ 0.0000,  0.0000]])
        >>> y, s = onepass.layer_norm(torch.ones(2), residual=torch.tensor([0.0, 2.0]))
        >>> s
        tensor([1., 3.])
    """
    if more or isinstance(weight, _SHAPES):
        n, weight, bias, torchs_eps = _as_torchs("layer_norm", x, weight, bias, more, eps)
        eps = eps if torchs_eps is None else torchs_eps
        if n > 1:
            return _over_last(
                n, layer_norm, x, weight, bias, residual, gate, eps=eps, offset=offset, stable=stable,
                gate_first=gate_first, gate_act=gate_act, groups=groups, quantize=quantize, out_dtype=out_dtype,
            )  # fmt: skip
    elif type(eps) is not float or not eps >= 0:
        check.not_negative("layer_norm", "eps", eps)
    offset = offset if type(offset) is float else check.number("layer_norm", "offset", offset)
    if _no_options(gate, gate_first, gate_act, groups, quantize, out_dtype):
        options = (eps, offset, True, stable, *NONE)
        if _decomposes() and not (stable or offset) and _one_weight(weight, bias):
            check_arguments(x, residual, None, weight, bias, options)
            return _contiguous(reference.layer_norm(x, weight, bias, eps=eps, residual=residual))
        return _y_and_s(norm(x, residual, None, weight, bias, options), residual)
    return _with_options(
        "layer_norm", x, weight, bias, eps, offset, True, stable, "once", residual, gate, gate_first,
        gate_act, groups, quantize, out_dtype,
    )  # fmt: skip


@overload
def rms_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float | None = ...,
    offset: float = ..., rounding: Rounding = ..., residual: None = ..., gate: Tensor | None = ...,
    gate_first: bool = ..., gate_act: Activation = ..., groups: int = ..., quantize: None = ...,
    out_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float | None = ...,
    offset: float = ..., rounding: Rounding = ..., residual: Tensor, gate: Tensor | None = ...,
    gate_first: bool = ..., gate_act: Activation = ..., groups: int = ..., quantize: None = ...,
    out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float | None = ...,
    offset: float = ..., rounding: Rounding = ..., residual: None = ..., gate: Tensor | None = ...,
    gate_first: bool = ..., gate_act: Activation = ..., groups: int = ..., quantize: Scaled,
    out_dtype: torch.dtype | None = ...,
) -> Quantized: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float | None = ...,
    offset: float = ..., rounding: Rounding = ..., residual: Tensor, gate: Tensor | None = ...,
    gate_first: bool = ..., gate_act: Activation = ..., groups: int = ..., quantize: Scaled,
    out_dtype: torch.dtype | None = ...,
) -> tuple[Quantized, Tensor]: ...  # fmt: skip
def rms_norm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *more: Any,
    eps: float | None = None,
    offset: float = 0.0,
    rounding: Rounding = "once",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    gate_act: Activation = "silu",
    groups: int = 1,
    quantize: Scaled | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    r"""Normalise each row of the last dimension by its root mean square, in one pass over ``x``.

    .. math:: y = (w + \mathrm{offset})\,\frac{s}{\sqrt{\mathrm{mean}(s^2) + \varepsilon}} + b, \qquad s = x
        \;(+\ \mathrm{residual})

    The mean of squares is in fp32 (fp64 for fp64 inputs). Calls as torch's, ``rms_norm(x, normalized_shape, weight,
    eps)``, work too, also over several last dimensions.

    Args:
        x: ``(..., N)``, fp32, fp16, bf16 or fp64, any strides.
        weight: as in `layer_norm`.
        bias: as in `layer_norm`.
        *more: eps of a call as torch's.
        eps: added to the mean of squares; as in `layer_norm`, or None: the machine epsilon of the statistics, as torch.
        offset: added to the weight (1.0 for a model that stores weight − 1); ignored without weight.
        rounding: ``"once"`` computes in fp32 and rounds y. ``"twice"`` rounds the normalised row to the dtype of x,
            then its product with the weight, as the RMS norms of Llama, Qwen and T5 do (docs/norms.md); not with an
            offset or a bias.
        residual: as in `layer_norm`.
        gate: as in `layer_norm`.
        gate_first: as in `layer_norm`.
        gate_act: as in `layer_norm`.
        groups: as in `layer_norm`.
        quantize: as in `layer_norm`.
        out_dtype: as in `layer_norm`.

    Returns:
        y, with ``residual`` the pair ``(y, s)``, as `layer_norm` does.

    Gradients and errors are those of `layer_norm`; backward keeps 4 bytes per row.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467; gates and groups: Dao, Gu 2024, arXiv:2405.21060.

    Example:
        >>> import torch, onepass
        >>> onepass.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), offset=1.0)
        tensor([0.8485, 2.2627])
        >>> onepass.rms_norm(torch.tensor([3.0, 4.0]), gate=torch.zeros(2))
        tensor([0., 0.])
    """
    if more or isinstance(weight, _SHAPES) or isinstance(bias, float):
        n, weight, bias, eps = _as_torchs("rms_norm", x, weight, bias, more, eps)
        if n > 1:
            return _over_last(
                n, rms_norm, x, weight, bias, residual, gate, eps=eps, offset=offset, rounding=rounding,
                gate_first=gate_first, gate_act=gate_act, groups=groups, quantize=quantize, out_dtype=out_dtype,
            )  # fmt: skip
    elif eps is not None and (type(eps) is not float or not eps >= 0):
        check.not_negative("rms_norm", "eps", eps)
    if eps is None:
        fp64 = torch.float64 in (getattr(x, "dtype", None), getattr(residual, "dtype", None))
        eps = 2.0**-52 if fp64 else 2.0**-23
    offset = offset if type(offset) is float else check.number("rms_norm", "offset", offset)
    if rounding == "once" and _no_options(gate, gate_first, gate_act, groups, quantize, out_dtype):
        options = (eps, offset, False, False, *NONE)
        if _decomposes() and _one_weight(weight, bias):
            check_arguments(x, residual, None, weight, bias, options)
            return _contiguous(reference.rms_norm(x, weight, bias, eps=eps, offset=offset, residual=residual))
        return _y_and_s(norm(x, residual, None, weight, bias, options), residual)
    return _with_options(
        "rms_norm", x, weight, bias, eps, offset, False, False, rounding, residual, gate, gate_first,
        gate_act, groups, quantize, out_dtype,
    )  # fmt: skip
