"""The steps of `kernels_rows` and `kernels_products` in torch: for a CPU, float64, and where there is no Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import expert_order as order

__all__ = ["gather_sum", "hidden", "hidden_backward", "order", "product", "spread", "weight_product"]


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


def weight_product(tokens: Tensor, hidden: Tensor, rows: Tensor, ends: Tensor, by_hidden: bool) -> Tensor:
    """Return tokensᵀ · hidden over each expert's rows, both by row (E, dim, hidden), or (E, hidden, dim)."""
    a, b = (hidden, tokens) if by_hidden else (tokens, hidden)
    if a.dtype == torch.float16:
        a, b = a.float(), b.float()
    out, start = a.new_empty(len(ends), a.shape[1], b.shape[1]), 0
    for matrix, end in zip(out, ends.tolist(), strict=True):
        torch.mm(a[start:end].t(), b[start:end], out=matrix)
        start = end
    return out.to(tokens.dtype)


def gather_sum(rows: Tensor, more: Tensor | None, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each token's rows, and of its rows in `more`."""
    gathered = rows[places].to(torch.promote_types(rows.dtype, torch.float32))
    return (gathered if more is None else gathered + more[places]).sum(1).to(rows.dtype)


def hidden(
    x: Tensor, up: Tensor, gate: Tensor | None, weights: Tensor, places: Tensor, rows: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what the activation takes (N, hidden), its linear part (None without a gate), and the weighted units."""
    xs = spread(x, places)
    h = product(xs, up if gate is None else gate, ends)
    linear = None if gate is None else product(xs, up, ends)
    del xs
    a = F.gelu(h, approximate="tanh") if linear is None else F.silu(h) * linear
    return h, linear, a.mul_(weights.flatten()[rows, None])


def hidden_backward(
    dy: Tensor, down: Tensor, h: Tensor, linear: Tensor | None, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return h's gradient, the weighted hidden units, and the gradients of the linear part and the weights."""
    d, aten = product(dy, down.mT, ends), torch.ops.aten
    w, d_weights, d_linear = weights.flatten()[rows, None], torch.empty_like(weights), None
    dw = (d * w).to(d.dtype)
    if linear is None:
        a, dh = F.gelu(h, approximate="tanh"), aten.gelu_backward(dw, h, approximate="tanh")
    else:
        a = F.silu(h)
        d_linear, a, dh = dw * a, a * linear, aten.silu_backward(dw * linear, h)
    d_weights.view(-1)[rows] = (d * a).sum(1).to(weights.dtype)
    return dh, a.mul_(w), d_linear, d_weights
