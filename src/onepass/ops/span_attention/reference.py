"""The definition in a few lines of torch: the full matrix of scores, and a mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale·q·kᵀ) v over the keys j with first_i ≤ j < last_i that mask allows; 0 without such a key."""
    acc = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    keys = torch.arange(k.shape[1], device=q.device)
    seen = (keys >= first[..., None]) & (keys < last[..., None])
    seen = seen.expand(q.shape[0], *seen.shape[-2:])
    if mask is not None:
        seen = seen & mask[:, None]
    scores = torch.einsum("bnhd,bmhd->bhnm", q.to(acc), k.to(acc)) * scale
    seen = seen[:, None]
    # a query that sees no key would give 0/0
    p = scores.masked_fill(~seen, -math.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", p.masked_fill(~seen, 0.0), v.to(acc)).to(q.dtype)
