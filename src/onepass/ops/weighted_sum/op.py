"""`weighted_sum`: argument checks, registration with the dispatcher, autograd, the public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.bind import batch_first, bind, outside_autocast
from onepass.core.launch import aligned, as_rows, even_rows, uses_triton
from onepass.core.register import register, register_fake

from . import sharding, torch_path

MAX_VECTORS = 16


def _check(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> None:
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
    if out_dtype is not None and out_dtype not in check.FLOATS:
        raise TypeError(
            f"weighted_sum: out_dtype must be None, float32, float16, bfloat16 or float64, got {out_dtype!r}"
        )


def _on_triton(x: Tensor, weight: Tensor) -> bool:
    # kernels sum in fp32, so float64 takes the torch path
    return uses_triton(x) and weight.dtype != torch.float64


def _vectors(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight[None]


def _in_columns(x: Tensor, weight: Tensor) -> bool:
    """Return whether a Triton kernel reads x column by column: 32 or more rows, transposed, such as `(D, rows).mT`."""
    if x.stride(-1) == 1 or x.shape[-1] <= 1 or not _on_triton(x, weight):
        return False
    rows = 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride != rows:
            return False
        rows *= size
    return rows >= 32


def _matrix(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (..., D) as (rows, D) for the kernels; a copy only if neither rows nor columns are contiguous."""
    return x.view(-1, x.shape[-1]) if _in_columns(x, weight) else as_rows(x)


def _empty_gradient(x: Tensor, weight: Tensor) -> Tensor:
    """Return an empty tensor for dx: column by column in memory if the kernels read x so, else contiguous."""
    if not _in_columns(x, weight):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    *lead, n_cols = x.shape
    strides = (*(math.prod(lead[i + 1 :]) for i in range(len(lead))), math.prod(lead))
    return torch.empty_strided((*lead, n_cols), strides, dtype=x.dtype, device=x.device)


def _forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    dtype = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    if not _on_triton(x, weight):
        return torch_path.forward(x, weight, dtype)
    shape = x.shape[:-1] + weight.shape[:-1]
    if not x.numel():
        return torch.zeros(shape, dtype=dtype, device=x.device)
    from . import kernels_triton

    y = torch.empty(shape, dtype=dtype, device=x.device)
    rows = _matrix(x, weight)
    rows = rows if kernels_triton.is_columns(rows) else even_rows(rows)
    kernels_triton.forward(rows, aligned(_vectors(weight).contiguous()), y)
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor | None, Tensor | None]:
    vectors = _vectors(weight)
    # only dw reads x: skip the copy that a matrix of x may need
    rows = _matrix(x, weight) if need_w else None
    dy = dy.reshape(math.prod(x.shape[:-1]), len(vectors)).contiguous()  # `.sum().backward()` gives dy with stride 0
    if not _on_triton(x, weight):
        dx, dw = torch_path.backward(dy, rows, vectors, x.dtype, need_x)
        return (dx.view(x.shape) if need_x else None), (dw.view(weight.shape) if need_w else None)
    from . import kernels_triton

    new_x = _empty_gradient(x, weight) if need_x else None
    new_w = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_w else None
    if not x.numel():
        return new_x, None if new_w is None else new_w.zero_()
    if need_x or need_w:
        matrices = (None if t is None else t.view(-1, x.shape[-1]) for t in (new_x, new_w))
        kernels_triton.backward(dy, rows, vectors.contiguous(), *matrices)
    return new_x, new_w


def _backward_all(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    """Do `_backward` as an op: gradients that are not needed are empty tensors, since an op cannot return None."""
    dx, dw = _backward(dy, x, weight, need_x, need_w)
    return x.new_empty(0) if dx is None else dx, weight.new_empty(0) if dw is None else dw


def _forward_alone(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Do `_forward` as an op with autocast off: it would round products of an exported program on the torch path."""
    return outside_autocast(_forward)(x, weight, out_dtype)  # type: ignore[no-any-return]


forward_op = register("weighted_sum", _forward_alone, sharding.forward)
backward_op = register("weighted_sum_backward", _backward_all, sharding.backward)


@register_fake(forward_op)
def _(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    _check(x, weight, out_dtype)
    dtype = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape[:-1] + weight.shape[:-1], dtype=dtype)


@register_fake(backward_op)
def _(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    return _empty_gradient(x, weight) if need_x else x.new_empty(0), weight.new_empty(weight.shape if need_w else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _gradients(ctx: Any, run: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    dx, dw = run(dy, x, weight, need_x, need_w)
    return dx if need_x else None, dw if need_w else None, None


InDims = tuple[int | None, ...]


def _vmap_forward(size: int, in_dims: InDims, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Any:
    """Treat the batch as more rows; None (no rule) if the weight is batched."""
    if in_dims[1] is not None:
        return None
    return forward_op(batch_first(x, in_dims[0], size), weight, out_dtype), 0


def _vmap_backward(
    size: int, in_dims: InDims, dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool
) -> Any:
    """Treat the batch as more rows; None (no rule) if dw is needed: each batch element has its own."""
    if in_dims[2] is not None or need_w or not need_x:
        return None
    dy, x = batch_first(dy, in_dims[0], size), batch_first(x, in_dims[1], size)
    return backward_op(dy, x, weight, True, False), (0, None)


_call = bind(
    name="weighted_sum", forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op,
    save=_save, gradients=_gradients, replay=True, check=_check,
    vmap_forward=_vmap_forward, vmap_backward=_vmap_backward,
)  # fmt: skip


def weighted_sum(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    r"""Add up the last dimension with weights, in one pass over ``x``.

    .. math:: y_{\dots r} = \sum_d x_{\dots d}\, w_{r d}

    Products and sums are in fp32 (fp64 if x or weight is fp64), rounded once at the end.

    Args:
        x: ``(..., D)``, fp32, fp16, bf16 or fp64, any strides.
        weight: ``(D,)``, or ``(R, D)`` with R ≤ 16 for R sums from one read of ``x``.
        out_dtype: dtype of the result; default ``torch.promote_types(x.dtype, weight.dtype)``.

    Returns:
        ``(...,)`` for a ``(D,)`` weight, ``(..., R)`` for an ``(R, D)`` weight. D = 0 gives zeros.

    Gradients flow to ``x`` and ``weight``. Backward computes only the needed ones, and repeats them bit for bit from
    run to run.

    Raises:
        TypeError: x or weight is not a floating-point tensor, or out_dtype is not a floating-point dtype.
        ValueError: shapes don't fit, R is out of range, or the tensors are on different devices.
        NotImplementedError: for a second or forward-mode derivative.

    Source: the "weighted sum" exercise of Stanford's CS336, generalised to R vectors.

    Example:
        >>> import torch, onepass
        >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        >>> onepass.weighted_sum(x, torch.tensor([1.0, 0.0, -1.0]))
        tensor([-2., -2.])
    """
    return _call(x, weight, out_dtype)  # type: ignore[no-any-return]
