"""Packed sequences: each gives what it gives alone, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.nn import CausalRouter, Routed, RoutedAttention, RoutedBlock, RoutedFeedForward, Router, RoutingStats

DIM, WINDOW = 16, 8
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": WINDOW}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "routed": lambda: Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), 0.3),
    "feed forward": lambda: RoutedFeedForward(DIM, 0.3),
    "attention": lambda: RoutedAttention(DIM, 0.2, 0.4, **HEADS),
    "causal attention": lambda: RoutedAttention(DIM, 0.2, 0.4, causal=True, **HEADS),
    "block": lambda: RoutedBlock(DIM, 0.2, **HEADS),
    "causal block": lambda: RoutedBlock(DIM, 0.2, causal=True, **HEADS),
}


def _bounds(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def _tokens(total: int, seed: int) -> Tensor:
    return torch.randn(total, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    more=st.sampled_from((None, 0, 5)),
    flat=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_each_gives_what_it_gives_alone(
    name: str, lengths: list[int], more: int | None, flat: bool, wide: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, total = LAYERS[name]().double(), sum(lengths)
    x, upstream = _tokens(total, seed).requires_grad_(), _tokens(total, seed + 1)
    y = layer(
        x if flat else x[None], cu_seqlens=_bounds(lengths, torch.int64 if wide else torch.int32),
        max_seqlen=None if more is None else max(lengths) + more,
    )  # fmt: skip
    assert y.shape == (x.shape if flat else (1, *x.shape))
    weights = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad((y.view(x.shape) * upstream).sum(), [x, *weights], allow_unused=True)
    parts = [t for t in x.detach().split(lengths) if len(t)]  # type: ignore[no-untyped-call]
    ups = [t for t in upstream.split(lengths) if len(t)]  # type: ignore[no-untyped-call]
    parts = [part.clone().requires_grad_() for part in parts]
    alone = [layer(part[None])[0] for part in parts]
    tight = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(y.view(x.shape), torch.cat(alone), **tight)
    loss = torch.stack([(a * u).sum() for a, u in zip(alone, ups, strict=True)]).sum()
    expected = torch.autograd.grad(loss, [*parts, *weights], allow_unused=True)
    torch.testing.assert_close(grads[0], torch.cat(expected[: len(parts)]), **tight)  # type: ignore[arg-type]
    for a, b in zip(grads[1:], expected[len(parts) :], strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(*(zero if t is None or not t.any() else t for t in (a, b)), **tight)


@pytest.mark.parametrize("make", [Router, lambda dim: CausalRouter(dim, block=4, memory=8)])
def test_routers(make: Callable[[int], Router]) -> None:
    router, x = make(DIM).double(), _tokens(30, 1)
    out = router(x, 0.25, cu_seqlens=_bounds([18, 12]))
    assert out.scores.shape == (2, 18)
    for b, part in enumerate((x[:18], x[18:])):
        alone = router(part[None], 0.25)
        assert torch.equal(out.indices[b][out.indices[b] >= 0], alone.indices[0][alone.indices[0] >= 0])


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
        make()(_tokens(30, 1).float(), cu_seqlens=_bounds([18, 12]))


def test_a_causal_router_refuses_an_int_k() -> None:
    with pytest.raises(TypeError, match=r"CausalRouter: .* need k as a share"):
        CausalRouter(DIM)(_tokens(30, 1).float(), 4, cu_seqlens=_bounds([18, 12]))
    # nothing chosen is nothing chosen at any length
    assert CausalRouter(DIM)(_tokens(30, 1).float(), 0, cu_seqlens=_bounds([18, 12])).indices.shape == (2, 0)


def test_an_int_k_of_other_layers_counts_tokens_of_each() -> None:
    layer, x = RoutedBlock(DIM, 4, **HEADS).double().eval(), _tokens(30, 1)
    y = layer(x, cu_seqlens=_bounds([18, 12]), max_seqlen=20)
    alone = [layer(part[None])[0] for part in (x[:18], x[18:])]
    torch.testing.assert_close(y, torch.cat(alone), rtol=1e-9, atol=1e-9)


def test_what_statistics_count() -> None:
    model = nn.Sequential(RoutedFeedForward(DIM, 0.25))
    with RoutingStats(model) as stats, torch.no_grad():
        model[0](_tokens(48, 1).float(), cu_seqlens=_bounds([40, 8]))
    assert stats.scalars()["0.router/share"] == 0.25


def test_compiled_with_a_length() -> None:
    layer, x, bounds = RoutedFeedForward(DIM, 0.25), _tokens(30, 1).float(), _bounds([18, 12])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cu_seqlens=bounds, max_seqlen=18), layer(x, cu_seqlens=bounds))


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
    x = torch.ones(1, 6, DIM)
    for call in (LAYERS["feed forward"](), LAYERS["attention"](), LAYERS["block"]()):
        with pytest.raises(error, match=match):
            call(x, **kwargs)
    with pytest.raises(error, match=match):
        Router(DIM)(x, 0.5, **kwargs)


def test_several_rows_are_no_packed_sequence() -> None:
    with pytest.raises(ValueError, match=r"x must be \(total, dim\) or \(1, total, dim\), got \(2, 3, 16\)"):
        LAYERS["block"]()(torch.ones(2, 3, DIM), cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.gpu
def test_on_gpu() -> None:
    layer = RoutedBlock(128, 1 / 8, heads=2, dim_head=64, window=32, causal=True).cuda()
    x, bounds = torch.randn(500, 128, device="cuda"), torch.tensor([0, 300, 500], dtype=torch.int32, device="cuda")
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
