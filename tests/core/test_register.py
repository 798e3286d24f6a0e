"""Operators of backward passes: one registration gives schema, empty gradients and the fake."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.coor_descent import op as coor_descent
from onepass.ops.routing import op as routing


def _scatter(device: str, gates: bool) -> tuple[Tensor | None, ...]:
    """Return dy, update, gates and indices of mixed dtypes."""
    dy, update = torch.ones(2, 3, 5, device=device), torch.ones(2, 1, 5, dtype=torch.bfloat16, device=device)
    given = torch.ones(2, 1, dtype=torch.float64, device=device) if gates else None
    return dy, update, given, torch.zeros(2, 1, dtype=torch.int64, device=device)


@pytest.mark.parametrize(("gates", "need_u", "need_g"), list(itertools.product((True, False), repeat=3)))
def test_real_and_fake_results_agree_whatever_is_needed(gates: bool, need_u: bool, need_g: bool) -> None:
    real, fake = (routing.scatter_backward_op(*_scatter(d, gates), need_u, need_g) for d in ("cpu", "meta"))
    for a, b, need in zip(real, fake, (need_u, need_g and gates), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bool(a.numel()) == need
    # without gates, an empty tensor like the update stands for their gradient
    assert [t.dtype for t in real] == [torch.bfloat16, torch.float64 if gates else torch.bfloat16]


def test_arguments_with_a_default_are_not_in_the_schema() -> None:
    names = [a.name for a in routing.scatter_backward_op._schema.arguments]
    assert names == ["d_y", "update", "gates", "indices", "need_update", "need_gates"]
    assert "into" not in [a.name for a in causal_choice.backward_op._schema.arguments]


def test_a_result_that_may_be_none_is_a_tensor_in_the_schema() -> None:
    assert [str(r.type) for r in coor_descent.backward_op._schema.returns] == ["Tensor", "Tensor"]
