"""The pieces of `kernels_rows` and `kernels_products` in torch: for a CPU, float64, and where there is no Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import expert_order as order

__all__ = ["activate", "activate_backward", "gather_sum", "order", "product", "spread", "weight_product"]


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows of tokens x, in the order of their experts."""
    out = x.new_empty(places.numel(), x.shape[1])
    out[places.flatten()] = x.repeat_interleave(places.shape[1], 0)
    return out


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[p] · b[expert of p]; 0 for rows of no expert."""
    if a.dtype == torch.float16:  # a CPU's products in fp16 take ten times as long
        return product(a.float(), b.float(), ends).half()
    out, start = a.new_empty(len(a), b.shape[2]), 0
    for matrix, end in zip(b, ends.tolist(), strict=True):
        torch.mm(a[start:end], matrix, out=out[start:end])
        start = end
    out[start:] = 0
    return out


def weight_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return aᵀ · b over each expert's rows."""
    if a.dtype == torch.float16:
        return weight_product(a.float(), b.float(), ends).half()
    out, start = a.new_empty(len(ends), a.shape[1], b.shape[1]), 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        torch.mm(a[start:end].t(), b[start:end], out=matrix)
        start = end
    return out


def gather_sum(rows: Tensor, more: Tensor | None, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each token's rows, and of its rows in `more`."""
    gathered = rows[places].to(torch.promote_types(rows.dtype, torch.float32))
    return (gathered if more is None else gathered + more[places]).sum(1).to(rows.dtype)


def activate(h: Tensor, linear: Tensor | None, weights: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return weight·act(h), times the linear part where there is one."""
    a = F.gelu(h, approximate="tanh") if linear is None else F.silu(h) * linear
    return a.mul_(weights.flatten()[rows, None])


def activate_backward(
    d: Tensor, h: Tensor, linear: Tensor | None, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the weighted hidden units and the gradients of linear part and weights; d becomes that of h."""
    w, d_weights, d_linear = weights.flatten()[rows, None], torch.empty_like(weights), None
    a = F.gelu(h, approximate="tanh") if linear is None else F.silu(h)
    dw = (d * w).to(d.dtype)
    if linear is not None:
        d_linear, a = dw * a, a * linear
    d_weights.view(-1)[rows] = (d * a).sum(1).to(weights.dtype)
    if linear is None:
        d.copy_(torch.ops.aten.gelu_backward(dw, h, approximate="tanh"))
    else:
        d.copy_(torch.ops.aten.silu_backward(dw.mul_(linear), h))
    return a.mul_(w), d_linear, d_weights
