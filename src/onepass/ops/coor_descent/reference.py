"""The definition of coor_descent in differentiable torch; tests evaluate it in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.ops._shared.reference import per_row, valid_entries


def coor_descent(
    scores: Tensor,
    *,
    n_iters: int,
    k: Tensor | float,
    eps: float = 0.1,
    eps_init: float | None = None,
    eps_decay: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Alternate a ← eps·(log k - logsumexp((s + b)/eps)) and b ← -relu(s + a), T times, b starting at -s."""
    valid = valid_entries(scores, mask)
    log_k = per_row(k, scores).log()
    s = torch.where(valid, scores, 0.0)
    b = -s
    a = torch.zeros_like(log_k)
    current = max(eps if eps_init is None else eps_init, eps)
    if not valid.any():
        return s * 0
    for _ in range(n_iters):
        terms = torch.where(valid, (s + b) / current, -math.inf)
        some = valid.any(-1, keepdim=True)
        a = current * (log_k - torch.where(some, terms, 0.0).logsumexp(-1, keepdim=True))
        b = -(s + a).relu()
        current = max(current * eps_decay, eps)
    return torch.where(valid, ((s + a + b) / current).exp(), 0.0)
