"""`layer_norm` and `rms_norm` of one weight for all rows: argument checks, registration, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import batch_first, bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_fake

from . import sharding, torch_path


def check_arguments(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, has_mean: bool
) -> None:
    """Raise an error unless the arguments of a norm fit together; weight and bias are those of all rows."""
    op = "layer_norm" if has_mean else "rms_norm"
    check.floating(op, "x", x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least one dimension, got a 0-d tensor")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check.floating(op, name, vector)
            if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
                raise ValueError(
                    f"{op}: {name} must be ({x.shape[-1]},), the last dimension of x {tuple(x.shape)}; "
                    f"got {tuple(vector.shape)}"
                )
            check.same_device(op, name, vector, "x", x)
    if residual is not None:
        check.floating(op, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(f"{op}: residual must have the shape of x {tuple(x.shape)}; got {tuple(residual.shape)}")
        check.same_device(op, "residual", residual, "x", x)
    check.not_negative(op, "eps", eps)


def _on_triton(x: Tensor, residual: Tensor | None) -> bool:
    return uses_triton(x) and (residual is None or residual.dtype != torch.float64)


def empty_stats(x: Tensor, has_mean: bool, stable: bool) -> Tensor:
    """Return the statistics of x without elements, or their shape."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_zeros((1 + has_mean + stable, *x.shape[:-1]), dtype=dtype)


def contiguous(v: Tensor | None) -> Tensor | None:
    """Return a weight or bias as the kernels read it."""
    return v if v is None or v.is_contiguous() else v.contiguous()


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool
) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), empty_stats(x, has_mean, stable)
    if not uses_triton(x):
        return torch_path.forward(x, weight, bias, eps, offset, has_mean, stable, x.dtype)
    from . import launch

    y, _, stats = launch.forward(x, None, contiguous(weight), contiguous(bias), eps, offset, has_mean, stable)
    assert stats is not None
    return y, stats


def _infer(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool
) -> Tensor:
    if not (x.numel() and uses_triton(x)):
        return _forward(x, weight, bias, eps, offset, has_mean, stable)[0]
    from . import launch

    return launch.forward(x, None, contiguous(weight), contiguous(bias), eps, offset, has_mean, stable, keep=False)[0]


def _forward_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if x.numel() and _on_triton(x, residual):
        from . import launch

        y, s, stats = launch.forward(x, residual, contiguous(weight), contiguous(bias), eps, offset, has_mean, stable)
        assert s is not None
        assert stats is not None
        return y, s, stats
    s = torch.add(x, residual).contiguous()
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device), s, empty_stats(s, has_mean, stable)
    y, stats = torch_path.forward(s, weight, bias, eps, offset, has_mean, stable, x.dtype)
    return y, s, stats


def _infer_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if not (x.numel() and _on_triton(x, residual)):
        return _forward_residual(x, residual, weight, bias, eps, offset, has_mean, stable)[:2]
    from . import launch

    vectors = contiguous(weight), contiguous(bias)
    return launch.forward(x, residual, *vectors, eps, offset, has_mean, stable, keep=False)[:2]


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias_dtype: torch.dtype,
    eps: float, offset: float, has_mean: bool, stable: bool, need_x: bool, need_w: bool, need_b: bool,
) -> torch_path.Gradients:  # fmt: skip
    """Return dx in the dtype of x, dw in that of weight, db in `bias_dtype`; None for those not needed."""
    w_dtype = x.dtype if weight is None else weight.dtype
    if not x.numel():
        n = x.shape[-1]
        return (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None,
            x.new_zeros(n, dtype=w_dtype) if need_w else None,
            x.new_zeros(n, dtype=bias_dtype) if need_b else None,
        )
    # the kernels and torch's operator read memory by address; a batching rule may pass a strided view
    stats = stats.contiguous()
    if uses_triton(x):
        from . import launch

        if launch.has_backward(x, dy, stable):
            return launch.backward(
                dy, ds, x, stats, contiguous(weight), bias_dtype, eps, offset, has_mean, stable, need_x, need_w, need_b
            )
    needs = (need_x, need_w, need_b)
    rows = stats.view(len(stats), -1)
    dx, dw, db = torch_path.backward(dy, ds, x, rows, weight, eps, offset, has_mean, stable, needs)
    return dx, None if dw is None else dw.to(w_dtype), None if db is None else db.to(bias_dtype)


def _backward_all(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias_dtype: torch.dtype,
    eps: float, offset: float, has_mean: bool, stable: bool, need_x: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Do `backward` as an op: gradients that are not needed are empty tensors, since an op cannot return None."""
    dx, dw, db = backward(
        dy, ds, x, stats, weight, bias_dtype, eps, offset, has_mean, stable, need_x, need_w, need_b
    )  # fmt: skip
    return (
        x.new_empty(0) if dx is None else dx,
        x.new_empty(0, dtype=x.dtype if weight is None else weight.dtype) if dw is None else dw,
        x.new_empty(0, dtype=bias_dtype) if db is None else db,
    )


forward_op = register("norm", _forward, sharding.forward)
forward_residual_op = register("norm_residual", _forward_residual, sharding.forward_residual)
backward_op = register("norm_backward", _backward_all, sharding.backward)


@register_fake(forward_op)
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool
) -> tuple[Tensor, Tensor]:
    check_arguments(x, None, weight, bias, eps, has_mean)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), empty_stats(x, has_mean, stable)


@register_fake(forward_residual_op)
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_arguments(x, residual, weight, bias, eps, has_mean)
    s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, s, empty_stats(s, has_mean, stable)


@register_fake(backward_op)
def _(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias_dtype: torch.dtype, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    n, (need_x, need_w, need_b) = x.shape[-1], rest[-3:]
    return (
        torch.empty(x.shape if need_x else (0,), dtype=x.dtype, device=x.device),
        x.new_empty(n if need_w else 0, dtype=x.dtype if weight is None else weight.dtype),
        x.new_empty(n if need_b else 0, dtype=bias_dtype),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype
    ctx.save_for_backward(x, output[1], weight)


def _gradients(ctx: Any, run: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, stats, weight = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    dx, dw, db = run(dy, None, x, stats, weight, ctx.bias_dtype, *ctx.options, need_x, need_w, need_b)
    return dx if need_x else None, dw if need_w else None, db if need_b else None, None, None, None, None


def _save_residual(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype
    ctx.save_for_backward(output[1], output[2], weight)


def _gradients_residual(ctx: Any, run: Any, dy: Tensor | None, ds: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    need_x, need_r, need_w, need_b = ctx.needs_input_grad[:4]
    d, dw, db = ds, None, None
    if dy is not None:
        s, stats, weight = ctx.saved_tensors
        need_s = need_x or need_r
        d, dw, db = run(dy, ds, s, stats, weight, ctx.bias_dtype, *ctx.options, need_s, need_w, need_b)
    # x and residual have the same gradient: one tensor for both, as torch.add returns
    dx, dr = (d.to(t) if need and d is not None else None for t, need in zip(ctx.dtypes, (need_x, need_r), strict=True))
    return dx, dr, dw if need_w else None, db if need_b else None, None, None, None, None


InDims = tuple[int | None, ...]


def _vmap_forward(
    size: int, in_dims: InDims, x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any
) -> Any:
    """Treat the batch as more rows; None (no rule) if weight or bias is batched."""
    if in_dims[1] is not None or in_dims[2] is not None:
        return None
    return forward_op(batch_first(x, in_dims[0], size), weight, bias, *options), (0, 1)


def _vmap_backward(
    size: int, in_dims: InDims, dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None,
    *options: Any,
) -> Any:  # fmt: skip
    """Treat the batch as more rows; None (no rule) if dw or db is needed: each batch element has its own."""
    need_x, need_w, need_b = options[-3:]
    if in_dims[4] is not None or need_w or need_b or not need_x:
        return None
    dy, x = batch_first(dy, in_dims[0], size), batch_first(x, in_dims[2], size)
    ds = None if ds is None else batch_first(ds, in_dims[1], size)
    stats = batch_first(stats, in_dims[3], size).movedim(0, 1)
    return backward_op(dy, ds, x, stats, weight, *options), (0, None, None)


norm: Callable[..., Tensor] = bind(
    name="layer_norm, rms_norm",
    forward=_forward, forward_op=forward_op, backward=backward, backward_op=backward_op, inference=_infer,
    save=_save, gradients=_gradients, replay=True, native=torch_path.native,
    vmap_forward=_vmap_forward, vmap_backward=_vmap_backward,
    check=lambda x, weight, bias, eps, offset, has_mean, stable: check_arguments(x, None, weight, bias, eps, has_mean),
)  # fmt: skip
norm_residual: Callable[..., tuple[Tensor, Tensor]] = bind(
    name="layer_norm, rms_norm",
    forward=_forward_residual, forward_op=forward_residual_op, backward=backward, backward_op=backward_op,
    inference=_infer_residual, save=_save_residual, gradients=_gradients_residual, n_public=2, replay=True,
    vmap_backward=_vmap_backward,
    check=lambda x, residual, weight, bias, eps, offset, has_mean, stable: check_arguments(
        x, residual, weight, bias, eps, has_mean
    ),
)  # fmt: skip


__all__ = [
    "backward",
    "backward_op",
    "check_arguments",
    "contiguous",
    "empty_stats",
    "forward_op",
    "forward_residual_op",
    "norm",
    "norm_residual",
]
