"""`routing_stats` against sets of tokens counted in Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nn.layers import first, tokens
from onepass.nn import RoutedBlock, RoutedCrossAttention, RoutedFeedForward, Router, RouterOutput, routing_stats

DIM = 16
ATTENTION: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": 8}


def _expected(
    outputs: Sequence[RouterOutput], mask: Tensor, before: Sequence[RouterOutput] | None = None
) -> dict[str, float]:
    """The numbers by the docstring's formulas, from sets of tokens; an output for each call."""
    chosen, gates, bins, real, both = 0, [], Counter[int](), 0, 0
    for call, output in enumerate(outputs):
        for row, keep in enumerate(mask.tolist()):
            places = [i for i, kept in enumerate(keep) if kept]
            picked = {i for i in output.indices[row].flatten().tolist() if i >= 0}
            real, chosen = real + len(places), chosen + len(picked)
            bins.update(16 * places.index(i) // len(places) for i in picked)
            pairs = zip(output.indices[row].flatten().tolist(), output.gates[row].flatten().tolist(), strict=True)
            gates += [g for i, g in pairs if i >= 0]
            if before:
                both += len(picked & set(before[call].indices[row].flatten().tolist()))
    out: dict[str, float] = {"share": chosen / real} if real else {}
    if chosen:
        out["entropy"] = -sum(b / chosen * math.log(b / chosen) for b in bins.values()) / math.log(16)
        if before:
            out["overlap"] = both / chosen
    if gates:
        out["saturated"] = sum(g >= 0.999 for g in gates) / len(gates)
        out["closed"] = sum(g <= 0.001 for g in gates) / len(gates)
    return out


def _of(scalars: dict[str, float], router: str) -> dict[str, float]:
    return {key.rpartition("/")[2]: value for key, value in scalars.items() if key.rpartition("/")[0] == router}


@given(st.integers(0, 3), st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_numbers_are_the_definition(batch: int, n: int, k: int, routes: int, masked: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, DIM, generator=random)
    # holes anywhere, not only at the end
    mask = torch.rand(batch, n, generator=random) < 0.6 if masked else None
    routers = [Router(DIM, routes) for _ in range(2)]
    outputs = [[router(tokens, k, mask) for tokens in (x, -x)] for router in routers]
    passes = [{"a": a, "b": b} for a, b in zip(*outputs, strict=True)]
    real = torch.ones(batch, n, dtype=torch.bool) if mask is None else mask
    scalars = routing_stats(passes, [mask] * 2)
    assert _of(scalars, "a.router") == pytest.approx(_expected(outputs[0], real))
    assert _of(scalars, "b.router") == pytest.approx(_expected(outputs[1], real, outputs[0]))


def test_blocks(causal: bool) -> None:
    mask, x, routings = first(40, 40, 25, 0), tokens(3, 40, DIM), []
    for _ in range(3):
        x, routing = RoutedBlock(DIM, 1 / 4, causal=causal, **ATTENTION)(x, mask, return_routing=True)
        routings.append(routing)
    scalars = routing_stats([routings], [mask])
    for i, routing in enumerate(routings):
        for path, output in (
            ("attention.router_q", routing.attention.q), ("attention.router_kv", routing.attention.kv),
            ("feed_forward.router", routing.feed_forward),
        ):  # fmt: skip
            before = None
            if i:
                of_one = routings[i - 1]
                before = [of_one.feed_forward if "feed" in path else getattr(of_one.attention, path[17:])]
            assert _of(scalars, f"{i}.{path}") == pytest.approx(_expected([output], mask, before))


def test_cross_attention_counts_its_memories() -> None:
    layer = RoutedCrossAttention(DIM, 4, 8, heads=2, dim_head=8)
    context_mask = first(64, 64, 30, 4)
    _, routing = layer(tokens(3, 40, DIM), tokens(3, 64, DIM), None, context_mask, return_routing=True)
    scalars = routing_stats([{"cross": routing}], context_masks=[context_mask])
    assert scalars["cross.router_q/share"] == 4 / 40
    assert scalars["cross.router_kv/share"] == pytest.approx((8 + 8 + 4) / 98)


def test_counts_of_several_processes_add_up() -> None:
    layer, x = RoutedFeedForward(DIM, k=1 / 4), torch.randn(6, 64, DIM)
    whole, counted = routing_stats([[layer(x, return_routing=True)[1]]]), list[Tensor]()

    def note(counts: Tensor) -> Tensor:
        counted.append(counts)
        return sum(counted)  # type: ignore[return-value]

    # one after another in place of processes; the last one sees the sum
    for rows in (slice(0, 1), slice(1, 1), slice(1, 6)):
        numbers = routing_stats([[layer(x[rows], return_routing=True)[1]]], total=note)
    assert counted[1].sum() == 0
    assert numbers == whole
