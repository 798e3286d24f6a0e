"""A share counts a row's real tokens: a padded row gives what its tokens give alone, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.fused.choice import row_counts
from onepass.nn import RoutedAttention, RoutedBlock, RoutedCrossAttention, RoutedFeedForward, Router
from onepass.nn.causal import CausalRouter
from onepass.nn.count import count
from onepass.ops.soft_topk.op import KINDS

DIM, WINDOW = 16, 8

LAYERS: dict[str, Callable[[bool, float], nn.Module]] = {
    "attention": lambda causal, k: RoutedAttention(
        DIM, k, min(1.0, 2 * k), heads=2, dim_head=8, window=WINDOW, causal=causal
    ),
    "feed forward": lambda causal, k: RoutedFeedForward(
        DIM, k, router=CausalRouter(DIM, block=WINDOW, memory=16) if causal else None
    ),
    "block": lambda causal, k: RoutedBlock(DIM, k, heads=2, dim_head=8, window=WINDOW, causal=causal),
}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _watched(layer: nn.Module) -> None:
    """A hook on every part: the layer runs module by module."""
    for part in layer.modules():
        part.register_forward_hook(lambda *_: None)


def _outputs(routing: Any) -> list[Any]:
    """Return the `RouterOutput`s of any routing."""
    if hasattr(routing, "indices"):
        return [routing]
    return [output for part in routing for output in _outputs(part)]


def _padded_equals_alone(layer: nn.Module, lengths: list[int], n: int, seed: int) -> None:
    rows = [_random(length, DIM, seed=seed + i).requires_grad_() for i, length in enumerate(lengths)]
    upstream = [_random(length, DIM, seed=seed + 100 + i) for i, length in enumerate(lengths)]
    parameters = [p for p in layer.parameters() if p.requires_grad]
    mask = torch.arange(n) < torch.tensor(lengths)[:, None]
    padded = torch.full((len(lengths), n, DIM), torch.nan, dtype=torch.float64)
    padded = torch.stack(
        [torch.cat((row, padded[i, length:])) for i, (row, length) in enumerate(zip(rows, lengths, strict=True))]
    )
    y, routing = layer(padded, mask, return_routing=True)
    loss = sum((y[i, : len(u)] * u).sum() for i, u in enumerate(upstream))
    grads = torch.autograd.grad(loss, [*rows, *parameters], allow_unused=True)  # type: ignore[arg-type]
    total: list[Tensor | None] = [None] * len(parameters)
    for i, (row, u) in enumerate(zip(rows, upstream, strict=True)):
        alone, own = layer(row[None], return_routing=True)
        torch.testing.assert_close(y[i, : len(u)], alone[0], rtol=1e-10, atol=1e-10)
        for a, b in zip(_outputs(routing), _outputs(own), strict=True):
            chosen, there = a.indices[i], b.indices[0]
            assert torch.equal(chosen[chosen >= 0], there[there >= 0])
            torch.testing.assert_close(a.gates[i][chosen >= 0], b.gates[0][there >= 0], rtol=1e-10, atol=1e-10)
        gx, *rest = torch.autograd.grad((alone[0] * u).sum(), [row, *parameters], allow_unused=True)
        torch.testing.assert_close(grads[i], gx, rtol=1e-10, atol=1e-10)
        total = [t if g is None else g if t is None else t + g for t, g in zip(total, rest, strict=True)]
    for a, b in zip(grads[len(rows) :], total, strict=True):
        assert (a is None or not a.any()) if b is None else a is not None
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("watched", [False, True], ids=["fused", "composed"])
@pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"])
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=12, deadline=None)
@given(
    k=st.sampled_from((1 / 16, 0.1, 0.3, 0.5, 0.9, 1.0)),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    more=st.integers(0, 25),
    seed=st.integers(0, 1000),
)
def test_padded_equals_alone(
    name: str, causal: bool, watched: bool, k: float, lengths: list[int], more: int, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = LAYERS[name](causal, k).double()
    if watched:
        _watched(layer)
    _padded_equals_alone(layer, lengths, max(lengths) + more, seed)


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watched", [False, True], ids=["fused", "composed"])
def test_every_gate(kind: str, gate: str, watched: bool) -> None:
    torch.manual_seed(1)
    routers = [Router(DIM, kind=kind, gate=gate) for _ in range(3)]
    attention = RoutedAttention(
        DIM, 0.3, 0.4, heads=2, dim_head=8, window=WINDOW, router_q=routers[0], router_kv=routers[1]
    )
    for layer in (attention.double(), RoutedFeedForward(DIM, 0.3, router=routers[2]).double()):
        if watched:
            _watched(layer)
        _padded_equals_alone(layer, [17, 1, 40], 48, 5)


def test_the_700_of_1024() -> None:
    """The case that showed the fault: 700 tokens alone, and padded to 1024."""
    torch.manual_seed(0)
    for causal in (False, True):
        layer = RoutedBlock(DIM, 1 / 16, heads=2, dim_head=8, window=128, causal=causal).double()
        _padded_equals_alone(layer, [700, 1024], 1024, 3)


def test_holes_count_as_padding() -> None:
    router, x = Router(DIM).double(), _random(2, 60, DIM, seed=1)
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(2)) < 0.4
    out = router(x, 0.25, mask)
    for b in range(2):
        where = mask[b].nonzero()[:, 0]
        alone = router(x[b : b + 1, where], 0.25)
        chosen = out.indices[b][out.indices[b] >= 0]
        assert torch.equal(chosen, where[alone.indices[0]])
        torch.testing.assert_close(out.gates[b, : len(chosen)], alone.gates[0])


def test_several_routes() -> None:
    router, x = Router(DIM, 3).double(), _random(2, 30, DIM, seed=1)
    mask = torch.arange(30) < torch.tensor([[30], [13]])
    out, alone = router(x, 0.2, mask), router(x[1:, :13], 0.2)
    assert torch.equal(out.indices[1, :, :3], alone.indices[0])
    assert (out.indices[1, :, 3:] == -1).all()
    torch.testing.assert_close(out.gates[1, :, :3], alone.gates[0])
    assert not out.gates[1, :, 3:].any()


def test_memories_of_cross_attention() -> None:
    torch.manual_seed(2)
    layer = RoutedCrossAttention(DIM, 0.5, 0.25, heads=2, dim_head=8).double()
    x, context = _random(2, 20, DIM, seed=1), _random(2, 50, DIM, seed=2)
    mask, of_context = torch.arange(20) < torch.tensor([[20], [7]]), torch.arange(50) < torch.tensor([[50], [22]])
    y = layer(x, context, mask, of_context)
    alone = layer(x[1:, :7], context[1:, :22])
    torch.testing.assert_close(y[1:, :7], alone, rtol=1e-10, atol=1e-10)


def test_nothing_real_chooses_nothing() -> None:
    for router in (Router(DIM), CausalRouter(DIM, block=4, memory=8)):
        out = router(torch.randn(2, 12, DIM), 0.5, torch.zeros(2, 12, dtype=torch.bool))
        assert (out.indices == -1).all()
        assert not out.gates.any()


@given(share=st.floats(1e-6, 1.0), n=st.integers(0, 5000))
def test_host_and_device_count_alike(share: float, n: int) -> None:
    mask = torch.arange(5000) < n
    assert int(row_counts(share, mask)) == count(share, n)
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
    for n in (150, 350):
        x = torch.randn(2, n, DIM)
        y, routing = compiled(x, return_routing=True)
        assert routing.indices.shape[1] == round(Fraction(7, 100) * n)
        assert torch.equal(y, layer(x))


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
    x = torch.randn(2, 1024, 128, device="cuda")
    mask = torch.arange(1024, device="cuda") < torch.tensor([[700], [1024]], device="cuda")
    short = x[:1, :700].clone().requires_grad_()
    x.requires_grad_()
    y, routing = layer(x, mask, return_routing=True)
    alone, own = layer(short, return_routing=True)
    for a, b in zip(_outputs(routing), _outputs(own), strict=True):
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
        mask.copy_(torch.arange(1024, device="cuda") < torch.tensor([[300], [0]], device="cuda"))
        graph.replay()
        torch.testing.assert_close(captured[0, :300], layer(still[:1, :300])[0], rtol=1e-3, atol=1e-4)
