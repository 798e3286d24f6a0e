"""Other methods for a differentiable top-k, for the bench: LapSum by sorting, Sinkhorn."""

from __future__ import annotations

import torch
from torch import Tensor


def lapsum(scores: Tensor, k: float, eps: float) -> Tensor:
    """Return the `laplace` gates by one sort: between two neighbours the threshold solves a quadratic equation.

    Struski et al. (arXiv 2503.06242). Assumes that the threshold lies between the smallest and the largest score.
    """
    n = scores.shape[-1]
    s = scores.sort(dim=-1).values / eps
    below = (s.logcumsumexp(-1) - s).exp()
    above = ((-s).flip(-1).logcumsumexp(-1).flip(-1) + s).exp()
    ahead = torch.arange(n - 1, -1, -1, device=s.device, dtype=s.dtype)
    total = 0.5 * below + ahead - 0.5 * (above - 1)
    left = ((total >= k).sum(-1, keepdim=True) - 1).clamp(0, n - 2)
    a, start = below.gather(-1, left), s.gather(-1, left)
    b = above.gather(-1, left + 1) * (start - s.gather(-1, left + 1)).exp()
    rest = n - 1 - left - k
    t = start + ((rest + (rest * rest + a * b).sqrt()) / b).log()
    x = scores / eps - t
    tail = 0.5 * (-x.abs()).exp()
    return torch.where(x < 0, tail, 1 - tail)


def sinkhorn(scores: Tensor, k: float, eps: float, n_iters: int = 200) -> Tensor:
    """Return the `sigmoid` gates by Sinkhorn iterations towards the marginals (k, n - k).

    Xie et al. (arXiv 2002.06504).
    """
    n = scores.shape[-1]
    c = torch.zeros_like(scores[..., :1])
    for _ in range(n_iters):
        chosen = ((scores + c) / eps).sigmoid().sum(-1, keepdim=True)
        c = c + eps * (torch.log(k / chosen) - torch.log((n - k) / (n - chosen)))
    return ((scores + c) / eps).sigmoid()
