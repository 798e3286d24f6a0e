"""Where `contrib.colt5`'s modules differ from the original: its fault, and what ours give instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contrib import colt5 as ours

theirs = pytest.importorskip("colt5_attention")

pytestmark = pytest.mark.slow
ATTENTION: dict[str, Any] = {
    "num_heavy_tokens_q": 3, "num_heavy_tokens_kv": 4, "light_dim_head": 4, "light_heads": 2, "light_window_size": 8,
    "heavy_dim_head": 4, "heavy_heads": 2,
}  # fmt: skip


def tokens(batch: int = 2, n: int = 24, dim: int = 8) -> Tensor:
    return torch.randn(batch, n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(11)
    a, b = (getattr(package, name)(*args, **kwargs).double() for package in (ours, theirs))
    a.load_state_dict(b.state_dict())
    return a, b


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_choice_is_by_score() -> None:
    """In a wide model more than k gates are exactly 1: the original's top-k of gates is a choice among equals."""
    a, b = pair("CoordinateDescentRouter", 512)
    x = tokens(n=64, dim=512)
    scores = x @ a.routing_token[0]
    gates = theirs.coor_descent(scores, n_iters=20, k=8 * 9 / 8, eps=0.03, eps_init=4.0, eps_decay=0.7)
    assert (gates == 1).sum(-1).gt(8).all()
    assert torch.equal(a(x, num_tokens=8).indices, scores.topk(8).indices)
    assert (b(x, num_tokens=8).scores == 1).all()


def test_routes_take_their_own_sequence() -> None:
    """The original's row i takes the tokens of sequence i // routes."""
    a, b = pair("CoordinateDescentRouter", 8, num_routing_tokens=2, eps=2.0)
    x = tokens()
    mine, their = a(x, num_tokens=4), b(x, num_tokens=4)
    rows = torch.arange(2)[:, None, None]
    assert torch.equal(mine.routed_tokens, x[rows, mine.indices])
    assert torch.equal(their.routed_tokens, x[torch.zeros_like(rows), their.indices])
    whole, _ = pair("ConditionalRoutedAttention", 8, **ATTENTION, num_routed_kv=2)
    assert close(whole(x)[1:], whole(x[1:]))


def test_blocks_of_a_route() -> None:
    a, b = pair("CoordinateDescentRouter", 8, route_block_size=6)
    x = tokens(n=26)
    with pytest.raises(IndexError):
        b(x, num_tokens=7)
    found = a(x, num_tokens=7)
    plain = ours.CoordinateDescentRouter(8).double()
    plain.load_state_dict(a.state_dict())
    one = [plain(x[:, i : i + 6], num_tokens=2) for i in (0, 6, 12, 18)]
    assert torch.equal(found.indices, torch.cat([r.indices + 6 * i for i, r in enumerate(one)], -1))
    assert torch.equal(found.routed_tokens, torch.cat([r.routed_tokens for r in one], 1))
    with pytest.raises(ValueError, match="route_block_size must be ≤ n = 5 of a routed sequence, got 6"):
        a(x[:, :5], num_tokens=4)


def test_missing_tokens() -> None:
    """A row with fewer real tokens than k: the original returns masked tokens with gate 0."""
    a, b = pair("CoordinateDescentRouter", 8)
    mask = torch.arange(24) < torch.tensor([[2], [0]])
    mine, their = (r(tokens(), num_tokens=4, mask=mask) for r in (a, b))
    assert mine.indices[0, 2:].tolist() == [-1, -1]
    assert mine.indices[1].tolist() == [-1] * 4
    assert (their.indices >= 0).all()
    assert mine.scores.tolist() == [[1.0, 1.0, 0.0, 0.0], [0.0] * 4]
    assert torch.equal(mine.routed_mask, mine.indices >= 0)
    assert not mine.routed_tokens[1].any()
    layer, original = pair("ConditionalRoutedFeedForward", 8, num_heavy_tokens=4)
    assert close(layer(tokens(), mask), original(tokens(), mask))


def test_no_token_sees_padding_of_windows() -> None:
    """A length that is no multiple of the local window: the original attends to zeros that it appended."""
    a, b = pair("ConditionalRoutedAttention", 8, **ATTENTION, router_kwargs={"eps": 8.0, "eps_init": 8.0})
    x = tokens(n=22)
    assert close(a(x), b(x, mask=torch.ones(2, 22, dtype=torch.bool)))
    assert not close(a(x), b(x))


def test_random_route_needs_no_mask() -> None:
    a, b = pair("CoordinateDescentRouter", 8, straight_through=False)
    with pytest.raises(TypeError):
        b(tokens(), num_tokens=4, random_route=True)
    found = a(tokens(), num_tokens=4, random_route=True)
    assert (found.scores == 1).all()
    assert (found.indices.sort(-1)[0].diff(dim=-1) > 0).all()


def test_short_sequences_have_local_attention_alone() -> None:
    a, b = pair("ConditionalRoutedAutoregressiveAttention", 8, **ATTENTION)
    for n in (1, 5, 8):
        x = tokens(n=n)
        assert close(a(x), a.light_attn(x))
    with pytest.raises((RuntimeError, ValueError)):
        b(tokens(n=5))


def test_queries_read_their_window_as_in_the_original() -> None:
    """The leak that the docstring names: it ends with the window."""
    a, _ = pair("ConditionalRoutedAutoregressiveAttention", 8, **ATTENTION)
    x = tokens(n=24)
    changed = x.clone()
    changed[:, 16:] += 1
    assert torch.equal(a(x)[:, :16], a(changed)[:, :16])


@pytest.mark.parametrize("shape", [(0, 24), (2, 0), (1, 1)])
def test_nothing_and_one(shape: tuple[int, int]) -> None:
    x = tokens(*shape)
    for name, options in (
        ("ConditionalRoutedFeedForward", {"num_heavy_tokens": 3}),
        ("ConditionalRoutedAttention", ATTENTION),
        ("ConditionalRoutedAutoregressiveAttention", ATTENTION),
    ):
        layer, _ = pair(name, 8, **options)
        y = layer(x.requires_grad_())
        assert y.shape == x.shape
        y.sum().backward()


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("CoordinateDescentRouter", {"fetch_k_ratio": 0.5}, "fetch_k_ratio must be ≥ 1, got 0.5"),
        ("CoordinateDescentRouter", {"num_routing_tokens": 0}, "num_routing_tokens must be ≥ 1, got 0"),
        ("ConditionalRoutedFeedForward", {"num_heavy_tokens": 2.5}, "num_heavy_tokens must be an int, got float"),
        (
            "ConditionalRoutedFeedForward",
            {"num_heavy_tokens": 2, "light_ff_mult": 0},
            "light_ff_mult must give a hidden",
        ),
        ("ConditionalRoutedAttention", {**ATTENTION, "num_routed_kv": 3}, "must be a multiple of 3 routes, got 2"),
        ("ConditionalRoutedAttention", {**ATTENTION, "light_window_size": 1}, "light_window_size must be ≥ 2, got 1"),
        ("ConditionalRoutedAttention", {**ATTENTION, "rotary_emb": True, "heavy_dim_head": 3}, "dim_head must be even"),
    ],
)
def test_refused(name: str, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        getattr(ours, name)(8, **kwargs)


def test_refused_calls() -> None:
    layer, _ = pair("ConditionalRoutedAttention", 8, **ATTENTION)
    with pytest.raises(ValueError, match=r"x must be \(batch, n, 8\), got \(2, 24, 4\)"):
        layer(tokens(dim=4))
    with pytest.raises(ValueError, match=r"mask must be \(batch, n\) = \(2, 24\), got \(2, 23\)"):
        layer(tokens(), mask=torch.ones(2, 23, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be bool"):
        layer(tokens(), mask=torch.ones(2, 24))
    image, _ = pair("ConditionalRoutedImageAttention", 8, **ATTENTION)
    with pytest.raises(ValueError, match=r"height and width must be multiples of 8, got \(8, 12\)"):
        image(tokens(n=96).view(2, 8, 12, 8))
