"""The torch path (CPU, float64, no Triton): the definition's choice, and its gradient written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import arrivals, fraction, per_token, running_threshold


def forward(
    scores: Tensor, mask: Tensor | None, k: int, share: float, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gates, indices, thresholds, and how many are chosen before each block."""
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    of_tokens = fraction(share) if share else (k, s.shape[1])
    thresholds = running_threshold(s, of_tokens, block, memory, mask)
    threshold = per_token(thresholds, s.shape[1], block)
    indices, starts = arrivals(s > threshold, k, of_tokens, block, mask)
    at = indices.clamp_min(0)
    # the last bit of torch.sigmoid depends on the place in memory, that of exp does not
    gates = ((threshold.gather(1, at) - s.gather(1, at)) / eps).exp_().add_(1).reciprocal_()
    return torch.where(indices >= 0, gates, 0.0).to(scores.dtype), indices, thresholds, starts


def backward(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, gates: Tensor, indices: Tensor, thresholds: Tensor,
    eps: float, block: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores: chosen ones through their gates, earlier ones through later thresholds."""
    n = scores.shape[1]

    def per_block(t: Tensor) -> Tensor:
        return F.pad(t, (0, -n % block)).view(len(t), -1, block).sum(-1)

    s, g = scores.to(thresholds.dtype), gates.to(thresholds.dtype)
    of_chosen = torch.where(indices >= 0, g_gates.to(s.dtype) * g * (1 - g) / eps, 0.0)
    own = torch.zeros_like(s).scatter_add_(1, indices.clamp_min(0), of_chosen)
    gate = torch.sigmoid((s - per_token(thresholds, n, block)) / eps)
    slope = gate * (1 - gate)
    if mask is not None:
        slope, s = slope.masked_fill(~mask, 0), s.masked_fill(~mask, 0)
    weight, weighted = (F.pad(per_block(t).cumsum(-1), (1, -1)) for t in (slope, slope * s))
    follows = (weight > 0) & (weighted / weight).isfinite()
    share = torch.where(follows, per_block(own) / weight.clamp_min(torch.finfo(s.dtype).tiny), 0.0)
    share[:, 0] = 0
    later = share.flip(-1).cumsum(-1).flip(-1) - share
    ds = own - slope * later.repeat_interleave(block, 1)[:, :n]
    return ds.to(scores.dtype)
