"""Code that the references of soft_topk, coor_descent and topk share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def per_row(value: Tensor | float, scores: Tensor) -> Tensor:
    """Return k or eps as one value per row, (..., 1), in the dtype of the scores."""
    rows = torch.as_tensor(value, dtype=scores.dtype, device=scores.device)
    return rows.expand(scores.shape[:-1])[..., None]


def valid_entries(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return True where an entry may be chosen: not masked and not -inf."""
    allowed = scores != -math.inf
    return allowed if mask is None else allowed & mask
