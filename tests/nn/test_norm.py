"""Norms and sums stand in for torch's modules: constructor, state_dict, results; and what they add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass.nn
from onepass.nn import WeightedSum
from swapping.norms import shuffle

CASES = [
    ("LayerNorm", (8,), {}), ("LayerNorm", (2, 3, 8), {"bias": False}), ("LayerNorm", 8, {"bias": False}),
    *((n, shape, o) for n in ("LayerNorm", "RMSNorm") for shape in (8, [3, 8])
      for o in ({}, {"eps": 1e-3}, {"elementwise_affine": False})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_are_torchs(name: str, shape: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    theirs, ours = (getattr(room, name)(shape, **options, dtype=dtype) for room in (nn, onepass.nn))
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    shuffle(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 2, 3, 8).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_module_of_before_the_option_rounds_once() -> None:
    """As a pickle has it; with the option it is Llama's: tests/swapping/test_swap_transformers.py."""
    old, x = onepass.nn.RMSNorm(64), torch.randn(2, 64)
    expected = old(x)
    del old.__dict__["rounding"]
    assert torch.equal(old(x), expected)


def test_an_offset_may_be_an_int() -> None:
    assert torch.equal(onepass.nn.RMSNorm(4, offset=1).weight, torch.zeros(4))
    x = torch.randn(2, 4)
    for function in (onepass.layer_norm, onepass.rms_norm):
        assert torch.equal(function(x, x[0], offset=1), function(x, x[0], offset=1.0))


@pytest.mark.parametrize("vectors", [None, 1, 5])
def test_it_is_a_linear_layer_without_bias(vectors: int | None) -> None:
    layer, x = WeightedSum(24, vectors), torch.randn(2, 7, 24)
    expected = F.linear(x, layer.weight.view(-1, 24)).view((2, 7) if vectors is None else (2, 7, vectors))
    torch.testing.assert_close(layer(x), expected)


def test_weights_start_as_those_of_a_linear_layer() -> None:
    weight = WeightedSum(400, 16).weight
    assert weight.abs().max() <= 0.05
    assert abs(weight.std().item() - 0.05 / 3**0.5) < 0.002
