"""Matrix products inside hand-written autograd nodes: gradients in the weights' own dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ·x in `dtype` for rows dy and x; fp32 results on CUDA skip the rounding to 16 bits."""
    if dtype == dy.dtype:
        return torch.mm(dy.t(), x)
    if dy.is_cuda and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)
