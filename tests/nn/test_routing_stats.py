"""`RoutingStats` against sets of tokens counted in Python, and what it must not disturb."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.nn import (
    AttentionRouting,
    Routed,
    RoutedAttention,
    RoutedBlock,
    RoutedCrossAttention,
    RoutedFeedForward,
    Router,
    RouterOutput,
    RoutingStats,
)

DIM = 16
ATTENTION: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": 8}


class Stack(nn.Module):
    """Layers one after another, each with the mask."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def _tokens(batch: int = 3, n: int = 40) -> Tensor:
    return torch.randn(batch, n, DIM, generator=torch.Generator().manual_seed(1))


def _mask(*lengths: int, n: int = 40) -> Tensor:
    return torch.arange(n) < torch.tensor(lengths)[:, None]


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
def test_add_is_the_definition(batch: int, n: int, k: int, routes: int, masked: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, DIM, generator=random)
    # holes anywhere, not only at the end
    mask = torch.rand(batch, n, generator=random) < 0.6 if masked else None
    routers = [Router(DIM, routes) for _ in range(2)]
    outputs = [[router(tokens, k, mask) for tokens in (x, -x)] for router in routers]
    stats = RoutingStats()
    for call in range(2):
        for name, output in zip("ab", outputs, strict=True):
            stats.add(name, output[call], mask)
    real = torch.ones(batch, n, dtype=torch.bool) if mask is None else mask
    scalars = stats.scalars()
    assert _of(scalars, "a.router") == pytest.approx(_expected(outputs[0], real))
    assert _of(scalars, "b.router") == pytest.approx(_expected(outputs[1], real, outputs[0]))


def test_known_numbers() -> None:
    scores = torch.zeros(1, 32)
    ends = RouterOutput(torch.tensor([[0, 31, 1, -1]]), torch.tensor([[1.0, 0.9995, 0.5, 0.0]]), scores)
    start = RouterOutput(torch.tensor([[0, 1]]), torch.tensor([[0.0005, 0.2]]), scores)
    stats = RoutingStats()
    stats.add("", ends)
    assert stats.scalars() == pytest.approx(
        {"router/share": 3 / 32, "router/entropy": (2 / 3 * math.log(1.5) + math.log(3) / 3) / math.log(16),
         "router/saturated": 2 / 3, "router/closed": 0.0}
    )  # fmt: skip
    stats.reset()
    assert stats.scalars() == {}
    stats.add("0", ends)
    stats.add("1", start)
    known = {"share": 2 / 32, "entropy": 0.0, "overlap": 1.0, "saturated": 0.0, "closed": 0.5}
    assert _of(stats.scalars(), "1.router") == known


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (40, 25, 0)])
def test_hooks_count_what_the_layers_return(causal: bool, lengths: tuple[int, ...] | None) -> None:
    blocks = [RoutedBlock(DIM, 1 / 4, causal=causal, **ATTENTION) for _ in range(3)]
    model, mask, added = Stack(*blocks), None if lengths is None else _mask(*lengths), RoutingStats()
    with RoutingStats(model) as stats:
        for scale in (1, 2):
            model(scale * _tokens(), mask)
    for scale in (1, 2):
        x = scale * _tokens()
        for i, block in enumerate(blocks):
            x, routing = block(x, mask, return_routing=True)
            added.add(f"blocks.{i}", routing, mask)
    assert stats.scalars() == added.scalars()
    # three routers in three blocks, with an overlap in all blocks but the first
    assert Counter(name.rpartition("/")[2] for name in stats.scalars()) == {
        "share": 9, "entropy": 9, "saturated": 9, "closed": 9, "overlap": 6,
    }  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_outputs_keep_their_bits_and_gradients(masked: bool) -> None:
    model = Stack(
        RoutedBlock(DIM, 1 / 4, **ATTENTION), RoutedFeedForward(DIM, 0.5), RoutedAttention(DIM, 4, 4, **ATTENTION)
    )
    x, mask = _tokens().requires_grad_(), _mask(40, 25, 3) if masked else None
    found = []
    for listening in (False, True):
        stats = RoutingStats(model)
        if listening:
            stats.__enter__()
        y = model(x, mask)
        stats.__exit__()
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "layer",
    [RoutedBlock(DIM, 0.25, **ATTENTION), RoutedFeedForward(DIM, 0.25), RoutedAttention(DIM, 4, 4, **ATTENTION)],
)
def test_layers_stay_fused(layer: nn.Module) -> None:
    """A router is a module whose call only the composition makes."""
    called, patched = [], Router.forward

    def forward(self: Router, *args: Any, **kwargs: Any) -> RouterOutput:
        called.append(self)
        return patched(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, RoutingStats(layer) as stats:
        patch.setattr(Router, "forward", forward)
        layer(_tokens())
        assert not called
        layer(_tokens().requires_grad_(), None)
        assert not called
        # this test would notice
        next(m for m in layer.modules() if isinstance(m, Router)).register_forward_hook(lambda *_: None)
        layer(_tokens())
        assert called
    assert stats.scalars()


def test_callers_get_what_they_asked_for() -> None:
    layer, x, mask = RoutedFeedForward(DIM, 4), _tokens(), _mask(40, 9, 1)
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(type(out)))
    calls = ((x,), {}), ((x, mask), {}), ((x, mask, False), {}), ((x,), {"mask": mask, "return_routing": False})
    with RoutingStats(layer) as stats:
        for args, kwargs in calls:
            assert isinstance(layer(*args, **kwargs), Tensor)
        assert isinstance(layer(x, return_routing=True)[1], RouterOutput)
        assert isinstance(layer(x, None, True)[1], RouterOutput)
        assert seen == [Tensor] * 4 + [tuple] * 2
    # masks count by place and by name: three calls with 50 real tokens, three with all 120
    assert stats.scalars()["router/share"] == pytest.approx(3 * (9 + 12) / (3 * 50 + 3 * 120))
    before = stats.scalars()
    layer(x)
    assert stats.scalars() == before


def test_a_copy_made_while_listening_counts_nothing() -> None:
    layer, x = RoutedFeedForward(DIM, 4), _tokens()
    with RoutingStats(layer) as stats:
        other = copy.deepcopy(layer)
        assert torch.equal(other(x), layer(x))
    before = stats.scalars()
    assert isinstance(other(x), Tensor)
    assert isinstance(other(x, return_routing=True)[1], RouterOutput)
    assert stats.scalars() == before
    assert before["router/share"] == pytest.approx(4 / 40)


def test_cross_attention_counts_its_memories() -> None:
    layer = RoutedCrossAttention(DIM, 4, 8, heads=2, dim_head=8)
    x, context, context_mask = _tokens(), _tokens(n=64), _mask(64, 30, 4, n=64)
    with RoutingStats(layer) as stats:
        layer(x, context, None, context_mask)
        y = layer(x, context, context_mask=context_mask)
    assert isinstance(y, Tensor)
    scalars = stats.scalars()
    assert scalars["router_q/share"] == 4 / 40
    assert scalars["router_kv/share"] == pytest.approx((8 + 8 + 4) / 98)
    added, routing = RoutingStats(), layer(x, context, None, context_mask, True)[1]
    assert isinstance(routing, AttentionRouting)
    added.add("", routing, context_mask=context_mask)
    assert added.scalars() == scalars


def test_sizes_may_change_from_call_to_call() -> None:
    """The last batch is often smaller, and lengths vary."""
    model, n = nn.Sequential(*(RoutedFeedForward(DIM, 0.25) for _ in range(2))), (40, 24, 0)
    with RoutingStats(model) as stats:
        for batch, length in zip((3, 1, 2), n, strict=True):
            model(_tokens(batch, length))
    scalars = stats.scalars()
    assert scalars["0.router/share"] == scalars["1.router/share"] == 0.25
    assert 0 <= scalars["1.router/overlap"] <= 1
    assert "0.router/overlap" not in scalars


def test_overlap_is_within_a_pass_and_a_role() -> None:
    same = nn.ModuleList(Routed(nn.Identity(), nn.Identity(), Router(DIM), k=4) for _ in range(3))
    for layer in same[1:]:
        layer.load_state_dict(same[0].state_dict())
    x = _tokens()
    with RoutingStats(same) as stats:
        for shift in (0, 1):
            rolled = x.roll(7 * shift, 1)
            for layer in same if shift == 0 else same[::2]:
                layer(rolled)
    scalars = stats.scalars()
    # equal layers on equal tokens agree; one that follows another router than in the first pass is not compared
    assert scalars["1.router/overlap"] == scalars["2.router/overlap"] == 1.0
    assert "0.router/overlap" not in scalars


@pytest.mark.parametrize("causal", [False, True])
def test_straight_through_gates_count_as_soft_ones(causal: bool) -> None:
    soft, hard = Router(DIM), Router(DIM, gate="straight_through")
    hard.load_state_dict(soft.state_dict())
    x, mask = 3 * _tokens(), _mask(40, 25, 3)
    found = []
    for router in (soft, hard):
        layer = RoutedAttention(DIM, 0.25, 0.5, causal=causal, router_kv=router, **ATTENTION)
        with RoutingStats(layer) as stats:
            layer(x, mask)
        found.append({name: value for name, value in stats.scalars().items() if "_kv" in name})
    assert found[0] == found[1]
    assert found[1]["router_kv/saturated"] < 1


def test_compiled() -> None:
    model, x = Stack(*(RoutedFeedForward(DIM, 0.25) for _ in range(2))), _tokens()
    with RoutingStats(model) as eager:
        expected = model(x)
    torch._dynamo.reset()
    with RoutingStats(model) as stats:
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, expected)
    assert stats.scalars() == pytest.approx(eager.scalars())
    torch._dynamo.reset()


def test_inference_mode_and_grad_mode_mix() -> None:
    layer = RoutedFeedForward(DIM, 4)
    with RoutingStats(layer) as stats:
        with torch.inference_mode():
            layer(_tokens())
        layer(_tokens().requires_grad_()).sum().backward()
        with torch.no_grad():
            layer.eval()(_tokens())
    assert stats.scalars()["router/share"] == 4 / 40


def test_the_host_waits_for_nothing_before_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    stats, mask = RoutingStats(), _mask(40, 25, 0)
    routing = RoutedBlock(DIM, 0.25, causal=True, **ATTENTION)(_tokens(), mask, return_routing=True)[1]
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, refuse)
        for block in "abab":
            stats.add(block, routing, mask)
    assert stats.scalars()


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits() -> None:
    model = Stack(*(RoutedBlock(64, 0.25, heads=2, dim_head=32, causal=True) for _ in range(2))).cuda()
    x, mask = torch.randn(2, 300, 64, device="cuda"), _mask(300, 170, n=300).cuda()
    with RoutingStats(model) as stats, torch.no_grad():
        model(x, mask)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    added = RoutingStats()
    for _ in range(2):
        y = x
        for i, block in enumerate(model.blocks):
            y, routing = block(y, mask, return_routing=True)
            added.add(f"blocks.{i}", routing, mask)
    assert stats.scalars() == added.scalars()


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"RoutingStats: model must be an nn.Module or None, got str"):
        RoutingStats("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RoutingStats: Linear has no routed layer"):
        RoutingStats(nn.Linear(2, 2))
    stats, output = RoutingStats(RoutedFeedForward(DIM, 4)), Router(DIM)(_tokens(), 4)
    with pytest.raises(TypeError, match="routing must be a RouterOutput, AttentionRouting or BlockRouting, got Tensor"):
        stats.add("a", torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="RoutingStats: mask must be bool"):
        stats.add("a", output, torch.ones(3, 40))
    with pytest.raises(ValueError, match=r"RoutingStats: mask must be \(batch, n\) = \(3, 40\), got \(3, 39\)"):
        stats.add("a", output, _mask(1, 2, 3, n=39))
    with stats, pytest.raises(RuntimeError, match="listens already"), stats:
        pass


def test_counts_of_several_processes_add_up() -> None:
    model, x = Stack(RoutedFeedForward(DIM, k=1 / 4), RoutedFeedForward(DIM, k=1 / 4)), torch.randn(6, 64, DIM)
    with RoutingStats(model) as whole, torch.no_grad():
        model(x)
    counted: list[Tensor] = []

    def note(counts: Tensor) -> Tensor:
        counted.append(counts)
        return sum(counted)  # type: ignore[return-value]

    # one after another in place of processes; the last one sees the sum
    for rows in (slice(0, 1), slice(1, 1), slice(1, 6)):
        with RoutingStats(model) as stats, torch.no_grad():
            model(x[rows])
        numbers = stats.scalars(note)
    assert counted[1].sum() == 0
    assert numbers == whole.scalars()
