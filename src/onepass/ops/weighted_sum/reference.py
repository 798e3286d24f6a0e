"""The definition, and the torch path (CPU, float64, no Triton)."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """y[..., r] = Σ_d x[..., d]·weight[r, d] (no r for a 1-D weight), accumulated in fp32 or wider."""
    out = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    acc = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (x.to(acc) @ weight.to(acc).mT if weight.dim() == 2 else x.to(acc) @ weight.to(acc)).to(out)


def backward(dy: Tensor, x: Tensor | None, weight: Tensor, x_dtype: torch.dtype, need_x: bool) -> tuple[Tensor, Tensor]:
    """Dx = Σ_r dy[..., r]·weight[r]; dweight[r] = Σ_rows dy[..., r]·x; rows flattened, weight (R, D).

    x is None when dweight is not needed; what is not needed comes back empty.
    """
    acc = torch.promote_types(torch.promote_types(x_dtype, weight.dtype), torch.float32)
    dx, dw = weight.new_empty(0, dtype=x_dtype), weight.new_empty(0)
    if need_x:
        dx = (dy.to(acc) @ weight.to(acc)).to(x_dtype)
    if x is not None:
        dw = (dy.to(acc).mT @ x.to(acc)).to(weight.dtype)
    return dx, dw
