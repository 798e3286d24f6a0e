"""Matrix products inside hand-written autograd nodes: weights cast together, gradients in the weights' own dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Each as `dtype`; what must be copied is copied by one kernel."""
    out = [t if t.dtype == dtype else torch.empty_like(t, dtype=dtype) for t in tensors]
    pairs = [(o, t) for o, t in zip(out, tensors, strict=True) if o is not t]
    if pairs:
        torch._foreach_copy_([o for o, _ in pairs], [t for _, t in pairs])
    return out


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dyᵀ·x for rows dy and x, in `dtype`: straight from the product's fp32 sums where torch can."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
