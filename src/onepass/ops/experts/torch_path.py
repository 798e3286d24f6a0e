"""The steps of `kernels_rows` and `kernels_products` in torch: for a CPU, float64, and where there is no Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import definition

order = definition.expert_order


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


def gather_sum(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each token's rows."""
    return rows[places].to(torch.promote_types(rows.dtype, torch.float32)).sum(1).to(rows.dtype)


def hidden(
    x: Tensor, up: Tensor, weights: Tensor, places: Tensor, rows: Tensor, ends: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return what the activation takes, and the weighted hidden units (N, width)."""
    h = product(spread(x, places), up, ends)
    gate, *linear = torch.split(h, width, 1)
    a = F.silu(gate) * linear[0] if linear else F.gelu(gate, approximate="tanh")
    return h, a.mul_(weights.flatten()[rows, None])


def hidden_backward(
    dy: Tensor, down: Tensor, h: Tensor, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of h, the weighted hidden units and the gradient of the weights."""
    d, aten = product(dy, down.mT, ends), torch.ops.aten
    w, d_weights = weights.flatten()[rows, None], torch.empty_like(weights)
    dw, (gate, *linear) = (d * w).to(d.dtype), torch.split(h, down.shape[1], 1)
    if linear:
        a = F.silu(gate)
        dh, a = torch.cat((aten.silu_backward(dw * linear[0], gate), dw * a), 1), a * linear[0]
    else:
        a, dh = F.gelu(gate, approximate="tanh"), aten.gelu_backward(dw, gate, approximate="tanh")
    d_weights.view(-1)[rows] = (d * a).sum(1).to(weights.dtype)
    return dh, a.mul_(w), d_weights
