"""What the tests of modules share: tokens, masks, hooks, and routed attention written down with full matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn import AttentionRouting, LocalAttention, RoutedAttention, RoutedCrossAttention


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def holes(n: int) -> Tensor:
    """A mask (3, n): a row with holes, one with three real tokens, one with none."""
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[1, 3:] = False
    mask[2] = False
    return mask


def first(n: int, *lengths: int) -> Tensor:
    """A mask in which the first tokens of each row are real."""
    return torch.arange(n) < torch.tensor(lengths)[:, None]


def watched(layer: nn.Module) -> list[str]:
    """Names of the parts that run, by a hook on each: with one, a layer is its modules instead of one node."""
    ran: list[str] = []
    for name, part in layer.named_modules():
        part.register_forward_hook(lambda *_, name=name: ran.append(name))
    return ran


def outputs(routing: Any) -> list[Any]:
    """The `RouterOutput`s of any routing."""
    if routing is None:
        return []
    return [routing] if hasattr(routing, "indices") else [output for part in routing for output in outputs(part)]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, times e^{i·position·speed}; x (n, heads, width) in float64."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One sequence (n, heads, width), a full matrix `seen` (n, m); who sees no key gets 0."""
    p = (torch.einsum("nhc,mhc->hnm", q, k) / math.sqrt(q.shape[-1])).exp() * seen
    return torch.einsum("hnm,mhc->nhc", p / p.sum(-1, keepdim=True).clamp_min(1e-30), v).flatten(1)


def local(light: LocalAttention, x: Tensor, mask: Tensor) -> Tensor:
    """One sequence (n, dim); masked tokens count as zeros."""
    at = torch.arange(len(x))
    q, k, v = light.qkv(rms(x * mask[:, None], light.norm.weight)).view(len(x), 3, light.heads, -1).unbind(1)
    seen = ((at // light.window)[:, None] - at // light.window).abs() <= 1
    seen = (seen.tril() if light.causal else seen) & mask
    return light.out(attend(turned(q, at), turned(k, at), v, seen))


def heavy(
    layer: RoutedAttention | RoutedCrossAttention, x: Tensor, context: Tensor, routing: AttentionRouting, b: int,
    rotary: bool, window: int | None = None,
) -> Tensor:  # fmt: skip
    """(1 − g)·ν + g·attention at the chosen tokens of sequence b, ν at the others."""
    branch = layer.heavy
    (at_q, gates_q), (at_kv, gates_kv) = (
        (r.indices[b][r.indices[b] >= 0], r.gates[b][r.indices[b] >= 0][:, None]) for r in routing
    )
    q = branch.q(rms(x[at_q], branch.norm_q.weight)).view(-1, branch.heads, branch.dim_head)
    k, v = branch.kv(rms(context[at_kv], branch.norm_kv.weight)).view(-1, 2, *q.shape[1:]).unbind(1)
    if rotary:
        q, k = turned(q, at_q), turned(k, at_kv)
    seen = torch.ones(len(q), len(k)) if window is None else at_kv // window < (at_q // window)[:, None]
    y = branch.out(attend(q, k, v * gates_kv[..., None], seen))
    return layer.null.expand(len(x), -1).index_add(0, at_q, gates_q * (y - layer.null))


def routed_attention(layer: RoutedAttention, x: Tensor, mask: Tensor | None, routing: AttentionRouting) -> Tensor:
    """`RoutedAttention`, given what was chosen."""
    mask, window = torch.ones(x.shape[:2]).bool() if mask is None else mask, layer.window if layer.causal else None
    far = (heavy(layer, row, row, routing, b, True, window) for b, row in enumerate(x))
    return torch.stack([local(layer.light, x[b], mask[b]) + row for b, row in enumerate(far)])


def cross_attention(layer: RoutedCrossAttention, x: Tensor, context: Tensor, routing: AttentionRouting) -> Tensor:
    """`RoutedCrossAttention`, given what was chosen."""
    return torch.stack([heavy(layer, x[b], context[b], routing, b, False) for b in range(len(x))])
