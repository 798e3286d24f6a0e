"""The steps between the matrix products of routed layers, without autograd: torch's, and those of several kernels.

Torch's have the names and arguments of launchers in `kernels`; `steps` chooses. Sums over rows (gradients of biases
and of a norm's weight) stay partials in one buffer, so that one sum adds up those of a whole backward pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import replayed, uses_triton
from onepass.ops._shared.arguments import accumulator
from onepass.ops.routing.op import add_rows, scatter_backward


def kernels_for(x: Tensor) -> Any:
    """Return the module of kernels; None where torch computes."""
    if not uses_triton(x):
        return None
    from . import kernels

    return kernels


def steps(x: Tensor) -> Any:
    """Return the module whose steps compute for x: `kernels`, or this one."""
    return kernels_for(x) or sys.modules[__name__]


def programs(x: Tensor, rows: int) -> int:
    """Return how many rows the buffer of partials has."""
    return 1


def column_sums(x: Tensor, partials: Tensor, offset: int, dtype: torch.dtype | None = None) -> tuple[Tensor | None]:
    """Write the partials of the sums of x (rows, width) over its rows to the columns from `offset` on.

    With a `dtype`, return x rounded to it, and sum the rounded x.
    """
    copy = None if dtype is None else x.to(dtype)
    partials[:, offset : offset + x.shape[1]] = (x if copy is None else copy).sum(0, dtype=partials.dtype)
    return (copy,)


def total(partials: Tensor) -> Tensor:
    """Return the sums (width,) of all rows of a buffer of partials."""
    return partials.sum(0)


def gelu_backward(dh: Tensor, u: Tensor, partials: Tensor | None, offset: int) -> None:
    """Overwrite dh of h = gelu(u), (rows, width), with du; unless partials is None, write sums as `column_sums`."""
    dh.copy_(torch.ops.aten.gelu_backward(dh, u))
    if partials is not None:
        column_sums(dh, partials, offset)


def explore_gradient(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return scale·(length − its mean over a sequence's real tokens) of each `stride`-th row of dy (batch, n, d)."""
    lengths: Tensor = torch.linalg.vector_norm(dy[:, ::stride], dim=-1, dtype=accumulator(dy))
    if mask is None:
        return (lengths - lengths.mean(-1, keepdim=True)) * scale
    real = mask[:, ::stride]
    # keep the content of padding out, even NaN
    lengths = lengths.where(real, 0)
    mean = lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return ((lengths - mean) * scale).where(real, 0)


def gate(v: Tensor, gates: Tensor) -> Tensor:
    """Return gates·v for values v (batch, m, heads, width) and gates (batch, m)."""
    return v * gates.to(v.dtype)[..., None, None]


def gate_backward(dv: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Return the gradient of the gates; overwrite dv, the gradient of :func:`gate`, with that of v."""
    d_gates: Tensor = torch.linalg.vecdot(dv.flatten(2).to(gates.dtype), v.flatten(2).to(gates.dtype))
    dv.mul_(gates.to(dv.dtype)[..., None, None])
    return d_gates


def cast(weights: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Copy up to eight tensors to `dtype`, by one kernel where possible; None stays None."""
    present = [t for t in weights if t is not None]
    kernels = kernels_for(present[0])
    if kernels and all(t.is_contiguous() and t.dtype != dtype for t in present):
        return kernels.cast(dtype, *weights)  # type: ignore[no-any-return]
    return tuple(None if t is None else t.to(dtype) for t in weights)


add_chosen = replayed(add_rows)


@replayed
def add_residual(
    x: Tensor, rows: Tensor, update: Tensor, gates: Tensor, indices: Tensor, shift: Tensor | None
) -> Tensor:
    """Return x + rows like x in the wider dtype, with gates·(update − shift) added to the chosen tokens."""
    kernels = kernels_for(x) and kernels_for(rows)
    if kernels and x.is_contiguous():
        y: Tensor = kernels.residual_sum(x, rows)
    else:
        y = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, rows.dtype), device=x.device)
        torch.add(x, rows.view(x.shape), out=y)
    add_rows(y.view(rows.shape), update, gates, indices, shift)
    return y


@replayed
def begin_backward(
    dy: Tensor, update: Tensor, gates: Tensor, indices: Tensor, null: Tensor | None, mask: Tensor | None, plan: Any,
    widths: tuple[int, ...], need_update: bool, need_gates: bool, need_vectors: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dy in the branches' dtype, partials, gradients of the heavy output and the gates, and explore_grad.

    dy is None where it had that dtype. The partials have `widths` columns (0: not needed): for the gradients of hidden
    units and outputs, light, then heavy. Where none is for hidden units, their sums come back in place of the partials.
    """
    d, backend, copy, partials = dy.shape[-1], steps(dy), None, None
    if any(widths):
        wide, rows = accumulator(dy), backend.programs(dy, dy.numel() // d)
        partials = torch.empty((rows, sum(widths)), dtype=wide, device=dy.device)
    if partials is not None and widths[1]:
        # one pass over dy rounds it and sums its rows
        dtype = None if dy.dtype == plan.dtype else plan.dtype
        (copy,) = backend.column_sums(dy.view(-1, d), partials, widths[0], dtype)
        dy = dy if copy is None else copy.view(dy.shape)
    update = update.view(*indices.shape, d)
    d_update, d_gates = scatter_backward(dy, update, gates, indices, need_update, need_gates, null)
    d_update = None if d_update is None else d_update.view(-1, d)
    if partials is not None and widths[3] and d_update is not None:
        backend.column_sums(d_update, partials, sum(widths[:3]))
    if partials is not None and not (widths[0] or widths[2]):
        partials = backend.total(partials)
    if not (plan.explore_stride and need_vectors):
        return copy, partials, d_update, d_gates, None
    scale = -plan.explore_weight * plan.explore_stride
    return copy, partials, d_update, d_gates, backend.explore_gradient(dy, mask, plan.explore_stride, scale)


def to(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return t in a dtype; the comparison saves the host a call of torch."""
    return t if t.dtype == dtype else t.to(dtype)


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ·x in `dtype` for rows dy and x; fp32 results on CUDA skip the rounding to 16 bits."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
