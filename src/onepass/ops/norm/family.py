"""The norms as one registered operator and its backward: implementations, shapes, autograd, batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import batch_first, bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake

from . import sharding, torch_path
from .options import Needs, Options, check_arguments, shared_table

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


forward_op = register("norm", _forward_all, sharding.forward)
backward_op = register("norm_backward", _backward_all, sharding.backward)


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
