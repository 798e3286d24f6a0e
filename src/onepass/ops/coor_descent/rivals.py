"""The plain iteration in torch, for the bench."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def descent(
    scores: Tensor, *, n_iters: int, k: float, eps: float = 0.1, eps_init: float | None = None, eps_decay: float = 1.0
) -> Tensor:
    """Run T steps in torch operators that torch.compile captures as one graph; no mask, no edge cases."""
    current = max(eps if eps_init is None else eps_init, eps)
    b = -scores
    a = torch.zeros_like(scores[..., :1])
    for _ in range(n_iters):
        a = current * (math.log(k) - ((scores + b) / current).logsumexp(-1, keepdim=True))
        b = -(scores + a).relu()
        current = max(current * eps_decay, eps)
    return ((scores + a + b) / current).exp()
