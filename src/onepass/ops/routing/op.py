"""`gather` and `scatter_add`: registration with the dispatcher, autograd, the public functions; `score` beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import bind
from onepass.core.eager import once, plain
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_backward, register_fake

from . import arguments, sharding, torch_path
from .arguments import MAX_VECTORS
from .op_score import score
from .rows import add_rows, scatter_backward


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    if not indices.numel() or not x.numel():
        return x.new_zeros((*indices.shape, x.shape[-1]))
    flat = indices.flatten(1)
    if uses_triton(x):
        from . import kernels_triton

        return kernels_triton.gather(x, flat.contiguous()).view(*indices.shape, x.shape[-1])  # type: ignore[no-any-return]
    return torch_path.gather(x, flat).view(*indices.shape, x.shape[-1])


def _gather_backward(dy: Tensor, indices: Tensor, n: int) -> Tensor:
    dx = dy.new_zeros((indices.shape[0] * n, dy.shape[-1]))
    add_rows(dx, dy, None, indices)
    return dx.view(indices.shape[0], n, dy.shape[-1])


gather_op = register("routing_gather", _gather, sharding.gather)
gather_backward_op = register("routing_gather_backward", _gather_backward, sharding.gather_backward)


@register_fake(gather_op)
def _(x: Tensor, indices: Tensor) -> Tensor:
    arguments.gather(x, indices)
    return x.new_empty((*indices.shape, x.shape[-1]))


@register_fake(gather_backward_op)
def _(dy: Tensor, indices: Tensor, n: int) -> Tensor:
    return dy.new_empty((indices.shape[0], n, dy.shape[-1]))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.n = inputs[0].shape[1]


def _gather_gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return run(dy, *ctx.saved_tensors, ctx.n), None


_call_gather = bind(
    name="gather",
    forward=_gather, forward_op=gather_op, backward=_gather_backward, backward_op=gather_backward_op,
    save=_save_gather, gradients=_gather_gradients,
)  # fmt: skip


def gather(x: Tensor, indices: Tensor) -> Tensor:
    r"""Rows of ``x`` by index: :math:`y_{bj} = x_{b\,i_{bj}}`, zeros where :math:`i_{bj}` names no token.

    Args:
        x: ``(batch, n, dim)``, fp32, fp16, bf16 or fp64, any strides.
        indices: ``(batch, k)`` or ``(batch, R, k)`` int64. −1, or anything else outside 0 … n−1, means "missing": it
            gives zeros and reads nothing. A token must not appear twice within a route (the last dimension): the
            gradient of a repeated one would be incomplete.

    Returns:
        ``(batch, k, dim)`` or ``(batch, R, k, dim)``, dtype of ``x``.

    The gradient of x is the same bit for bit from run to run; a token that several routes name gets their gradients one
    after another.

    Raises:
        TypeError: x is not a floating-point tensor, or indices is not int64.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import gather
        >>> gather(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[1, -1]]))
        tensor([[[3., 4.],
                 [0., 0.]]])
    """
    arguments.gather(x, indices)
    return _call_gather(x, indices)  # type: ignore[no-any-return]


def _scatter(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)
    add_rows(out.flatten(0, -2), update, gates, indices)
    return out


scatter_op = register("routing_scatter_add", _scatter, sharding.scatter_add)
scatter_backward_op = register_backward(
    "routing_scatter_add_backward", scatter_backward, sharding.scatter_add_backward, of=("update", "gates")
)


@register_fake(scatter_op)
def _(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    arguments.scatter_add(y, update, gates, indices)
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _scatter_gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    update, gates, indices = ctx.saved_tensors
    need_y, need_u, need_g = ctx.needs_input_grad[:3]
    du, dg = run(dy, update, gates, indices, need_u, need_g) if need_u or need_g else (None, None)
    return dy if need_y else None, du if need_u else None, dg if need_g else None, None


_call_scatter = bind(
    name="scatter_add",
    forward=_scatter, forward_op=scatter_op, backward=scatter_backward, backward_op=scatter_backward_op,
    save=_save_scatter, gradients=_scatter_gradients,
)  # fmt: skip


class _InPlace(torch.autograd.Function):
    """`scatter_add` that writes into y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
        add_rows(y.flatten(0, -2), update, gates, indices)
        ctx.mark_dirty(y)
        ctx.save_for_backward(update, gates, indices)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _in_place_backward(ctx, dy)


_in_place_backward = once("scatter_add", lambda ctx, dy: _scatter_gradients(ctx, scatter_backward, dy))


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, *, inplace: bool = False) -> Tensor:
    r"""Add gated rows: :math:`y_{b\,i_{bj}} \mathrel{+}= g_{bj}\,u_{bj}`; all other rows stay as they are.

    Products and sums are in fp32 (fp64 if a tensor is), with one rounding per route to the dtype of y.

    Args:
        y: ``(batch, n, dim)``, or its rows ``(batch·n, dim)``; fp32, fp16, bf16 or fp64.
        update: u, ``(batch, k, dim)`` or ``(batch, R, k, dim)``, of any of these dtypes.
        gates: g, ``(batch, k)`` or ``(batch, R, k)``, of any of these dtypes; None: 1.
        indices: ``(batch, k)`` or ``(batch, R, k)`` int64. −1, or anything else outside 0 … n−1, is skipped. A token
            must not appear twice within a route; the routes are added one after another.
        inplace: allow overwriting y. Plain eager PyTorch then writes into y, if it is contiguous, and returns it. Such
            a y must not be a leaf that requires a gradient; pass the flat rows rather than a view of them, for which
            autograd copies the whole gradient. Under torch.compile and torch.func the result is a new tensor.

    Returns:
        The sum, shape and dtype of ``y``.

    The gradient of y is dy itself; those of update, :math:`g\,dy_i`, and of the gates, :math:`\langle dy_i,
    u\rangle`, come from one pass over the chosen rows. All are the same bit for bit from run to run.

    Raises:
        TypeError: a tensor is not floating-point, or indices is not int64.
        ValueError: shapes don't fit, or the tensors are on different devices.
        NotImplementedError: for second and forward-mode derivatives.

    Example:
        >>> import torch
        >>> from onepass.ops.routing.op import scatter_add
        >>> y, u = torch.zeros(1, 3, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
        >>> scatter_add(y, u, torch.tensor([[1.0, 0.5]]), torch.tensor([[2, 0]]))
        tensor([[[1.5000, 2.0000],
                 [0.0000, 0.0000],
                 [1.0000, 2.0000]]])
    """
    arguments.scatter_add(y, update, gates, indices)
    if inplace and plain(y, update, gates, indices) and y.is_contiguous():
        if torch.is_grad_enabled():
            return _InPlace.apply(y, update, gates, indices)  # type: ignore[no-untyped-call, no-any-return]
        add_rows(y.flatten(0, -2), update, gates, indices)
        return y
    return _call_scatter(y, update, gates, indices)  # type: ignore[no-any-return]


__all__ = ["MAX_VECTORS", "gather", "gather_op", "scatter_add", "scatter_op", "score"]
