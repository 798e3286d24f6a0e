"""`Router`: scores, choices, gates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import onepass
from onepass.nn import CausalRouter, RoutedCrossAttention, Router


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [32, 512, 1024])
@pytest.mark.parametrize("score", ["normalised", "cosine"])
@pytest.mark.parametrize("size", [1e-2, 1.0, 100.0])
def test_scores_start_with_a_standard_deviation_of_one(dim: int, score: str, size: float) -> None:
    router = Router(dim, num_routes=8, score=score)
    scores = router(size * _tokens(2, 500, dim), 8).scores
    assert 0.8 < scores.std().item() < 1.2


def test_scores_are_those_of_the_formula() -> None:
    x = _tokens(2, 7, 16).double()
    router = Router(16, num_routes=3, dtype=torch.float64)
    rms = x.square().mean(-1, keepdim=True).sqrt()
    expected = torch.einsum("bnd,rd->brn", x / rms, router.weight)
    torch.testing.assert_close(router(x, 2).scores, expected, rtol=1e-5, atol=1e-5)
    cosine = Router(16, score="cosine", dtype=torch.float64)
    expected = 4 * torch.cosine_similarity(x, cosine.weight[0], dim=-1)
    torch.testing.assert_close(cosine(x, 2).scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate", ["soft", "straight_through"])
@pytest.mark.parametrize("routes", [1, 3])
def test_choices_are_the_best_scores_in_order(gate: str, routes: int) -> None:
    router = Router(16, routes, gate=gate)
    out = router(_tokens(2, 50, 16), 6)
    assert out.indices.shape == out.gates.shape == ((2, 6) if routes == 1 else (2, routes, 6))
    assert out.indices.dtype == torch.int64
    values, indices = out.scores.topk(6)
    assert torch.equal(out.indices, indices)
    assert torch.equal(out.scores.gather(-1, out.indices), values)


def test_soft_gates_are_those_of_soft_topk_at_the_chosen_tokens() -> None:
    router = Router(16, eps=0.2)
    out = router(_tokens(2, 50, 16), 6)
    soft = onepass.soft_topk(out.scores, 6, eps=0.2)
    assert torch.equal(out.gates, soft.gather(-1, out.indices))
    assert ((out.gates > 0) & (out.gates <= 1)).all()


def test_straight_through_gates_are_one_with_the_gradient_of_the_soft_ones() -> None:
    x, upstream = _tokens(2, 50, 16), _tokens(2, 6)
    soft, hard = Router(16), Router(16, gate="straight_through")
    hard.load_state_dict(soft.state_dict())
    soft_out, hard_out = soft(x, 6), hard(x, 6)
    assert torch.equal(hard_out.gates, torch.ones(2, 6))
    (a,) = torch.autograd.grad(soft_out.gates, soft.weight, upstream)
    (b,) = torch.autograd.grad(hard_out.gates, hard.weight, upstream)
    torch.testing.assert_close(a, b)
    assert a.abs().max() > 0


def test_one_route_of_several_is_a_router_of_its_own() -> None:
    x = _tokens(3, 40, 16)
    several = Router(16, num_routes=3)
    out = several(x, 5)
    for r in range(3):
        single = Router(16)
        single.load_state_dict({"weight": several.weight[r : r + 1]})
        alone = single(x, 5)
        assert torch.equal(alone.indices, out.indices[:, r])
        torch.testing.assert_close(alone.gates, out.gates[:, r])


class TestFewTokens:
    def test_fewer_real_tokens_than_k(self) -> None:
        mask = torch.zeros(2, 10, dtype=torch.bool)
        mask[0, [2, 7]] = True
        mask[1, :8] = True
        out = Router(16)(_tokens(2, 10, 16), 4, mask)
        assert set(out.indices[0, :2].tolist()) == {2, 7}
        assert out.indices[0, 2:].tolist() == [-1, -1]
        assert out.gates[0].tolist() == [1, 1, 0, 0]
        assert (out.indices[1] < 8).all()

    def test_no_real_token(self) -> None:
        router = Router(16)
        out = router(_tokens(2, 10, 16), 4, torch.zeros(2, 10, dtype=torch.bool))
        assert (out.indices == -1).all()
        assert not out.gates.any()
        out.gates.sum().backward()
        assert router.weight.grad is not None
        assert not router.weight.grad.any()

    @pytest.mark.parametrize("routes", [1, 2])
    @pytest.mark.parametrize(
        ("batch", "n", "k", "chosen"), [(2, 3, 5, 3), (2, 3, 3, 3), (2, 5, 0, 0), (2, 0, 4, 0), (0, 5, 2, 2)]
    )
    def test_shapes_at_the_edges(self, routes: int, batch: int, n: int, k: int, chosen: int) -> None:
        out = Router(16, routes)(torch.randn(batch, n, 16), k)
        lead = (batch,) if routes == 1 else (batch, routes)
        assert out.indices.shape == out.gates.shape == (*lead, chosen)
        assert out.scores.shape == (*lead, n)
        assert out.indices.dtype == torch.int64
        assert (out.gates == 1).all() or chosen < n


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_and_gates_are_fp32_or_wider_whatever_the_tokens(dtype: torch.dtype) -> None:
    router = Router(16, dtype=dtype)
    out = router(_tokens(2, 20, 16).to(dtype), 4)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.scores.dtype, out.gates.dtype) == (expected, expected)
    out.gates.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == dtype


class TestErrors:
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: Router(0), "dim must be ≥ 1, got 0"),
            (lambda: Router(8, 17), "num_routes must be 1 to 16, got 17"),
            (lambda: Router(8, eps=0.0), "eps must be a finite number > 0, got 0.0"),
            (lambda: Router(8, eps=math.inf), "eps must be a finite number > 0, got inf"),
            (lambda: Router(8, kind="hard"), "kind must be one of capped_exp.*got 'hard'"),
            (lambda: Router(8, score="dot"), "score must be one of normalised, cosine; got 'dot'"),
            (lambda: Router(8, gate="none"), "gate must be one of soft, straight_through; got 'none'"),
        ],
    )
    def test_constructor(self, make, match: str) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ValueError, match=match):
            make()

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: Router(8.0), "Router: dim must be an int, got float"),
            (lambda: Router(8, "2"), "Router: num_routes must be an int, got str"),
            (lambda: Router(8, eps=torch.ones(())), "Router: eps must be a number, got Tensor"),
            (lambda: Router(8, explore=None), "Router: explore must be a number, got NoneType"),
            (lambda: CausalRouter(8, block=2.0), "CausalRouter: block must be an int, got float"),
            (lambda: CausalRouter(8, memory=None), "CausalRouter: memory must be an int, got NoneType"),
            (lambda: RoutedCrossAttention(8, 1, 1, dim_context="8"), "dim_context must be an int, got str"),
        ],
    )
    def test_types(self, make, match: str) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(TypeError, match=match):
            make()

    @pytest.mark.parametrize(
        ("args", "error", "match"),
        [
            ((torch.ones(2, 8), 1), ValueError, r"x must be \(batch, n, 8\), got \(2, 8\)"),
            ((torch.ones(2, 5, 7), 1), ValueError, r"got \(2, 5, 7\)"),
            ((torch.ones(2, 5, 8, dtype=torch.int64), 1), TypeError, "int64"),
            (
                (torch.ones(2, 5, 8), 1.5),
                ValueError,
                "an int ≥ 0 or a share 0 < k ≤ 1 of the real tokens, got 1.5",
            ),
            ((torch.ones(2, 5, 8), "1"), TypeError, "k must be an int or a float, got str"),
            ((torch.ones(2, 5, 8), True), TypeError, "k must be an int or a float, got bool"),
            ((torch.ones(2, 5, 8), -1), ValueError, "k must be an int ≥ 0 or a share.*, got -1"),
            ((torch.ones(2, 5, 8), 1, torch.ones(2, 5)), TypeError, "mask must be bool.*float32"),
            (
                (torch.ones(2, 5, 8), 1, torch.ones(5, dtype=torch.bool)),
                ValueError,
                r"mask must be .*\(2, 5\), got \(5,\)",
            ),
            ((torch.ones(2, 5, 8), 1, [True]), TypeError, "mask must be a tensor"),
        ],
    )
    def test_call(self, args: tuple, error: type[Exception], match: str) -> None:  # type: ignore[type-arg]
        with pytest.raises(error, match=match):
            Router(8)(*args)
