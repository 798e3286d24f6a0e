"""Experts by definition, expert by expert: the tests' oracle. Order and choice also run where Triton does not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_order(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return places, rows and ends of a stable sort of the choices by expert; −1 sorts behind all experts."""
    flat = indices.flatten()
    rows = torch.where(flat < 0, num_experts, flat).argsort(stable=True)
    places = torch.empty_like(rows)
    places[rows] = torch.arange(len(rows), device=rows.device)
    # bincount has no deterministic form on a GPU
    ends = (flat[:, None] == torch.arange(num_experts, device=flat.device)).sum(0).cumsum(0)
    return places.view(indices.shape).int(), rows.int(), ends.int()


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "gelu"
) -> Tensor:
    """Return Σ_j weights[t, j] · act(x[t] · up[e]) · down[e] with e = indices[t, j]."""
    y = torch.zeros_like(x)
    for e in range(len(up)):
        t, j = (indices == e).nonzero(as_tuple=True)
        h = x[t] @ up[e]
        a = F.gelu(h, approximate="tanh") if activation == "gelu" else F.silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1]
        y = y.index_add(0, t, (weights[t, j, None] * a) @ down[e])
    return y


def choose(
    logits: Tensor, bias: Tensor | None, mask: Tensor | None, k: int, score_func: str, norm_topk: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights (T, k), indices (T, k) and counts (E,) of logits (T, E); the lowest index wins ties."""
    s = logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()
    v = s.detach() if bias is None else s.detach() + bias
    indices = v.sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    weights = s.gather(-1, indices)
    if norm_topk and k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    if mask is not None:
        indices, weights = indices.masked_fill(~mask[:, None], -1), weights.masked_fill(~mask[:, None], 0.0)
    counts = (indices[..., None] == torch.arange(logits.shape[1], device=logits.device)).sum((0, 1), dtype=torch.int32)
    return weights, indices, counts
