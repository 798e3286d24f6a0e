"""A share counts a row's real tokens, on the host and on a device; `test_contracts.py` has padded and packed rows."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nn.layers import bounds, first, padded_is_as_alone, rows_of, tokens, watched
from onepass.fused.choice import row_counts
from onepass.nn import (
    CausalRouter,
    RoutedAttention,
    RoutedCrossAttention,
    RoutedFeedForward,
    Router,
    routing_stats,
)
from onepass.nn.count import count
from onepass.ops.soft_topk.op import KINDS

DIM, WINDOW, WIDE = 16, 8, torch.float64
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": WINDOW}
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("composed", [False, True], ids=["fused", "composed"])
def test_every_gate(kind: str, gate: str, composed: bool) -> None:
    torch.manual_seed(1)
    q, kv, own = (Router(DIM, kind=kind, gate=gate) for _ in range(3))
    attention = RoutedAttention(DIM, 0.3, 0.4, router_q=q, router_kv=kv, **HEADS)
    for layer in (attention.double(), RoutedFeedForward(DIM, 0.3, router=own).double()):
        if composed:
            watched(layer)
        padded_is_as_alone(layer, rows_of([17, 1, 40], DIM, 5), 48)


@pytest.mark.parametrize("make", [Router, lambda dim: CausalRouter(dim, block=4, memory=8)])
def test_a_packed_router(make: Callable[[int], Router]) -> None:
    router, x = make(DIM).double(), tokens(30, DIM, dtype=WIDE)
    out = router(x, 0.25, cu_seqlens=bounds([18, 12]))
    assert out.scores.shape == (2, 18)
    for b, part in enumerate((x[:18], x[18:])):
        alone = router(part[None], 0.25)
        assert torch.equal(out.indices[b][out.indices[b] >= 0], alone.indices[0][alone.indices[0] >= 0])


@pytest.mark.parametrize("routes", [1, 3])
def test_holes_count_as_padding(routes: int) -> None:
    router, x = Router(DIM, routes).double(), tokens(2, 60, DIM, dtype=WIDE)
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(2)) < 0.4
    out = router(x, 0.25, mask)
    for b in range(2):
        where = mask[b].nonzero()[:, 0]
        alone = router(x[b : b + 1, where], 0.25)
        k = alone.indices.shape[-1]
        assert torch.equal(out.indices[b, ..., :k], where[alone.indices[0]])
        torch.testing.assert_close(out.gates[b, ..., :k], alone.gates[0])
        assert (out.indices[b, ..., k:] == -1).all()
        assert not out.gates[b, ..., k:].any()


def test_memories_of_cross_attention() -> None:
    torch.manual_seed(2)
    layer = RoutedCrossAttention(DIM, 0.5, 0.25, heads=2, dim_head=8).double()
    x, context = tokens(2, 20, DIM, dtype=WIDE), tokens(2, 50, DIM, seed=2, dtype=WIDE)
    y = layer(x, context, first(20, 20, 7), first(50, 50, 22))
    torch.testing.assert_close(y[1:, :7], layer(x[1:, :7], context[1:, :22]), **TIGHT)


def test_nothing_real_chooses_nothing() -> None:
    for router in (Router(DIM), CausalRouter(DIM, block=4, memory=8)):
        out = router(torch.randn(2, 12, DIM), 0.5, torch.zeros(2, 12, dtype=torch.bool))
        assert (out.indices == -1).all()
        assert not out.gates.any()


@given(share=st.floats(1e-6, 1.0), n=st.integers(0, 5000))
def test_host_and_device_count_alike(share: float, n: int) -> None:
    assert int(row_counts(share, torch.arange(5000) < n)) == count(share, n)
    assert abs(count(share, n) - share * n) <= 0.51 or count(share, n) == 1


@given(share=st.integers(1, 99), n=st.integers(1, 5000))
def test_halves_round_to_even_as_fractions_do(share: int, n: int) -> None:
    assert count(share / 100, n) == max(1, round(Fraction(share, 100) * n))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_choose_as_many(dynamic: bool) -> None:
    torch.compiler.reset()
    layer = RoutedFeedForward(DIM, 0.07).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    # 7 % are 10.5 and 24.5 tokens
    for n in (150, 350) if dynamic else (150,):
        x = torch.randn(2, n, DIM)
        y, routing = compiled(x, return_routing=True)
        assert routing.indices.shape[1] == round(Fraction(7, 100) * n)
        assert torch.equal(y, layer(x))
    if not dynamic:
        packed = {"cu_seqlens": bounds([18, 12]), "max_seqlen": 18}
        torch.testing.assert_close(compiled(x[0, :30], **packed), layer(x[0, :30], **packed))


def test_what_statistics_count_of_a_packed_sequence() -> None:
    _, routing = RoutedFeedForward(DIM, 0.25)(tokens(48, DIM), cu_seqlens=bounds([40, 8]), return_routing=True)
    # the routing is that of the padded batch
    assert routing_stats([[routing]], [first(40, 40, 8)])["0.router/share"] == 0.25


def test_a_causal_router_refuses_an_int_k() -> None:
    with pytest.raises(TypeError, match=r"CausalRouter: .* need k as a share"):
        CausalRouter(DIM)(tokens(30, DIM), 4, cu_seqlens=bounds([18, 12]))
    # nothing chosen is nothing chosen at any length
    assert CausalRouter(DIM)(tokens(30, DIM), 0, cu_seqlens=bounds([18, 12])).indices.shape == (2, 0)
