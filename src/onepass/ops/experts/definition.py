"""Experts by definition: the tests' oracle, and what runs on a CPU, in float64 and without Triton."""

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


def _product(rows: Tensor, chosen: Tensor, matrices: Tensor) -> Tensor:
    """Return rows (N, D) times the matrices (E, D, M) that they chose, in the dtype of the rows; 0 for no expert."""
    out = rows.new_zeros(len(rows), matrices.shape[2])
    for e, matrix in enumerate(matrices.to(rows.dtype)):
        at = chosen == e
        out[at] = rows[at] @ matrix
    return out


def _rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return tokens in fp32, or float64, once for each of their choices."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(indices.shape[1], 0)


def _summed(rows: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    return rows.view(*indices.shape, rows.shape[1]).sum(1).to(like.dtype)


def experts(
    x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "gelu",
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return Σ_j weights[t, j] · act(x[t] · up[e]) · down[e] with e = indices[t, j], in fp32."""
    rows, chosen = _rows(x, indices), indices.flatten()
    h = _product(rows, chosen, up)
    a = F.gelu(h, approximate="tanh") if gate is None else F.silu(_product(rows, chosen, gate)) * h
    return _summed(_product(weights.flatten()[:, None].to(a.dtype) * a, chosen, down), indices, x)


def backward(
    dy: Tensor, x: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weights, up, down and gate."""
    rows, chosen, d_rows = _rows(x, indices), indices.flatten(), _rows(dy, indices)
    w = weights.flatten()[:, None].to(rows.dtype)

    def gradient(a: Tensor, b: Tensor, matrices: Tensor) -> Tensor:
        found = [a[chosen == e].t() @ b[chosen == e] for e in range(len(matrices))]
        return torch.stack(found).to(matrices.dtype)

    h, da = _product(rows, chosen, up), _product(d_rows, chosen, down.mT)
    if gate is None:
        a, d_gate = F.gelu(h, approximate="tanh"), None
        dh = torch.ops.aten.gelu_backward(da * w, h, approximate="tanh")
        dx = _product(dh, chosen, up.mT)
    else:
        z = _product(rows, chosen, gate)
        silu = F.silu(z)
        a, dh, dz = silu * h, da * w * silu, torch.ops.aten.silu_backward(da * w * h, z)
        d_gate, dx = gradient(rows, dz, gate), _product(dh, chosen, up.mT) + _product(dz, chosen, gate.mT)
    d_weights = (da * a).sum(1).to(weights.dtype).view(weights.shape)
    return _summed(dx, indices, x), d_weights, gradient(rows, dh, up), gradient(w * a, d_rows, down), d_gate


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
