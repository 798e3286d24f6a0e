"""Routed attention, written down with full matrices: what the modules are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.nn import AttentionRouting, RoutedAttention, RoutedCrossAttention


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, times e^{i·position·speed}; x (n, heads, width)."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([10_000 ** (-c / half) for c in range(half)], dtype=torch.float64)
    factor = torch.polar(torch.ones(len(positions), half).double(), positions[:, None].double() * speeds)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * factor[:, None].to(torch.complex128)
    return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One sequence (n, heads, width), a full matrix `seen` (n, m)."""
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        for i in range(len(q)):
            keys = seen[i].nonzero()[:, 0]
            if len(keys):
                p = (k[keys, h] @ q[i, h] / math.sqrt(q.shape[-1])).softmax(0)
                out[i, h] = p @ v[keys, h]
    return out


def local(layer: RoutedAttention, x: Tensor, mask: Tensor) -> Tensor:
    """One sequence (n, dim) through the light branch; masked tokens count as zeros."""
    light, n, x = layer.light, len(x), x * mask[:, None]
    q, k, v = light.qkv(rms(x, light.norm.weight)).view(n, 3, light.heads, light.dim_head).unbind(1)
    window = torch.arange(n) // light.window
    seen = (window[:, None] - window[None]).abs() <= 1
    if light.causal:
        seen &= torch.arange(n)[:, None] >= torch.arange(n)[None]
    at = torch.arange(n)
    y = attend(turned(q, at), turned(k, at), v, seen & mask)
    return y.flatten(1) @ light.out.weight.T


def heavy(layer: RoutedAttention | RoutedCrossAttention, x: Tensor, context: Tensor, routing: AttentionRouting, b: int,
          rotary: bool, window: int | None) -> dict[int, Tensor]:  # fmt: skip
    """What each chosen token of sequence b gets, by its position, ungated."""
    branch = layer.heavy
    at_q = [i for i in routing.q.indices[b].tolist() if i >= 0]
    at_kv = [i for i in routing.kv.indices[b].tolist() if i >= 0]
    gates = routing.kv.gates[b][routing.kv.indices[b] >= 0]
    heads, width = branch.heads, branch.dim_head
    q = branch.q(rms(x[at_q], branch.norm_q.weight)).view(-1, heads, width)
    k, v = branch.kv(rms(context[at_kv], branch.norm_kv.weight)).view(-1, 2, heads, width).unbind(1)
    if rotary:
        q, k = turned(q, torch.tensor(at_q)), turned(k, torch.tensor(at_kv))
    seen = torch.ones(len(at_q), len(at_kv), dtype=torch.bool)
    if window is not None:
        seen = torch.tensor([[j // window < i // window for j in at_kv] for i in at_q]).view(len(at_q), len(at_kv))
    y = attend(q, k, v * gates[:, None, None], seen).flatten(1) @ branch.out.weight.T
    return dict(zip(at_q, y, strict=True))


def routed_attention(layer: RoutedAttention, x: Tensor, mask: Tensor, routing: AttentionRouting) -> Tensor:
    """`RoutedAttention` token by token, given what was chosen."""
    rows = []
    for b in range(len(x)):
        near = local(layer, x[b], mask[b])
        far = heavy(layer, x[b], x[b], routing, b, True, layer.window if layer.causal else None)
        gates = dict(zip(routing.q.indices[b].tolist(), routing.q.gates[b], strict=True))
        for i in range(x.shape[1]):
            on_top = (1 - gates[i]) * layer.null + gates[i] * far[i] if i in far else layer.null
            rows.append(near[i] + on_top)
    return torch.stack(rows).view(x.shape)


def cross_attention(layer: RoutedCrossAttention, x: Tensor, context: Tensor, routing: AttentionRouting) -> Tensor:
    """`RoutedCrossAttention` token by token, given what was chosen."""
    rows = []
    for b in range(len(x)):
        far = heavy(layer, x[b], context[b], routing, b, False, None)
        gates = dict(zip(routing.q.indices[b].tolist(), routing.q.gates[b], strict=True))
        for i in range(x.shape[1]):
            rows.append((1 - gates[i]) * layer.null + gates[i] * far[i] if i in far else layer.null)
    return torch.stack(rows).view(x.shape)
