"""What the tests of modules share: tokens, masks, hooks, and routed attention written down with full matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def rows_of(lengths: list[int], width: int, seed: int) -> list[Tensor]:
    return [tokens(n, width, seed=seed + i, dtype=torch.float64).requires_grad_() for i, n in enumerate(lengths)]


def bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def each_is_as_alone(
    layer: nn.Module, call: Callable[[list[Tensor]], tuple[list[Tensor], Any]], rows: list[Tensor]
) -> None:
    """Outputs by row of `call`, and the choices if it has them, equal those of one call a row; gradients too."""
    upstream = [tokens(*row.shape, seed=100 + i, dtype=row.dtype) for i, row in enumerate(rows)]
    ys, routing = call(rows)
    alone = [layer(row[None], return_routing=True) for row in rows]
    for i, (y, (expected, own)) in enumerate(zip(ys, alone, strict=True)):
        torch.testing.assert_close(y, expected[0], rtol=1e-10, atol=1e-10)
        for a, b in zip(outputs(routing) if routing else (), outputs(own), strict=bool(routing)):
            if a.indices.shape[1:-1] == a.scores.shape[1:]:
                continue  # the choices of experts are rows of tokens
            chosen, there = a.indices[i] >= 0, b.indices[0] >= 0
            assert torch.equal(a.indices[i][chosen], b.indices[0][there])
            assert not a.gates[i][~chosen].any()
            torch.testing.assert_close(a.gates[i][chosen], b.gates[0][there], rtol=1e-10, atol=1e-10)
    found = [
        torch.autograd.grad([*r], [*rows, *layer.parameters()], upstream, allow_unused=True, materialize_grads=True)
        for r in (ys, [y[0] for y, _ in alone])
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


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
