"""Parts of a sequence on several devices; the layers are tested in tests/sharded."""

from __future__ import annotations

import pytest
import torch

from onepass.nn.over_sequence import _begin, _own, sequence_axis


@pytest.mark.parametrize(("n", "devices"), [(8, 2), (9, 2), (5, 4), (1, 3), (0, 2)])
def test_parts_begin_where_distribute_tensor_cuts(n: int, devices: int) -> None:
    parts = torch.arange(n).chunk(devices) if n else []
    sizes = [len(p) for p in parts] + [0] * (devices - len(parts))
    for rank, size in enumerate(sizes):
        assert _begin(n, devices, rank, size) == sum(sizes[:rank])


def test_other_parts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of 10 tokens over 2 devices number 1 must have 5, .* it has 6"):
        _begin(10, 2, 1, 6)


def test_own_indices_keep_their_order_and_gates() -> None:
    indices = torch.tensor([[5, -3, 1, 0, 9], [-1, 7, 8, 9, -2]])
    gates = torch.arange(10.0).view(2, 5)
    found = _own(indices, gates, 6)
    assert found[0].tolist() == [[5, 1, 0], [-1, -1, -1]]
    assert found[1].tolist() == [[0.0, 2.0, 3.0], [0.0, 0.0, 0.0]]
    nothing = _own(indices[:, :2] + 20, gates[:, :2], 6)
    assert nothing[0].shape == (2, 0)


def test_plain_tokens_are_spread_along_no_axis() -> None:
    assert sequence_axis(torch.ones(2, 3, 4)) is None
