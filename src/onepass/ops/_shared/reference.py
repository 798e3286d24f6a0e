"""What the definitions of soft_topk, coor_descent and topk share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def per_row(value: Tensor | float, scores: Tensor) -> Tensor:
    """K or eps as one value per row, broadcast over the columns."""
    rows = torch.as_tensor(value, dtype=scores.dtype, device=scores.device)
    return rows.expand(scores.shape[:-1])[..., None]


def valid_entries(scores: Tensor, mask: Tensor | None) -> Tensor:
    """True where an entry may be chosen."""
    allowed = scores != -math.inf
    return allowed if mask is None else allowed & mask
