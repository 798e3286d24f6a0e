"""The steps between the matrix products of routed layers, by kernels or by torch, without autograd.

Sums over rows (gradients of biases and of a norm's weight) stay partials in one buffer, so that one sum adds up those
of a whole backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import replayed, uses_triton
from onepass.ops.routing.definition import widest
from onepass.ops.routing.op import add_rows, as_bytes


def kernels_for(x: Tensor) -> Any:
    """Return the module of kernels; None where torch computes."""
    if not uses_triton(x):
        return None
    from . import kernels

    return kernels


def cast(weights: tuple[Tensor | None, ...], dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Copy up to eight tensors to `dtype`, by one kernel where possible; None stays None."""
    there = [t for t in weights if t is not None]
    kernels = kernels_for(there[0])
    if kernels and all(t.is_contiguous() and t.dtype != dtype for t in there):
        missing = (None,) * (kernels.TENSORS - len(weights))
        return kernels.cast(*weights, *missing, dtype)[: len(weights)]  # type: ignore[no-any-return]
    return tuple(None if t is None else t.to(dtype) for t in weights)


def new_partials(like: Tensor, rows: int, width: int) -> Tensor | None:
    """Return a buffer for partials of sums over `rows` rows, `width` columns in all; None for no columns."""
    if not width:
        return None
    kernels = kernels_for(like)
    programs = kernels.programs(like, rows) if kernels else 1
    return torch.empty((programs, width), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def column_sums(x: Tensor, partials: Tensor, offset: int, dtype: torch.dtype | None = None) -> Tensor:
    """Write the partials of the sums of x (rows, width) over its rows to the columns from `offset` on; return x.

    With a `dtype` x is returned rounded to it, and the sums are of that: one pass over x.
    """
    other = None if dtype == x.dtype else dtype
    if kernels := kernels_for(x):
        (copy,) = kernels.column_sums(x, partials, offset, other)
        return x if copy is None else copy
    x = x if other is None else x.to(other)
    partials[:, offset : offset + x.shape[1]] = x.sum(0, dtype=partials.dtype)
    return x


def total(partials: Tensor) -> Tensor:
    """Return the sums (width,) of all rows of a buffer of partials."""
    kernels = kernels_for(partials)
    return kernels.total(partials) if kernels else partials.sum(0)


def gelu_backward(dh: Tensor, u: Tensor, partials: Tensor | None, offset: int) -> None:
    """Overwrite dh of h = gelu(u), (rows, width), with du; unless partials is None, write sums as `column_sums`."""
    if kernels := kernels_for(dh):
        kernels.gelu_backward(dh, u, partials, offset)
        return
    dh.copy_(torch.ops.aten.gelu_backward(dh, u))
    if partials is not None:
        column_sums(dh, partials, offset)


def gains(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return scale·(length − its mean over a sequence's real tokens) of each `stride`-th row of dy (batch, n, d)."""
    lengths: Tensor = torch.linalg.vector_norm(dy[:, ::stride], dim=-1, dtype=widest(dy.dtype))
    if mask is None:
        return (lengths - lengths.mean(-1, keepdim=True)) * scale
    real = mask[:, ::stride]
    # keep the content of padding out, even NaN
    lengths = lengths.where(real, 0)
    mean = lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return ((lengths - mean) * scale).where(real, 0)


def explore_gradient(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return `gains`, by kernels where possible."""
    kernels = kernels_for(dy)
    return kernels.explore_gradient(dy, as_bytes(mask), stride, scale) if kernels else gains(dy, mask, stride, scale)


def gate(v: Tensor, gates: Tensor) -> Tensor:
    """Return gates·v for values v (batch, m, heads, width) and gates (batch, m)."""
    kernels = kernels_for(v)
    return kernels.gate(v, gates) if kernels else v * gates.to(v.dtype)[..., None, None]


def gate_backward(dv: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Return the gradient of the gates; overwrite dv, the gradient of :func:`gate`, with that of v."""
    if kernels := kernels_for(v):
        return kernels.gate_backward(dv, v, gates)  # type: ignore[no-any-return]
    d_gates: Tensor = torch.linalg.vecdot(dv.flatten(2).to(gates.dtype), v.flatten(2).to(gates.dtype))
    dv.mul_(gates.to(dv.dtype)[..., None, None])
    return d_gates


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


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ·x in `dtype` for rows dy and x; fp32 results on CUDA skip the rounding to 16 bits."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
