"""`layer_norm` and `rms_norm`: one registered operator and its backward, and the public functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.launch import import_later, uses_triton
from onepass.core.register import register
from onepass.core.sharding import REPLICATE, Way, beside, gradient, row_dims
from onepass.ops._shared import arguments

from . import definition
from .definition import NONE, QUANTIZE, Needs, Options, Results, Table, table

_launch = import_later(".launch", __package__)
# how torch.compile and torch.export take norms without options: "torch" as torch's operations, which Inductor fuses
# with what stands beside them and whose calls take the host half as long; "kernels" as the kernels of eager
COMPILED = check.setting("ONEPASS_COMPILED_NORMS", "torch", "kernels")


def forward_ways(x: Any, residual: Any, gate: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, residual, gate, weight and bias, with y, s, e4m3 values, scales and statistics.

    Weights that differ between rows are sharded with them. A result that is left out is empty, the same everywhere.
    """
    options = Options(*rest)
    present = not options.quantize, residual is not None, options.quantize, options.quantize
    ways: list[Way] = []
    for d in row_dims(x):
        results = tuple(d if yes else REPLICATE for yes in present)
        ways.append(((*results, d + 1), (d, d, d, beside(weight, x.ndim, d), beside(bias, x.ndim, d))))
    return ways


def backward_ways(dy: Any, ds: Any, x: Any, gate: Any, stats: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard dy, ds, x, gate, statistics, weight and bias, with dx, dz, dw and db."""
    need_x, need_z, need_w, need_b = rest[-4:]
    ways: list[Way] = []
    for d in row_dims(x):
        w, b = beside(weight, x.ndim, d), beside(bias, x.ndim, d)
        results = gradient(d, need_x), gradient(d, need_z), gradient(w, need_w), gradient(b, need_b)
        ways.append((results, (d, d, d, d, d + 1, w, b)))
    return ways


def reshaped(op: str, n: int, groups: int, x: Tensor, *tensors: Tensor | None) -> list[Any]:
    """Return x, weight, bias, residual and gate with the last n dimensions of x as one, or as (groups, columns)."""
    arguments.whole(op, "groups", groups, 1)
    check.floating(op, "x", x)
    shape, vector = x.shape, x.shape[-n:]
    n_cols = math.prod(vector)
    if n_cols % groups:
        raise ValueError(f"{op}: groups must divide the {n_cols} columns of x, got {groups}")
    parts: list[Any] = []
    for name, t in zip(("x", "weight", "bias", "residual", "gate"), (x, *tensors), strict=True):
        if t is not None:
            check.floating(op, name, t)
            like, of_x = (vector, "") if name in ("weight", "bias") else (shape, " of x")
            if t.shape != like:
                when = "" if groups == 1 else "with groups, "
                raise ValueError(f"{op}: {when}{name} must have the shape{of_x} {tuple(like)}; got {tuple(t.shape)}")
            t = _whole(n, t)
            t = t if n == 1 else t.flatten(-n)
            t = t if groups == 1 else t.unflatten(-1, (groups, n_cols // groups))  # type: ignore[no-untyped-call]
        parts.append(t)
    return parts


def _whole(n: int, t: Any) -> Any:
    """Return a DTensor unsharded in its last n dimensions, another tensor as it is: torch 2.11 reshapes few shards."""
    if not (placements := getattr(t, "placements", ())):
        return t
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_shard() and p.dim % t.dim() >= t.dim() - n else p for p in placements]
    return t if whole == [*placements] else t.redistribute(placements=whole)  # whose backward needs a gradient


def check_arguments(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: Sequence[Any],
) -> None:  # fmt: skip
    """Raise an error unless the arguments of a norm fit together."""
    o = Options(*options)
    op = "layer_norm" if o.has_mean else "rms_norm"
    arguments.rows(op, "x", x)
    shape = tuple(x.shape)
    for name, t in (("weight", weight), ("bias", bias), ("residual", residual), ("gate", gate)):
        if t is None:
            continue
        check.floating(op, name, t)
        if name in ("residual", "gate"):
            if t.shape != x.shape:
                raise ValueError(f"{op}: {name} must have the shape of x {shape}; got {tuple(t.shape)}")
        elif table(x.shape, t) is None:
            raise ValueError(
                f"{op}: {name} must be ({shape[-1]},), the last dimension of x {shape}, or broadcast to x from "
                f"neighbouring dimensions, as (heads, N) and (batch, 1, N) do; got {tuple(t.shape)}"
            )
        check.same_device(op, name, t, "x", x)
    if weight is not None and bias is not None and table(x.shape, weight) != table(x.shape, bias):
        raise ValueError(f"{op}: bias must have the shape of weight {tuple(weight.shape)}; got {tuple(bias.shape)}")
    check.real(op, "eps", o.eps)
    if QUANTIZE[o.quantize] == "block" and shape[-1] % 128:
        raise ValueError(f"{op}: quantize='block' needs rows of whole blocks of 128 columns, got {shape[-1]} columns")
    if o.twice and (o.offset or bias is not None):
        raise ValueError(f"{op}: rounding='twice' takes no {'offset' if o.offset else 'bias'}")
    if o.dtype is not None and (o.dtype not in check.FLOATS or (o.dtype == torch.float64 and x.dtype != o.dtype)):
        accepted = "float32, float16 or bfloat16 (float64 for float64 x)"
        raise ValueError(f"{op}: out_dtype must be {accepted}, got {o.dtype}")


def _forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: Options, keep: bool = True,
) -> Results:  # fmt: skip
    """Return y, s, e4m3 codes, scales and statistics; None for those that the options leave out."""
    o = Options(*options)
    if not x.numel():
        return _shapes(x, residual, o)
    if uses_triton(x, residual, gate):
        weight_table: Any = table(x.shape, bias if weight is None else weight)
        if _launch().has_forward(x, gate, weight_table, o):
            return _launch().forward(x, residual, gate, weight, bias, weight_table, o, keep)  # type: ignore[no-any-return]
    if o.quantize:
        y, s, _, _, stats = _forward(x, residual, gate, weight, bias, o._replace(quantize=0))
        codes, scales = definition.to_e4m3(y, 128 if o.quantize == 2 else x.shape[-1])  # type: ignore[arg-type]
        return None, s, codes.view(torch.uint8), scales, stats
    s = x if residual is None else torch.add(x, residual).contiguous()
    # the definition's backward needs no statistics, but a team's does, for wide rows that were rounded twice
    stats = s.new_zeros((1 + o.has_mean + o.stable, *x.shape[:-1]), dtype=arguments.accumulator(s))

    def by_kernels(rows: Tensor, *_: Any) -> Any:
        plain = Options(o.eps, 0.0, o.has_mean, False, *NONE)
        results = _launch().forward(rows, None, None, None, None, Table(1, 1), plain)
        stats.copy_(results[4])  # type: ignore[arg-type]
        return results[0]

    normalise = by_kernels if uses_triton(s) and not o.stable else definition.normalised
    y = definition.forward(s, gate, weight, bias, o, x.dtype, normalise)
    return y, None if residual is None else s, None, None, stats


def _shapes(x: Tensor, residual: Tensor | None, o: Options) -> Results:
    """Return results of the right shapes: scales are 1, statistics 0, the others uninitialised."""
    y, s, codes, scales = definition.results(x, residual, o)
    stats = x.new_zeros((1 + o.has_mean + o.stable, *x.shape[:-1]), dtype=arguments.accumulator(x if s is None else s))
    return y, s, codes, None if scales is None else scales.fill_(1), stats


def _backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, options: Options, x_dtype: torch.dtype, needs: Needs,
) -> Results:  # fmt: skip
    """Return dx, dz, dw and db, and where x is a sum, dx in the dtype of what was added; None if not needed."""
    o, need = Options(*options), Needs(*needs)
    if not x.numel():
        inputs = zip((x, gate, weight, bias), need, strict=True)
        dx, dz, dw, db = (None if t is None or not needed else t.new_zeros(t.shape) for t, needed in inputs)
        return dx, dz, dw, db, None
    if uses_triton(x, gate):
        weight_table: Any = table(x.shape, bias if weight is None else weight)
        if _launch().has_backward(x, max(x.element_size(), dy.element_size()), gate, weight_table, o.stable):
            # kernels read memory by address; a batching rule may pass a strided view
            stats = stats.contiguous()
            return _launch().backward(dy, ds, x, gate, stats, weight, bias, weight_table, o, x_dtype, need)  # type: ignore[no-any-return]
    return *definition.backward(dy, ds, x, gate, weight, bias, o, need), None  # type: ignore[return-value]


def _four_gradients(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, options: Options, x_dtype: torch.dtype, needs: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dx, dz, dw and db; not the second dx, which only the kernels of some widths write."""
    return _backward(dy, ds, x, gate, stats, weight, bias, options, x.dtype, needs)[:4]


def _fake(x: Tensor, residual: Tensor | None, *rest: Any) -> Results:
    gate, weight, bias, *options = rest
    check_arguments(x, residual, gate, weight, bias, options)
    return _shapes(x, residual, Options(*options))


def _fake_backward(dy: Tensor, ds: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    gate, _, weight, bias, *_ = rest
    inputs = zip((x, gate, weight, bias), rest[-4:], strict=True)
    return tuple(None if t is None or not need else t.new_empty(t.shape) for t, need in inputs)


forward_op = register("norm", _forward, _fake, forward_ways)
backward_op = register("norm_backward", _four_gradients, _fake_backward, backward_ways, results=4)


def _public(results: Results) -> Any:
    """Return y; (y, s); or (y, s, codes, scales) in 8 bits and from the registered operator."""
    y, s, codes, *_ = results
    return results[:4] if codes is not None else y if s is None else (y, s)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    x, residual, gate, weight, bias, *options = inputs
    # an eager call passes the options as one tuple, the operator one by one
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
    # 8-bit results have no gradient; the operator passes an empty tensor in the place of dy
    if dy is not None and not ctx.options[-1]:
        s, gate, stats, weight, bias = ctx.saved_tensors
        needs = need_x or need_r, need_z, need_w, need_b
        ds, dz, dw, db, *dx_cast = run(dy, ds, s, gate, stats, weight, bias, ctx.options, x_dtype, needs)
        dx = dx_cast[0] if dx_cast else None
    # x and residual have the same gradient: one tensor for both, as torch.add returns
    if ds is not None:
        if need_x and dx is None:
            dx = ds if ds.dtype == x_dtype else ds.to(x_dtype)
        if need_r:
            dr = ds.to(r_dtype)
    row_gradients = dx if need_x else None, dr, dz if need_z else None
    return *row_gradients, dw if need_w else None, db if need_b else None, *(None,) * ctx.n_options


norm: Callable[..., Any] = bind(
    name="layer_norm, rms_norm", rows=True,
    forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op, check=check_arguments,
    inference=lambda *args: _public(_forward(*args, False)),  # type: ignore[call-arg]
    save=_save, gradients=_gradients, public=_public, replay=True, native=definition.native,
)  # fmt: skip


Scaled = Literal["row", "block"]
Activation = Literal["silu", "sigmoid"]
Rounding = Literal["once", "twice"]
# an int or a sequence is the normalized_shape of a call as torch's
Weight = Tensor | int | Sequence[int] | None
_SHAPES = (tuple, list, int, torch.SymInt)


class Quantized(NamedTuple):
    """A norm in 8 bits, y ≈ values · scales, made with ``quantize=``; it has no gradient.

    Attributes:
        values: ``(..., N)`` in ``float8_e4m3fn``.
        scales: fp32, ``(..., 1)`` or ``(..., N / 128)``: of rows or of blocks of 128 columns.
    """

    values: Tensor
    scales: Tensor


def _decomposed(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: tuple[Any, ...],
) -> Any:  # fmt: skip
    """Return the norm as torch's operations if a compiler sees this call and takes it so (see COMPILED), else None."""
    if COMPILED != "torch" or not torch.compiler.is_compiling():
        return None
    _, offset, has_mean, stable, *rest = options
    if gate is not None or stable or (has_mean and offset) or tuple(rest) != NONE:
        return None
    # a value that is not a tensor raises later
    if getattr(weight, "ndim", 1) != 1 or getattr(bias, "ndim", 1) != 1:
        return None
    check_arguments(x, residual, None, weight, bias, options)
    s = x if residual is None else x + residual
    # contiguous like the kernels' results, so that a view works whether compiled or not
    y = definition.definition(s, None, weight, bias, Options(*options), x.dtype).contiguous()
    return y if residual is None else (y, s.contiguous())


def _call(
    op: str, n: int, x: Tensor, weight: Any, bias: Any, residual: Any, gate: Any, groups: int, eps: Any, offset: Any,
    *others: Any,
) -> Any:  # fmt: skip
    """Return a norm over the last n dimensions together, or over groups of columns; `others` are the last options."""
    if n > 1 or groups != 1:
        rows = reshaped(op, n, groups, x, weight, bias, residual, gate)
        # behind views autograd lets two leaves share one gradient, and then adds to it for both
        if residual is not None and x.is_leaf and residual.is_leaf and x.requires_grad and residual.requires_grad:
            rows[3] = rows[3] * 1
        outputs = _call(op, 1, *rows, 1, eps, offset, *others)
        if isinstance(outputs, Tensor):
            # groups alone: a view by a shape takes the host 1 µs longer
            return outputs.flatten(-2) if n == 1 else outputs.view(x.shape)
        # scales of rows in 8 bits stay as they are
        return tree_map(lambda t: t.view(x.shape) if t.shape == rows[0].shape else t, outputs)
    options = (eps, offset if type(offset) is float else check.number(op, "offset", offset), *others)
    if (outputs := _decomposed(x, residual, gate, weight, bias, options)) is not None:
        return outputs
    results = norm(x, residual, gate, weight, bias, options)
    if options[-1]:
        _, s, codes, scales = results
        quantized = Quantized(codes.view(torch.float8_e4m3fn), scales)
        return quantized if residual is None else (quantized, s)
    # the registered operator always has four results
    if residual is not None:
        return results[:2]
    return results if isinstance(results, Tensor) else results[0]


def _options(
    rounding: str, gate: Any, gate_first: bool, gate_act: str, groups: int, quantize: str | None, out_dtype: Any
) -> tuple[Any, ...]:
    """Check the options of rms_norm; return them in the order of `NONE`."""
    if rounding not in ("once", "twice"):
        raise ValueError(f"rms_norm: rounding must be 'once' or 'twice', got {rounding!r}")
    if quantize not in QUANTIZE:
        raise ValueError(f"rms_norm: quantize must be 'row', 'block' or None, got {quantize!r}")
    if gate_act not in ("silu", "sigmoid"):
        raise ValueError(f"rms_norm: gate_act must be 'silu' or 'sigmoid', got {gate_act!r}")
    if gate is None and (gate_first or gate_act != "silu"):
        raise ValueError(f"rms_norm: {'gate_first' if gate_first else 'gate_act'} needs a gate")
    if quantize is not None and (gate is not None or groups != 1):
        raise ValueError(f"rms_norm: quantize takes no {'groups' if gate is None else 'gate'}")
    if quantize is not None and out_dtype is not None:
        raise ValueError("rms_norm: quantize takes no out_dtype; y itself is another call, rms_norm(x, weight)")
    return rounding == "twice", gate_first, gate_act == "sigmoid", out_dtype, QUANTIZE.index(quantize)


def _as_torchs(
    op: str, x: Tensor, weight: Any, bias: Any, more: tuple[Any, ...], eps: float | None
) -> tuple[int, Tensor | None, Tensor | None, float | None]:
    """Return how many dimensions a call as torch's normalises, weight, bias and eps; or raise how to write it."""
    if not isinstance(weight, _SHAPES):
        eps_given, kind = next((n for n in (*more, bias) if isinstance(n, float)), "..."), type(weight).__name__
        message = f"{op}: options are keywords: write {op}(x, weight, bias, eps={eps_given}), or as torch"
        raise TypeError(f"{message} {op}(x, (n,), weight); weight is of type {kind}")
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


@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: None = ..., out_dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Weight = ..., bias: Tensor | None = ..., *more: Any, eps: float = ..., offset: float = ...,
    stable: bool = ..., residual: Tensor, out_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def layer_norm(
    x: Tensor,
    weight: Any = None,
    bias: Any = None,
    *more: Any,
    eps: float = 1e-5,
    offset: float = 0.0,
    stable: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Any,
) -> Any:
    r"""Normalise each row of the last dimension by its mean and variance, in one pass over ``x``.

    .. math:: y = (w + \mathrm{offset})\,\frac{s - \mathrm{mean}(s)}{\sqrt{\mathrm{var}(s) + \varepsilon\, m^2}} + b,
        \qquad s = x \;(+\ \mathrm{residual})

    with :math:`m = 1`. ``stable=True`` sets :math:`m = \max(s)`, which normalises :math:`s/m` and keeps rows of huge
    activations in range. :math:`\max(s) \le 0` would flip the sign of the row or divide by zero; such a row has
    :math:`m = \max|s|`, and a row of zeros has m = 1. Statistics are in fp32 (fp64 for fp64 inputs).

    The adaptive norm of diffusion transformers is ``layer_norm(x, scale[:, None], shift[:, None], offset=1.0)``. Calls
    as torch's, ``layer_norm(x, normalized_shape, weight, bias, eps)``, work too, also over several last dimensions.

    A row of one value v gives the bias exactly; on a GPU only if fp32 holds N·v and the row has at most 16384 columns.
    Else the mean may be off by its rounding, and y by :math:`|w v|\,2^{-23}/\sqrt{\varepsilon}`.

    Args:
        x: ``(..., N)``, fp32, fp16, bf16 or fp64, any strides.
        weight: ``(N,)`` or None; any of these dtypes, also another than that of x. Rows may have different weights: any
            shape that broadcasts to x from neighbouring dimensions, such as ``(heads, N)`` or ``(batch, 1, N)``.
        bias: like weight; if both are given they have one shape.
        *more: bias and eps of a call as torch's.
        eps: added to the variance; ≥ 0, except in a call as torch's.
        offset: added to the weight (1.0 for a model that stores weight − 1); ignored without weight.
        stable: normalise :math:`s/m` instead of :math:`s`.
        residual: ``(..., N)`` or None; added to x first, and the sum is returned too.
        out_dtype: dtype of y; None: that of x.
        **unknown: refused; gates, groups and 8 bits are options of `rms_norm`.

    Returns:
        y, of the shape of ``x``; with ``residual`` the pair ``(y, s)``, where s has the dtype of ``x + residual``.

    Gradients flow to x, residual, weight and bias, through y and s. Backward computes only the needed ones, and
    repeats them bit for bit from run to run. It keeps x (or s) and 8 bytes per row, 12 if stable. On a GPU, options
    without a kernel for rows wider than 16384 columns (backward: 8192) run as torch operations.

    Raises:
        TypeError: a tensor is not floating-point, eps is not a number, or an option is not one of these.
        ValueError: shapes don't fit, eps is negative, an option's value is unknown or does not go with another, or the
            tensors are on different devices.
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
    if unknown:
        hint = "it takes eps, offset, stable, residual, out_dtype; write rms_norm's other options as torch's operations"
        raise TypeError(f"layer_norm: there is no {next(iter(unknown))}=; {hint}")
    n = 1
    if more or isinstance(weight, _SHAPES):
        n, weight, bias, torchs_eps = _as_torchs("layer_norm", x, weight, bias, more, eps)
        eps = eps if torchs_eps is None else torchs_eps
    elif type(eps) is not float or not eps >= 0:
        check.not_negative("layer_norm", "eps", eps)
    others = True, bool(stable), False, False, False, out_dtype, 0  # has_mean, stable, then those of `NONE`
    return _call("layer_norm", n, x, weight, bias, residual, None, 1, eps, offset, *others)


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
        gate: ``(..., N)`` or None; y is multiplied by silu(gate), or with ``gate_first`` s before the norm.
        gate_first: the gate multiplies s, not y.
        gate_act: ``"silu"``, or ``"sigmoid"``, which multiplies by sigmoid(gate) (Kimi Linear).
        groups: number of groups of neighbouring columns in a row, each with its own statistics.
        quantize: return y in e4m3 with fp32 scales, one for each ``"row"`` or ``"block"`` of 128 columns; a scale maps
            the largest number to 448. No gradient flows through it.
        out_dtype: as in `layer_norm`; not with ``quantize``.

    Returns:
        y, with ``residual`` the pair ``(y, s)``, as `layer_norm` does; with ``quantize`` a `Quantized` in the place
        of y.

    Gradients and errors are those of `layer_norm`, also to the gate; backward keeps the gate and 4 bytes per row.

    Source: Zhang, Sennrich 2019, arXiv:1910.07467; gates and groups: Dao, Gu 2024, arXiv:2405.21060.

    Example:
        >>> import torch, onepass
        >>> onepass.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0]), offset=1.0)
        tensor([0.8485, 2.2627])
        >>> onepass.rms_norm(torch.tensor([3.0, 4.0]), gate=torch.zeros(2))
        tensor([0., 0.])
    """
    n = 1
    if more or isinstance(weight, _SHAPES) or isinstance(bias, float):
        n, weight, bias, eps = _as_torchs("rms_norm", x, weight, bias, more, eps)
    elif eps is not None and (type(eps) is not float or not eps >= 0):
        check.not_negative("rms_norm", "eps", eps)
    if eps is None:
        fp64 = torch.float64 in (getattr(x, "dtype", None), getattr(residual, "dtype", None))
        eps = 2.0**-52 if fp64 else 2.0**-23
    others: tuple[Any, ...] = NONE
    gated = gate is not None or gate_first or gate_act != "silu"
    if gated or rounding != "once" or quantize is not None or out_dtype is not None:
        others = _options(rounding, gate, gate_first, gate_act, groups, quantize, out_dtype)
    return _call("rms_norm", n, x, weight, bias, residual, gate, groups, eps, offset, False, False, *others)
