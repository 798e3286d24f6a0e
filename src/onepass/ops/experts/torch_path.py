"""What runs on a CPU and in float64: the steps of `experts` with the names and arguments of the kernels' launchers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import expert_order as order

__all__ = ["activate", "activate_backward", "gather_sum", "order", "product", "spread", "weight_product"]


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows (N, d) of tokens x (T, d), in the order of their experts."""
    rows = x.repeat_interleave(places.shape[1], 0)
    return torch.empty_like(rows).index_copy_(0, places.flatten().long(), rows)


def gather_sum(rows: Tensor, more: Tensor | None, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sum (T, d) of each token's rows (N, d), and of those in `more`, in fp32."""
    found = rows.to(_wide(rows)) if more is None else rows.to(_wide(rows)) + more
    return found[places.long()].masked_fill((places >= ends[-1])[..., None], 0.0).sum(1).to(rows.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _real(t: Tensor, ends: Tensor) -> Tensor:
    """Return rows in fp32, 0 where they are of no expert: those hold anything."""
    none = torch.arange(len(t), device=t.device) >= ends[-1]
    return t.to(_wide(t)).masked_fill(none[:, None], 0.0)


def activate(h: Tensor, linear: Tensor | None, weights: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return weight·GELU(h), or weight·SiLU(h)·linear, of rows (N, hidden)."""
    z = _real(h, ends)
    a = F.gelu(z, approximate="tanh") if linear is None else F.silu(z) * _real(linear, ends)
    return (a * weights.flatten()[rows.long(), None]).to(h.dtype)


def activate_backward(
    d: Tensor, h: Tensor, linear: Tensor | None, weights: Tensor, rows: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the weighted hidden units, the linear part's gradient and the weights'; d becomes the gradient of h."""
    w, up, z = weights.flatten()[rows.long(), None], _real(d, ends), _real(h, ends)
    if linear is None:
        a, d_linear = F.gelu(z, approximate="tanh"), None
        d.copy_(torch.ops.aten.gelu_backward(up * w, z, approximate="tanh"))
    else:
        silu, factor = F.silu(z), _real(linear, ends)
        a, d_linear = silu * factor, (up * silu * w).to(h.dtype)
        d.copy_(torch.ops.aten.silu_backward(up * factor * w, z))
    d_weights = torch.empty_like(weights).flatten().index_copy(0, rows.long(), (up * a).sum(1).to(weights.dtype))
    return (a * w).to(h.dtype), d_linear, d_weights.view(weights.shape)


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[p] · b[expert of p] for rows a (N, D) and b (E, D, M)."""
    out, first = a.new_zeros(len(a), b.shape[2]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(a[first:end], b[e], out=out[first:end])
        first = end
    return out


def weight_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return aᵀ · b over each expert's rows (E, P, Q), for a (N, P) and b (N, Q)."""
    out, first = a.new_empty(len(ends), a.shape[1], b.shape[1]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(a[first:end].t(), b[first:end], out=out[e])
        first = end
    return out
