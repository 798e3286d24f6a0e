"""`nn.WeightedSum`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onepass.nn import WeightedSum


@pytest.mark.parametrize("vectors", [None, 1, 5])
def test_it_is_a_linear_layer_without_bias(vectors: int | None) -> None:
    layer = WeightedSum(24, vectors)
    x = torch.randn(2, 7, 24)
    y = layer(x)
    assert y.shape == ((2, 7) if vectors is None else (2, 7, vectors))
    expected = F.linear(x, layer.weight.view(-1, 24))
    torch.testing.assert_close(y.view(2, 7, -1), expected)
    y.sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.view(-1, 24)[0], x.sum((0, 1)))


def test_weights_start_as_those_of_a_linear_layer() -> None:
    weight = WeightedSum(400, 16).weight
    assert weight.abs().max() <= 0.05
    assert abs(weight.std().item() - 0.05 / 3**0.5) < 0.002


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((0,), "dim must be ≥ 1, got 0"),
        ((8, 0), "num_vectors must be ≥ 1, got 0"),
        ((8, 17), "None or 1 to 16, got 17"),
        ((8.0,), "dim must be an int, got float"),
        ((8, "3"), "num_vectors must be an int, got str"),
    ],
)
def test_errors(args: tuple[Any, ...], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        WeightedSum(*args)


def test_the_wrong_width_is_refused_by_the_operator() -> None:
    with pytest.raises(ValueError, match="weight must be"):
        WeightedSum(8)(torch.randn(2, 9))
