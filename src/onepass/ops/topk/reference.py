"""The definition of topk by a stable sort; tests evaluate it in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from onepass.ops._shared.reference import valid_entries
from onepass.ops.soft_topk.reference import soft_topk


def topk(
    scores: Tensor,
    k: int,
    *,
    eps: Tensor | float = 0.3,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
    pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, indices, gates) by a stable sort of the valid scores; gates are 1 with soft_topk's gradient."""
    valid = valid_entries(scores, mask)
    order = torch.where(valid, scores, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    present = valid.gather(-1, order)
    soft = soft_topk(scores, k, eps=eps, mask=mask, kind=kind).gather(-1, order) if k else scores[..., :0]
    values = torch.where(present, scores.gather(-1, order), -math.inf)
    gates = torch.where(present, soft - soft.detach() + 1, 0.0)
    more = (0, k - order.shape[-1])
    indices = torch.where(present, order, -1)
    padded = zip((values, indices, gates), (-math.inf, -1, 0.0), strict=True)
    values, indices, gates = (functional.pad(found, more, value=value) for found, value in padded)
    return values, indices, gates
