"""Define `weighted_sum` in plain torch: the tests' oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return y[..., r] = Σ_d x[..., d]·weight[r, d] (no r for a 1-D weight), accumulated in fp32 or wider."""
    out = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    acc = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (x.to(acc) @ weight.to(acc).mT if weight.dim() == 2 else x.to(acc) @ weight.to(acc)).to(out)
