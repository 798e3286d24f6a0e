"""Parts of a sequence on several devices; `tests/sharded` has the layers."""

from __future__ import annotations

import pytest
import torch

from onepass.fused.parts import parts, wanted
from onepass.nn.over_sequence import sequence_axis


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
