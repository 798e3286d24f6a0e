"""Parts of a sequence on several devices, and who computes which chosen tokens; `tests/sharded` has the layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onepass.fused.parts import parts, shares, wanted
from onepass.nn import Routed, RoutedBlock, RoutedFeedForward, Router
from onepass.nn.over_sequence import sequence_axis

LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "Routed": lambda balance: Routed(nn.Identity(), nn.Linear(8, 8), Router(8), 2, balance=balance),
    "RoutedFeedForward": lambda balance: RoutedFeedForward(8, 2, balance=balance),
    "RoutedBlock": lambda balance: RoutedBlock(8, 2, heads=2, dim_head=4, window=4, balance=balance),
}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_no_device_has_more_than_an_even_part(counts: list[int]) -> None:
    plan = shares(counts)
    most = -(-sum(counts) // len(counts))
    given_, taken = ([b - a for a, b in ranges] for ranges in (plan.given, plan.taken))
    assert [k + g for k, g in zip(plan.kept, given_, strict=True)] == counts
    assert all(k + t <= most for k, t in zip(plan.kept, taken, strict=True))
    # no device both sends and receives, and no more travels than devices have above their part
    assert not any(g and t for g, t in zip(given_, taken, strict=True))
    assert plan.travelling == sum(given_) == sum(taken) == sum(max(0, c - most) for c in counts)
    for ranges in (plan.given, plan.taken):
        # the ranges cover the list in order
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]


def test_examples() -> None:
    crowded = shares([0, 9, 0, 0])
    assert crowded.kept == [0, 3, 0, 0]
    assert crowded.given == [(0, 0), (0, 6), (6, 6), (6, 6)]
    assert crowded.taken == [(0, 3), (3, 3), (3, 6), (6, 6)]
    assert shares([3, 3, 3, 0]).travelling == shares([0, 0]).travelling == 0


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_on_one_device_are_computed_as_without(name: str) -> None:
    torch.manual_seed(0)
    plain, balanced = LAYERS[name](False), LAYERS[name](True)
    balanced.load_state_dict(plain.state_dict())
    x = torch.randn(2, 12, 8)
    assert torch.equal(plain(x), balanced(x))
    assert "balance=True" in repr(balanced)
    assert "balance" not in repr(plain)


@pytest.mark.parametrize(("n", "devices"), [(8, 2), (9, 2), (5, 4), (1, 3), (0, 2)])
def test_parts_are_those_of_distribute_tensor(n: int, devices: int) -> None:
    sizes = [len(p) for p in torch.arange(n).chunk(devices)] if n else []
    sizes += [0] * (devices - len(sizes))
    assert [b - a for a, b in parts(n, devices)] == sizes
    assert [a for a, _ in parts(n, devices)] == [sum(sizes[:i]) for i in range(devices)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_device_wants_all_that_its_tokens_see(causal: bool) -> None:
    for n, window, devices in ((32, 4, 4), (33, 4, 2), (7, 8, 3), (40, 16, 5)):
        for begin, end in parts(n, devices):
            first, last = wanted(begin, end, n, window, causal)
            assert first % window == 0 or begin == end
            seen = [
                j
                for i in range(begin, end)
                for j in range(n)
                if abs(i // window - j // window) <= 1 and not (causal and j > i)
            ]
            assert not seen or (first <= min(seen) and max(seen) < last)
            assert 0 <= first <= begin <= end <= last <= n


def test_plain_tokens_are_spread_along_no_axis() -> None:
    assert sequence_axis(torch.ones(2, 3, 4)) is None
