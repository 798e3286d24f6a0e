"""`compat.cs336`: the exercise's call, over our operator."""

from __future__ import annotations

import pytest
import torch

from harness import same_sums
from onepass.compat.cs336 import WeightedSumFunc


def _exercise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The definition in the exercise's own words."""
    return (weight * x).sum(dim=-1)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 64), (4, 200)])
def test_values_and_gradients_are_those_of_the_exercise(shape: tuple[int, ...]) -> None:
    f_weightedsum = WeightedSumFunc.apply
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y, expected = f_weightedsum(x, w), _exercise(x, w)
    same_sums(y, expected, x.numel())
    dy = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True):
        same_sums(ours, theirs, x.numel())


def test_a_matrix_of_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight must be a vector \(D,\), got \(2, 7\)"):
        WeightedSumFunc.apply(torch.randn(5, 7), torch.randn(2, 7))
