"""The definition of soft_topk in differentiable torch; tests evaluate it in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops._shared.reference import per_row, valid_entries

from .torch_gates import KINDS


def gate(u: Tensor, kind: str) -> Tensor:
    """Return φ(u) of a kind."""
    if kind == "capped_exp":
        return u.clamp(max=0).exp()
    if kind == "sigmoid":
        return u.sigmoid()
    if kind == "laplace":
        tail = 0.5 * (-u.abs()).exp()
        return torch.where(u < 0, tail, 1 - tail)
    return (u + 0.5).clamp(0, 1)


def soft_topk(
    scores: Tensor,
    k: Tensor | float,
    *,
    eps: Tensor | float = 0.3,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> Tensor:
    """Return φ((s + c)/eps) with Σ = k: c by bisection without gradient, then one Newton step under autograd.

    At the root that step is zero, and its derivative is the implicit one.
    """
    if kind not in KINDS:
        raise ValueError(kind)
    valid = valid_entries(scores, mask)
    k_rows, eps_rows = per_row(k, scores), per_row(eps, scores)
    if scores.shape[-1] == 0:
        return scores * 1
    s = torch.where(valid, scores, 0.0)

    def total(c: Tensor, s: Tensor, eps_rows: Tensor) -> Tensor:
        return torch.where(valid, gate((s + c) / eps_rows, kind), 0.0).sum(-1, keepdim=True)

    full = k_rows >= valid.sum(-1, keepdim=True)
    with torch.no_grad():
        span = 60 * eps_rows + s.abs().amax(-1, keepdim=True)
        lo, hi = -span, span
        for _ in range(200):
            mid = (lo + hi) / 2
            low = total(mid, s, eps_rows) < k_rows
            lo, hi = torch.where(low, mid, lo), torch.where(low, hi, mid)
        root = (lo + hi) / 2
    with torch.enable_grad():
        probe = root.detach().requires_grad_()
        (slope,) = torch.autograd.grad(total(probe, s.detach(), eps_rows.detach()).sum(), probe)
    safe = torch.where(slope > 0, slope, 1.0)
    c = root + torch.where(slope > 0, (k_rows - total(root, s, eps_rows)) / safe, 0.0)
    y = torch.where(full, torch.ones_like(s), gate((s + c) / eps_rows, kind))
    return torch.where(valid, y, 0.0)
