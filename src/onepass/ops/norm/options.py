"""The norms' options, as one registered op: weights per row, gates, roundings, 8-bit results, other dtypes of y."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import batch_first, bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake

from . import sharding, torch_options
from .plain import backward, check_arguments, contiguous, empty_stats

# widest rows of `launch_options`: 16 elements per thread with a gate, whose values wait in registers beside the others
MAX_FORWARD_COLS, MAX_BACKWARD_COLS = 16384, 8192
QUANTIZE = (None, "row", "block")
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def table(shape: torch.Size, vector: Tensor | None) -> tuple[int, int] | None:
    """Return (repeat, entries) of a weight for x of `shape`: row i takes entry (i // repeat) % entries.

    None if the weight does not broadcast to x, or differs in dimensions of x that are not neighbours.
    """
    if vector is None:
        return 1, 1
    if not 1 <= vector.dim() <= len(shape) or vector.shape[-1] != shape[-1]:
        return None
    rows, own = shape[:-1], (1,) * (len(shape) - vector.dim()) + tuple(vector.shape[:-1])
    different = [d for d, size in enumerate(own) if size != 1]
    if not different:
        return 1, 1
    first, last = different[0], different[-1] + 1
    if own[first:last] != tuple(rows[first:last]):
        return None
    return math.prod(rows[last:]), math.prod(rows[first:last])


def grouped(op: str, groups: int, x: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return x, [weight, bias, residual, gate] with columns split into groups (..., groups, N / groups)."""
    *tensors, quant = rest
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"{op}: groups must be an int, got {type(groups).__name__}")
    if quant is not None:
        raise ValueError(f"{op}: quantize takes no groups")
    check.floating(op, "x", x)
    n_cols = x.shape[-1] if x.dim() else 0
    if groups < 1 or n_cols % groups:
        raise ValueError(f"{op}: groups must divide the {n_cols} columns of x, got {groups}")
    for name, t in zip(("weight", "bias", "residual", "gate"), tensors, strict=True):
        shape = (n_cols,) if name in ("weight", "bias") else tuple(x.shape)
        if t is not None:
            check.tensor(op, name, t)
            if tuple(t.shape) != shape:
                raise ValueError(f"{op}: with groups, {name} must be {shape}; got {tuple(t.shape)}")
    split = (groups, n_cols // groups)
    parts = [None if t is None else t.unflatten(-1, split) for t in tensors]
    return x.unflatten(-1, split), parts  # type: ignore[no-untyped-call]


def _check(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool, quant: int, dtype: torch.dtype,
    keep_y: bool,
) -> None:  # fmt: skip
    op = "layer_norm" if has_mean else "rms_norm"
    check_arguments(x, residual, None, None, eps, has_mean)
    shape = tuple(x.shape)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check.floating(op, name, vector)
            if table(x.shape, vector) is None:
                raise ValueError(
                    f"{op}: {name} must be ({shape[-1]},), the last dimension of x {shape}, or broadcast to x from "
                    f"neighbouring dimensions, as (heads, N) and (batch, 1, N) do; got {tuple(vector.shape)}"
                )
            check.same_device(op, name, vector, "x", x)
    if weight is not None and bias is not None and table(x.shape, weight) != table(x.shape, bias):
        raise ValueError(f"{op}: bias must have the shape of weight {tuple(weight.shape)}; got {tuple(bias.shape)}")
    if gate is not None:
        check.floating(op, "gate", gate)
        if gate.shape != x.shape:
            raise ValueError(f"{op}: gate must have the shape of x {shape}; got {tuple(gate.shape)}")
        check.same_device(op, "gate", gate, "x", x)
        if stable:
            raise ValueError(f"{op}: stable takes no gate")
        if quant:
            raise ValueError(f"{op}: quantize takes no gate")
    if quant == 2 and shape[-1] % 128:
        raise ValueError(f"{op}: quantize='block' needs rows of whole blocks of 128 columns, got {shape[-1]} columns")
    if twice and (offset or bias is not None):
        raise ValueError(f"{op}: rounding='twice' takes no {'offset' if offset else 'bias'}")
    if dtype not in check.FLOATS or (dtype == torch.float64 and x.dtype != dtype):
        accepted = "float32, float16 or bfloat16 (float64 for float64 x)"
        raise ValueError(f"{op}: out_dtype must be {accepted}, got {dtype}")


def _on_triton(x: Tensor, *others: Tensor | None) -> bool:
    return uses_triton(x) and not any(t is not None and t.dtype == torch.float64 for t in others)


def _in_every_kernel(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, offset: float,
    has_mean: bool, twice: bool, quant: int,
) -> bool:  # fmt: skip
    """Return whether the kernels of plain calls do, for every width: they read one weight, and write y of any dtype."""
    if gate is not None or twice or quant or (has_mean and offset):
        return False
    return all(table(x.shape, v) == (1, 1) for v in (weight, bias)) and _on_triton(x, residual)


def _forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool, quant: int, dtype: torch.dtype,
    keep_y: bool, keep: bool = True,
) -> Results:  # fmt: skip
    """Return y, s, e4m3 codes, scales and statistics; None for those that the options leave out."""
    if not x.numel():
        return _shapes(x, residual, has_mean, stable, quant, dtype, keep_y)
    vectors = contiguous(weight), contiguous(bias)
    if _in_every_kernel(x, residual, gate, weight, bias, offset, has_mean, twice, quant):
        from . import launch

        y, s, stats = launch.forward(x, residual, *vectors, eps, offset, has_mean, stable, keep, dtype)
        return y, s, None, None, stats
    if x.shape[-1] <= MAX_FORWARD_COLS and _on_triton(x, residual, gate, *vectors):
        from . import launch_options

        shared = table(x.shape, bias if weight is None else weight)
        assert shared is not None
        return launch_options.forward(
            x, residual, gate, *vectors, shared, eps, offset, has_mean, stable, twice, gate_first, quant, dtype,
            keep_y, keep,
        )  # fmt: skip
    s = x if residual is None else torch.add(x, residual).contiguous()
    y, coded, stats = torch_options.forward(
        x, s, gate, weight, bias, eps, offset, has_mean, stable, twice, gate_first, quant, dtype
    )
    codes, scales = (None, None) if coded is None else (coded[0].view(torch.uint8), coded[1])
    return y if keep_y else None, None if residual is None else s, codes, scales, stats


def _shapes(
    x: Tensor, residual: Tensor | None, has_mean: bool, stable: bool, quant: int, dtype: torch.dtype, keep_y: bool
) -> Results:
    """Return results of the right shapes: scales are 1, statistics 0, the others uninitialised."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device) if keep_y else None
    s = codes = scales = None
    if residual is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    if quant:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        shape = (*x.shape[:-1], x.shape[-1] // 128 if quant == 2 else 1)
        scales = torch.ones(shape, dtype=torch.float32, device=x.device)
    return y, s, codes, scales, empty_stats(x if s is None else s, has_mean, stable)


def _all(results: Results, like: Tensor) -> Five:
    """Return the results of an op, which cannot return None: those that are left out are empty tensors."""
    dtypes = like.dtype, like.dtype, torch.uint8, torch.float32, torch.float32
    empty = (like.new_empty(0, dtype=dtype) if t is None else t for t, dtype in zip(results, dtypes, strict=True))
    return tuple(empty)  # type: ignore[return-value]


def _forward_all(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool, quant: int, dtype: torch.dtype,
    keep_y: bool,
) -> Five:  # fmt: skip
    found = _forward(
        x, residual, gate, weight, bias, eps, offset, has_mean, stable, twice, gate_first, quant, dtype, keep_y
    )
    return _all(found, x)


def _backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool, gate_first: bool,
    x_dtype: torch.dtype, need_x: bool, need_z: bool, need_w: bool, need_b: bool,
) -> Results:  # fmt: skip
    """Return dx, dz, dw and db, and where x is a sum, dx in the dtype of what was added; None if not needed."""
    if not x.numel():
        dx, dz = (t.new_empty(t.shape) if t is not None and need else None for t, need in ((x, need_x), (gate, need_z)))
        dw, db = (
            t.new_zeros(t.shape) if t is not None and need else None for t, need in ((weight, need_w), (bias, need_b))
        )
        return dx, dz, dw, db, None
    shared = table(x.shape, bias if weight is None else weight)
    assert shared is not None
    # the kernels read memory by address; a batching rule may pass a strided view
    stats = stats.contiguous()
    fits = x.shape[-1] <= MAX_BACKWARD_COLS
    one_dtype = x_dtype == x.dtype or not need_x or not fits
    if gate is None and shared == (1, 1) and one_dtype and _on_triton(x, dy, ds, weight, bias):
        b_dtype = x.dtype if bias is None else bias.dtype
        dx, dw, db = backward(
            dy, ds, x, stats, weight, b_dtype, eps, offset, has_mean, stable, need_x, need_w, need_b
        )  # fmt: skip
        # of a weight (1, N); the kernels know (N,)
        return dx, None, _like(dw, weight), _like(db, bias), None
    if fits and _on_triton(x, dy, ds, gate, weight, bias):
        from . import launch_options

        return launch_options.backward(
            dy, ds, x, gate, stats, contiguous(weight), contiguous(bias), shared, eps, offset, has_mean, stable,
            gate_first, x_dtype, need_x, need_z, need_w, need_b,
        )  # fmt: skip
    found = torch_options.backward(
        dy, ds, x, gate, stats, weight, bias, eps, offset, has_mean, stable, gate_first, need_x, need_z, need_w, need_b
    )
    return *found, None


def _like(gradient: Tensor | None, t: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or t is None or gradient.dim() == t.dim() else gradient.view(t.shape)


def _backward_all(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool, gate_first: bool,
    x_dtype: torch.dtype, need_x: bool, need_z: bool, need_w: bool, need_b: bool,
) -> Five:  # fmt: skip
    """Do `_backward` as an op: gradients that are not needed are empty tensors, since an op cannot return None."""
    found = _backward(
        dy, ds, x, gate, stats, weight, bias, eps, offset, has_mean, stable, gate_first, x_dtype, need_x, need_z,
        need_w, need_b,
    )  # fmt: skip
    dtypes = (*((x if t is None else t).dtype for t in (x, gate, weight, bias)), x_dtype)
    # an op has the same outputs for every width: a copy of dx that no kernel has written is made here
    if found[4] is None and found[0] is not None and x_dtype != x.dtype:
        found = *found[:4], found[0].to(x_dtype)
    return tuple(x.new_empty(0, dtype=d) if g is None else g for g, d in zip(found, dtypes, strict=True))  # type: ignore[return-value]


forward_op = register("norm_options", _forward_all, sharding.options)
backward_op = register("norm_options_backward", _backward_all, sharding.options_backward)


@register_fake(forward_op)
def _fake(*arguments: Any) -> Five:
    _check(*arguments)
    x, residual, *_, has_mean, stable, _twice, _first, quant, dtype, keep_y = arguments
    return _all(_shapes(x, residual, has_mean, stable, quant, dtype, keep_y), x)


@register_fake(backward_op)
def _fake_backward(dy: Tensor, ds: Tensor | None, x: Tensor, *rest: Any) -> Five:
    gate, _, weight, bias, *_, x_dtype, need_x, need_z, need_w, need_b = rest
    copy = x.new_empty(x.shape if need_x and x_dtype != x.dtype else 0, dtype=x_dtype)
    made = zip((x, gate, weight, bias), (need_x, need_z, need_w, need_b), strict=True)
    found = (
        x.new_empty(0 if t is None or not need else t.shape, dtype=(x if t is None else t).dtype) for t, need in made
    )
    return *found, copy  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    x, residual, gate, weight, bias, eps, offset, has_mean, stable, _, gate_first, *_ = inputs
    ctx.set_materialize_grads(False)
    if output[3] is not None:
        ctx.mark_non_differentiable(output[3])
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.has_y = inputs[-1]
    ctx.options = eps, offset, has_mean, stable, gate_first
    ctx.save_for_backward(x if residual is None else output[1], gate, output[4], weight, bias)


def _gradients(ctx: Any, run: Any, dy: Tensor | None, ds: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    need_x, need_r, need_z, need_w, need_b = ctx.needs_input_grad[:5]
    d, dz, dw, db, copy = None if ctx.dtypes[1] is None else ds, None, None, None, None
    if dy is not None and ctx.has_y:
        x, gate, stats, weight, bias = ctx.saved_tensors
        needs = need_x or need_r, need_z, need_w, need_b
        d, dz, dw, db, copy = run(dy, d, x, gate, stats, weight, bias, *ctx.options, ctx.dtypes[0], *needs)
        copy = copy if ctx.dtypes[0] != x.dtype and needs[0] else None
    # x and residual have the same gradient: one tensor for both, as torch.add returns
    dr = d.to(ctx.dtypes[1]) if need_r and d is not None else None
    dx = (d.to(ctx.dtypes[0]) if copy is None else copy) if need_x and d is not None else None
    return dx, dr, dz if need_z else None, dw if need_w else None, db if need_b else None, *(None,) * 9


InDims = tuple[int | None, ...]


def _vmap_forward(size: int, in_dims: InDims, *args: Any) -> Any:
    """Treat the batch as more rows; None (no rule) if weight or bias is batched."""
    if in_dims[3] is not None or in_dims[4] is not None:
        return None
    rows = [None if t is None else batch_first(t, d, size) for t, d in zip(args[:3], in_dims, strict=False)]
    quant, keep_y = args[-3], args[-1]
    found = forward_op(*rows, *args[3:])
    # a result that is left out is empty in each element of the batch
    there = keep_y, rows[1] is not None, quant, quant, True
    outs = (t if yes else t.new_empty((size, 0)) for t, yes in zip(found, there, strict=True))
    return tuple(outs), (0, 0, 0, 0, 1)


def _infer(*arguments: Any) -> tuple[Tensor | None, ...]:
    return _forward(*(*arguments, False))[:4]


call: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = bind(
    name="layer_norm, rms_norm",
    forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op, check=_check,
    save=_save, gradients=_gradients, n_public=4, inference=_infer, replay=True, vmap_forward=_vmap_forward,
)  # fmt: skip

__all__ = ["QUANTIZE", "backward_op", "call", "forward_op", "grouped"]
