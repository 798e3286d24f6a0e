"""A share counts a row's real tokens: a padded row, or one of a packed sequence, gives what its tokens give alone.

Forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nn.layers import first, outputs, tokens, watched
from onepass.fused.choice import row_counts
from onepass.nn import (
    CausalRouter,
    Routed,
    RoutedAttention,
    RoutedBlock,
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
LAYERS: dict[str, Callable[[bool, float], nn.Module]] = {
    "attention": lambda causal, k: RoutedAttention(DIM, k, min(1.0, 2 * k), causal=causal, **HEADS),
    "feed forward": lambda causal, k: RoutedFeedForward(
        DIM, k, router=CausalRouter(DIM, block=WINDOW, memory=16) if causal else None
    ),
    "block": lambda causal, k: RoutedBlock(DIM, k, causal=causal, **HEADS),
    "routed": lambda causal, k: Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), k),
}


def _rows(lengths: list[int], seed: int) -> list[Tensor]:
    return [tokens(length, DIM, seed=seed + i, dtype=WIDE) for i, length in enumerate(lengths)]


def _bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def _each_is_as_alone(
    layer: nn.Module, run: Callable[[list[Tensor]], tuple[list[Tensor], Any]], lengths: list[int], seed: int
) -> None:
    """Outputs by row of `run`, and the choices if it has them, equal those of one call a row; gradients too."""
    rows, upstream = [t.requires_grad_() for t in _rows(lengths, seed)], _rows(lengths, seed + 100)
    wanted = [*rows, *layer.parameters()]
    ys, routing = run(rows)
    alone = [layer(row[None], return_routing=True) for row in rows]
    for i, (y, (expected, own)) in enumerate(zip(ys, alone, strict=True)):
        torch.testing.assert_close(y, expected[0], **TIGHT)
        for a, b in zip(outputs(routing) if routing else (), outputs(own), strict=bool(routing)):
            chosen, there = a.indices[i] >= 0, b.indices[0] >= 0
            assert torch.equal(a.indices[i][chosen], b.indices[0][there])
            torch.testing.assert_close(a.gates[i][chosen], b.gates[0][there], **TIGHT)
    found = [
        torch.autograd.grad([*results], wanted, upstream, allow_unused=True, materialize_grads=True)
        for results in (ys, [y[0] for y, _ in alone])
    ]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def _padded_equals_alone(layer: nn.Module, lengths: list[int], n: int, seed: int) -> None:
    def run(rows: list[Tensor]) -> tuple[list[Tensor], Any]:
        x = torch.stack([nn.functional.pad(row, (0, 0, 0, n - len(row)), value=torch.nan) for row in rows])
        y, routing = layer(x, first(n, *lengths), return_routing=True)
        return [row[:length] for row, length in zip(y, lengths, strict=True)], routing

    _each_is_as_alone(layer, run, lengths, seed)


@pytest.mark.parametrize("composed", [False, True], ids=["fused", "composed"])
@pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "routed"])
@settings(max_examples=6)
@given(
    k=st.sampled_from((1 / 16, 0.1, 0.3, 0.5, 0.9, 1.0)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    more=st.integers(0, 25),
    seed=st.integers(0, 1000),
)
def test_padded_equals_alone(
    name: str, causal: bool, composed: bool, k: float, lengths: list[int], more: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = LAYERS[name](causal, k).double()
    if composed:
        watched(layer)
    _padded_equals_alone(layer, lengths, max(lengths) + more, seed)


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
        _padded_equals_alone(layer, [17, 1, 40], 48, 5)


@pytest.mark.parametrize(("name", "causal"), [("routed", False), *((n, c) for n in [*LAYERS][:3] for c in (0, 1))])
@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    k=st.sampled_from((0.2, 0.3)),
    more=st.sampled_from((None, 0, 5)),
    flat=st.booleans(),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 1000),
)
def test_packed_equals_alone(
    name: str, causal: bool, lengths: list[int], k: float, more: int | None, flat: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = LAYERS[name](causal, k).double()

    def run(rows: list[Tensor]) -> tuple[list[Tensor], None]:
        x = torch.cat(rows)
        most = None if more is None else max(lengths) + more
        y = layer(x if flat else x[None], cu_seqlens=_bounds(lengths, dtype), max_seqlen=most)
        assert y.shape == (x.shape if flat else (1, *x.shape))
        return [*y.view(x.shape).split(lengths)], None

    _each_is_as_alone(layer, run, lengths, seed)


def test_an_int_k_of_layers_that_are_not_causal_counts_tokens_of_each() -> None:
    layer = RoutedBlock(DIM, 4, **HEADS).double().eval()

    def run(rows: list[Tensor]) -> tuple[list[Tensor], None]:
        return [*layer(torch.cat(rows), cu_seqlens=_bounds([18, 12]), max_seqlen=20).split([18, 12])], None

    _each_is_as_alone(layer, run, [18, 12], 1)


@pytest.mark.parametrize("make", [Router, lambda dim: CausalRouter(dim, block=4, memory=8)])
def test_a_packed_router(make: Callable[[int], Router]) -> None:
    router, x = make(DIM).double(), tokens(30, DIM, dtype=WIDE)
    out = router(x, 0.25, cu_seqlens=_bounds([18, 12]))
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
        packed = {"cu_seqlens": _bounds([18, 12]), "max_seqlen": 18}
        torch.testing.assert_close(compiled(x[0, :30], **packed), layer(x[0, :30], **packed))


def test_what_statistics_count_of_a_packed_sequence() -> None:
    _, routing = RoutedFeedForward(DIM, 0.25)(tokens(48, DIM), cu_seqlens=_bounds([40, 8]), return_routing=True)
    # the routing is that of the padded batch
    assert routing_stats([[routing]], [first(40, 40, 8)])["0.router/share"] == 0.25


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: RoutedBlock(DIM, 4, causal=True, **HEADS), "RoutedAttention: .* need k_q as a share"),
        (lambda: RoutedAttention(DIM, 0.25, 4, causal=True, **HEADS), "RoutedAttention: .* need k_kv as a share"),
        (lambda: RoutedFeedForward(DIM, 4, router=CausalRouter(DIM)), "RoutedFeedForward: .* need k as a share"),
        (lambda: Routed(nn.Identity(), nn.Identity(), CausalRouter(DIM), 4), "Routed: .* need k as a share"),
    ],
)
def test_a_causal_layer_refuses_an_int_k(make: Callable[[], nn.Module], name: str) -> None:
    # it would be the share k/n of the longest sequence for all
    with pytest.raises(TypeError, match=f"{name}, .* got the int 4, which means the share 4/n"):
        make()(tokens(30, DIM), cu_seqlens=_bounds([18, 12]))


def test_a_causal_router_refuses_an_int_k() -> None:
    with pytest.raises(TypeError, match=r"CausalRouter: .* need k as a share"):
        CausalRouter(DIM)(tokens(30, DIM), 4, cu_seqlens=_bounds([18, 12]))
    # nothing chosen is nothing chosen at any length
    assert CausalRouter(DIM)(tokens(30, DIM), 0, cu_seqlens=_bounds([18, 12])).indices.shape == (2, 0)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must be a tensor, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, r"cu_seqlens must be \(sequences \+ 1,\), got \(1, 2\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"rise from 0 to the 6 tokens of x, got \[0, 5\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, r"rise from 0 .* got \[0, 4, 3, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 6]), "max_seqlen": 5}, ValueError, "max_seqlen must be at least 6.* got 5"),
        ({"cu_seqlens": torch.tensor([0, 6]), "max_seqlen": 6.0}, TypeError, "max_seqlen must be an int, got float"),
        ({"cu_seqlens": torch.tensor([0, 6], device="meta")}, ValueError, "cu_seqlens is on meta but x is on cpu"),
        ({"cu_seqlens": torch.tensor([0, 6]), "mask": torch.ones(1, 6).bool()}, ValueError, "exclude each other"),
        ({"max_seqlen": 6}, ValueError, "max_seqlen belongs to cu_seqlens"),
    ],
)
def test_what_is_refused(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    for call in (*(LAYERS[name](False, 0.3) for name in [*LAYERS][:3]), lambda x, **o: Router(DIM)(x, 0.5, **o)):
        with pytest.raises(error, match=match):
            call(torch.ones(1, 6, DIM), **kwargs)


def test_several_rows_are_no_packed_sequence() -> None:
    with pytest.raises(ValueError, match=r"x must be \(total, dim\) or \(1, total, dim\), got \(2, 3, 16\)"):
        LAYERS["block"](False, 0.2)(torch.ones(2, 3, DIM), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.gpu
def test_packed_on_gpu() -> None:
    layer = RoutedBlock(128, 1 / 8, heads=2, dim_head=64, window=32, causal=True).cuda()
    x, bounds = torch.randn(500, 128, device="cuda"), _bounds([300, 200]).cuda()
    with pytest.raises(ValueError, match=r"max_seqlen.*must be given"):
        layer(x, cu_seqlens=bounds)
    y = layer(x, cu_seqlens=bounds, max_seqlen=300)
    expected = torch.cat((layer(x[None, :300])[0], layer(x[None, 300:])[0]))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(3):
            layer(x, cu_seqlens=bounds, max_seqlen=300)
        with torch.cuda.graph(graph):
            captured = layer(x, cu_seqlens=bounds, max_seqlen=300)
        graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"])
def test_padded_equals_alone_on_gpu(causal: bool, gate: str) -> None:
    """In fp32, by kernels: the choices are the same, outputs and gradients to rounding; a CUDA graph can hold it."""
    torch.manual_seed(3)
    layer = RoutedBlock(128, 1 / 16, heads=2, dim_head=64, window=64, causal=causal).cuda()
    if not causal:
        for part in (layer.attention.router_q, layer.attention.router_kv, layer.feed_forward.router):
            part.gate = gate
    x, mask = torch.randn(2, 1024, 128, device="cuda"), first(1024, 700, 1024).cuda()
    short = x[:1, :700].clone().requires_grad_()
    x.requires_grad_()
    y, routing = layer(x, mask, return_routing=True)
    alone, own = layer(short, return_routing=True)
    for a, b in zip(outputs(routing), outputs(own), strict=True):
        assert torch.equal(a.indices[0][a.indices[0] >= 0], b.indices[0][b.indices[0] >= 0])
    torch.testing.assert_close(y[0, :700], alone[0], rtol=1e-3, atol=1e-4)
    (dx,) = torch.autograd.grad(y[0, :700].square().sum(), x)
    (expected,) = torch.autograd.grad(alone.square().sum(), short)
    torch.testing.assert_close(dx[0, :700], expected[0], rtol=1e-3, atol=1e-3)

    graph, still = torch.cuda.CUDAGraph(), x.detach()
    with torch.no_grad():
        for _ in range(3):
            layer(still, mask)
        with torch.cuda.graph(graph):
            captured = layer(still, mask)
        mask.copy_(first(1024, 300, 0))
        graph.replay()
        torch.testing.assert_close(captured[0, :300], layer(still[:1, :300])[0], rtol=1e-3, atol=1e-4)
