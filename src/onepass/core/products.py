"""Matrix products inside hand-written autograd nodes: gradients in the weights' own dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Dyᵀ·x for rows dy and x, in `dtype`: straight from the product's fp32 sums where torch can."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
