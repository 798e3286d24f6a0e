"""Experts by definition: the tests' oracle, and what runs on a CPU, in float64 and without Triton."""

from __future__ import annotations

from typing import Any

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


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _linear(u: Tensor, matrices: list[Tensor | None], e: int) -> list[Tensor]:
    """Return tokens times the matrices of an expert that are there."""
    return [u @ m[e].to(u.dtype) for m in matrices if m is not None]


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "gelu",
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return Σ_j weights[t, j] · act(x[t] · up[e]) · down[e] with e = indices[t, j], expert by expert in fp32."""
    y = torch.zeros(x.shape, dtype=_wide(x), device=x.device)
    for e in range(len(up)):
        t, j = (indices == e).nonzero(as_tuple=True)
        h, *z = _linear(x[t].to(y.dtype), [up, gate], e)
        a = F.silu(z[0]) * h if z else F.gelu(h, approximate="tanh")
        y = y.index_add(0, t, (weights[t, j, None].to(y.dtype) * a) @ down[e].to(y.dtype))
    return y.to(x.dtype)


def backward(
    dy: Tensor, x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of x, weights, up, down and gate."""
    given: tuple[Any, ...] = (x, weights, up, down, gate)
    wide = _wide(x)
    grads: list[Any] = [None if g is None else torch.zeros(g.shape, dtype=wide, device=g.device) for g in given]
    dx, d_weights, d_up, d_down, d_gate = grads
    for e in range(len(up)):
        t, j = (indices == e).nonzero(as_tuple=True)
        u, w, d_out = x[t].to(wide), weights[t, j, None].to(wide), dy[t].to(wide)
        h, *z = _linear(u, [up, gate], e)
        silu = F.silu(z[0]) if z else h
        a, da = silu * h if z else F.gelu(h, approximate="tanh"), d_out @ down[e].to(wide).t()
        d_weights[t, j], d_down[e] = (da * a).sum(1), (w * a).t() @ d_out
        da = da * w
        dh = da * silu if z else torch.ops.aten.gelu_backward(da, h, approximate="tanh")
        d_up[e] = u.t() @ dh
        du = dh @ up[e].to(wide).t()
        if z:
            dz = torch.ops.aten.silu_backward(da * h, z[0])
            d_gate[e], du = u.t() @ dz, du + dz @ given[4][e].to(wide).t()
        dx.index_add_(0, t, du)
    return [None if g is None else d.to(g.dtype) for d, g in zip(grads, given, strict=True)]


def choose(
    logits: Tensor, bias: Tensor | None, mask: Tensor | None, k: int, score_func: str, norm_topk: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights (T, k), indices (T, k) and counts (E,) of logits (T, E); the lowest index wins ties."""
    s = logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()
    v = s.detach() if bias is None else s.detach() + bias
    indices = v.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = s.gather(-1, indices)
    if norm_topk and k > 1:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    if mask is not None:
        indices, weights = indices.masked_fill(~mask[:, None], -1), weights.masked_fill(~mask[:, None], 0.0)
    counts = (indices[..., None] == torch.arange(logits.shape[1], device=logits.device)).sum((0, 1), dtype=torch.int32)
    return weights, indices, counts
