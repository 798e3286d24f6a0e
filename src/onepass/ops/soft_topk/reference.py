"""The definitions, in torch that autograd can differentiate: what the operators are tested against in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .torch_path import KINDS


def _per_row(value: Tensor | float, scores: Tensor) -> Tensor:
    rows = torch.as_tensor(value, dtype=scores.dtype, device=scores.device)
    return rows.expand(scores.shape[:-1])[..., None]


def _valid(scores: Tensor, mask: Tensor | None) -> Tensor:
    allowed = scores != -math.inf
    return allowed if mask is None else allowed & mask


def gate(u: Tensor, kind: str) -> Tensor:
    """φ(u) of each kind."""
    if kind == "capped_exp":
        return u.clamp(max=0).exp()
    if kind == "sigmoid":
        return u.sigmoid()
    if kind == "laplace":
        tail = 0.5 * (-u.abs()).exp()
        return torch.where(u < 0, tail, 1 - tail)
    return (u + 0.5).clamp(0, 1)


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
    valid = _valid(scores, mask)
    log_k = _per_row(k, scores).log()
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


def soft_topk(
    scores: Tensor,
    k: Tensor | float,
    *,
    eps: Tensor | float = 0.1,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> Tensor:
    """φ((s + c)/eps) with Σ = k: c by bisection without gradient, then one Newton step that autograd sees.

    At the root that step changes nothing, and its derivative is the implicit one.
    """
    if kind not in KINDS:
        raise ValueError(kind)
    valid = _valid(scores, mask)
    k_rows, eps_rows = _per_row(k, scores), _per_row(eps, scores)
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


def topk(
    scores: Tensor,
    k: int,
    *,
    eps: Tensor | float = 0.1,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, indices, gates) by a stable sort of the valid scores; gates are 1 with soft_topk's gradient."""
    valid = _valid(scores, mask)
    order = torch.where(valid, scores, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    present = valid.gather(-1, order)
    soft = soft_topk(scores, k, eps=eps, mask=mask, kind=kind).gather(-1, order) if k else scores[..., :0]
    values = torch.where(present, scores.gather(-1, order), -math.inf)
    gates = torch.where(present, soft - soft.detach() + 1, 0.0)
    more = (0, k - order.shape[-1])
    return pad(values, more, value=-math.inf), pad(torch.where(present, order, -1), more, value=-1), pad(gates, more)
