"""`weighted_sum`: checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from onepass.core import check
from onepass.core.bind import bind
from onepass.core.launch import as_rows, uses_triton

from . import reference as torch_path

MAX_VECTORS = 16


def _check(x: Tensor, weight: Tensor) -> None:
    check.floating("weighted_sum", "x", x)
    check.floating("weighted_sum", "weight", weight)
    if x.dim() < 1:
        raise ValueError("weighted_sum: x must have at least one dimension, got a 0-d tensor")
    if weight.dim() not in (1, 2) or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"weighted_sum: weight must be (D,) or (R, D) with D = {x.shape[-1]}, the last dimension of x "
            f"{tuple(x.shape)}; got {tuple(weight.shape)}"
        )
    if weight.dim() == 2 and not 1 <= weight.shape[0] <= MAX_VECTORS:
        raise ValueError(f"weighted_sum: weight (R, D) takes 1 ≤ R ≤ {MAX_VECTORS} vectors, got R = {weight.shape[0]}")
    check.same_device("weighted_sum", "weight", weight, "x", x)


def _vectors(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight[None]


def _forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    if not uses_triton(x):
        return torch_path.reference(x, weight, out_dtype=out_dtype)
    from . import kernels_triton

    y = kernels_triton.forward(as_rows(x), _vectors(weight).contiguous(), out_dtype)
    return y.view(x.shape[:-1] + weight.shape[:-1])


def _backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    vectors = _vectors(weight)
    # without a gradient of the weight x is not looked at, not even to make rows of it
    rows = as_rows(x) if need_w else None
    dy = dy.reshape(math.prod(x.shape[:-1]), len(vectors)).contiguous()  # `.sum().backward()` hands a stride-0 dy
    if uses_triton(x):
        from . import kernels_triton

        dx, dw = kernels_triton.backward(dy, rows, vectors.contiguous(), x.shape[-1], x.dtype, need_x, need_w)
    else:
        dx, dw = torch_path.backward(dy, rows, vectors, x.dtype, need_x)
    return (dx.view(x.shape) if need_x else dx), (dw.view(weight.shape) if need_w else dw)


forward_op = custom_op("onepass::weighted_sum", _forward, mutates_args=())
backward_op = custom_op("onepass::weighted_sum_backward", _backward, mutates_args=())


@forward_op.register_fake
def _(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    _check(x, weight)
    return x.new_empty(x.shape[:-1] + weight.shape[:-1], dtype=out_dtype)


@backward_op.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if need_x else (0,)), weight.new_empty(weight.shape if need_w else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    dx, dw = run(dy, x, weight, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None


_call = bind(
    forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op,
    save=_save, gradients=_gradients,
)  # fmt: skip


def weighted_sum(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    r"""Weighted sum over the last dimension, in one pass over ``x``.

    .. math:: y_{\dots r} = \sum_d x_{\dots d}\, w_{r d}

    Products and sums are in fp32 (fp64 for fp64 inputs) with one rounding at the end.

    Args:
        x: ``(..., D)``, fp32, fp16, bf16 or fp64, any strides.
        weight: ``(D,)``, or ``(R, D)`` with R ≤ 16 for R sums from one read of ``x``.
        out_dtype: dtype of the result; default ``torch.promote_types(x.dtype, weight.dtype)``.

    Returns:
        ``(...,)`` for a ``(D,)`` weight, ``(..., R)`` for an ``(R, D)`` weight. D = 0 gives zeros.

    Gradients flow to ``x`` and ``weight``; only those asked for are computed, and they are the same bit for bit
    from run to run.

    Raises:
        TypeError: x or weight is no floating-point tensor.
        ValueError: shapes don't fit, R is out of range, or the tensors are on different devices.

    Source: the "weighted sum" exercise of Stanford's CS336, generalised to R vectors.

    Example:
        >>> import torch, onepass
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> onepass.weighted_sum(x, torch.tensor([1.0, 0.0, -1.0]))
        tensor([-2., -2.])
    """
    _check(x, weight)
    return _call(x, weight, out_dtype or torch.promote_types(x.dtype, weight.dtype))  # type: ignore[no-any-return]


__all__ = ["MAX_VECTORS", "backward_op", "forward_op", "weighted_sum"]
