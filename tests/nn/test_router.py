"""Routers: scores, choices, gates, shares of real tokens, causal rules; faults of the public library by name."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onepass
from nn.layers import bounds, first, tokens
from onepass.fused.choice import row_counts
from onepass.nn import CausalRouter, RoutedBlock, RoutedCrossAttention, Router
from onepass.nn.count import count

DIM = 16
gates = pytest.mark.parametrize("gate", ["soft", "straight_through"])


@pytest.mark.parametrize("dim", [32, 512, 1024])
@pytest.mark.parametrize("size", [1e-2, 1.0, 100.0])
def test_scores_start_with_a_standard_deviation_of_one(dim: int, size: float) -> None:
    assert 0.8 < Router(dim, num_routes=8)(size * tokens(2, 500, dim), 8).scores.std().item() < 1.2


@gates
@pytest.mark.parametrize("routes", [1, 3])
def test_choices_are_the_best_scores_in_order(gate: str, routes: int) -> None:
    x, several = tokens(2, 50, DIM), Router(DIM, routes, gate=gate, eps=0.2)
    out = several(x, 6)
    assert out.indices.shape == out.gates.shape == ((2, 6) if routes == 1 else (2, routes, 6))
    values, indices = out.scores.topk(6)
    assert torch.equal(out.indices, indices)
    assert torch.equal(out.scores.gather(-1, indices), values)
    if gate == "soft":
        assert torch.equal(out.gates, onepass.soft_topk(out.scores, 6, eps=0.2).gather(-1, indices))
        assert ((out.gates > 0) & (out.gates <= 1)).all()
    # each of several routes is a router of its own
    for r in range(routes):
        single = Router(DIM, gate=gate, eps=0.2)
        single.load_state_dict({"weight": several.weight[r : r + 1]})
        alone = single(x, 6)
        assert torch.equal(alone.indices, out.indices.view(2, routes, 6)[:, r])
        torch.testing.assert_close(alone.gates, out.gates.view(2, routes, 6)[:, r])


def test_straight_through_gates_are_one_with_the_gradient_of_the_soft_ones() -> None:
    x, upstream = tokens(2, 50, DIM), tokens(2, 6)
    soft, hard = Router(DIM), Router(DIM, gate="straight_through")
    hard.load_state_dict(soft.state_dict())
    soft_out, hard_out = soft(x, 6), hard(x, 6)
    assert torch.equal(hard_out.gates, torch.ones(2, 6))
    (a,) = torch.autograd.grad(soft_out.gates, soft.weight, upstream)
    (b,) = torch.autograd.grad(hard_out.gates, hard.weight, upstream)
    torch.testing.assert_close(a, b)
    assert a.abs().max() > 0


@pytest.mark.parametrize("routes", [1, 2])
@pytest.mark.parametrize(
    ("batch", "n", "k", "chosen"), [(2, 3, 5, 3), (2, 3, 3, 3), (2, 5, 0, 0), (2, 0, 4, 0), (0, 5, 2, 2)]
)
def test_shapes_at_the_edges(routes: int, batch: int, n: int, k: int, chosen: int) -> None:
    out = Router(DIM, routes)(torch.randn(batch, n, DIM), k)
    lead = (batch,) if routes == 1 else (batch, routes)
    assert out.indices.shape == out.gates.shape == (*lead, chosen)
    assert out.scores.shape == (*lead, n)
    assert out.indices.dtype == torch.int64
    assert (out.gates == 1).all() or chosen < n


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_and_gates_are_fp32_or_wider_whatever_the_tokens(dtype: torch.dtype) -> None:
    router = Router(DIM, dtype=dtype)
    out = router(tokens(2, 20, DIM).to(dtype), 4)
    assert {out.scores.dtype, out.gates.dtype} == {torch.promote_types(dtype, torch.float32)}
    assert torch.autograd.grad(out.gates.sum(), router.weight)[0].dtype == dtype


@gates
@pytest.mark.parametrize("shift", [-5.0, 0.0, 5.0])
def test_fault_6_a_higher_score_opens_the_gate_whatever_its_sign(gate: str, shift: float) -> None:
    """Also when all scores are negative, pushing one up opens its own gate and no other."""
    router = Router(DIM, gate=gate).double()
    direction = router.weight.detach()[0] / router.weight.detach().norm()
    out = router(tokens(1, 20, DIM).double() + shift * direction, 6)
    if shift:
        assert (out.scores.sign() == torch.tensor(shift).sign()).all()
    for j, own in enumerate(out.indices[0]):
        (d,) = torch.autograd.grad(out.gates[0, j], out.scores, retain_graph=True)
        assert d[0, own] >= 0
        # what one gate gains the others lose: no gate grows with another token's score
        assert (d[0].index_fill(0, own, 0) <= 1e-12).all()
    assert torch.autograd.grad(out.gates.sum(), out.scores)[0].abs().max() > 0


@gates
@pytest.mark.parametrize("seed", range(3))
def test_fault_8_the_default_router_gets_a_gradient_from_the_first_step(gate: str, seed: int) -> None:
    """The published default's is exactly 0 at this size: every selected gate is saturated."""
    torch.manual_seed(seed)
    router = Router(512, gate=gate)
    out = router(torch.randn(2, 4096, 512), 256)
    # a random preference for some of the chosen tokens, as a loss has it at the start
    d_scores, grad = torch.autograd.grad(out.gates, [out.scores, router.weight], torch.randn(2, 256))
    assert grad.norm() > 0.1
    # a good part of the chosen tokens takes part, not a lucky few
    assert (d_scores.gather(1, out.indices) != 0).float().mean() > 0.25


WIDE = torch.float64


@pytest.mark.parametrize("make", [Router, lambda dim: CausalRouter(dim, block=4, memory=8)])
def test_a_packed_router(make: Callable[[int], Router]) -> None:
    router, x = make(DIM).double(), tokens(30, DIM, dtype=WIDE)
    out = router(x, 0.25, cu_seqlens=bounds([18, 12]))
    assert out.scores.shape == (2, 18)
    for b, part in enumerate((x[:18], x[18:])):
        alone = router(part[None], 0.25)
        assert torch.equal(out.indices[b][out.indices[b] >= 0], alone.indices[0][alone.indices[0] >= 0])


@gates
@pytest.mark.parametrize("routes", [1, 3])
@pytest.mark.parametrize("share", [0.25, 8])
def test_fault_5_masked_tokens_are_never_selected(gate: str, routes: int, share: int | float) -> None:
    """Holes count as padding, also those of the tokens that would be chosen first."""
    router, x = Router(DIM, routes, gate=gate).double(), tokens(2, 60, DIM, dtype=WIDE)
    mask = torch.ones(2, 60, dtype=torch.bool).scatter(1, router(x, 8).indices.view(2, -1), False)
    out = router(x, share, mask)
    for b in range(2):
        where = mask[b].nonzero()[:, 0]
        alone = router(x[b : b + 1, where], share)
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
    torch.testing.assert_close(y[1:, :7], layer(x[1:, :7], context[1:, :22]), rtol=1e-10, atol=1e-10)


@given(share=st.floats(1e-6, 1.0) | st.integers(1, 99).map(lambda percent: percent / 100), n=st.integers(0, 5000))
def test_host_and_device_count_alike(share: float, n: int) -> None:
    """As fractions do, halves to even."""
    assert int(row_counts(share, torch.arange(5000) < n)) == count(share, n)
    assert count(share, n) == min(n, max(1, round(Fraction(share).limit_denominator(2**20) * n)))


def test_a_causal_router_refuses_an_int_k() -> None:
    with pytest.raises(TypeError, match=r"CausalRouter: .* need k as a share"):
        CausalRouter(DIM)(tokens(30, DIM), 4, cu_seqlens=bounds([18, 12]))
    # nothing chosen is nothing chosen at any length
    assert CausalRouter(DIM)(tokens(30, DIM), 0, cu_seqlens=bounds([18, 12])).indices.shape == (2, 0)


class TestCausalRouter:
    @pytest.mark.parametrize("shift", [0, 3])
    def test_the_share_is_kept_on_a_long_sequence(self, shift: int) -> None:
        """The threshold follows: no score level is special."""
        router = CausalRouter(64)
        direction = router.weight.detach()[0] / router.weight.detach()[0].norm()
        out = router(tokens(2, 8192, 64) - shift * direction, 512)
        assert not shift or (out.scores < 0).float().mean() > 0.9
        assert ((out.indices >= 0).sum(-1) >= 0.9 * 512).all()

    @pytest.mark.parametrize(("window", "memory"), [(1, 2048), (48, 2016), (128, 2048), (2048, 2048), (3000, 3000)])
    def test_a_layer_remembers_whole_windows(self, window: int, memory: int) -> None:
        block = RoutedBlock(16, 1 / 4, heads=2, dim_head=8, window=window, causal=True)
        assert block.feed_forward.router.memory == memory
        assert block.attention.router_q.memory == memory
        assert block(torch.randn(1, 100, 16)).isfinite().all()
