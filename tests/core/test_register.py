"""Operators of backward passes: one registration gives schema, empty gradients and the fake."""

from __future__ import annotations

import itertools

import pytest
import torch

from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.routing import op as routing


@pytest.mark.parametrize(("gates", "need_u", "need_g"), list(itertools.product((True, False), repeat=3)))
def test_real_and_fake_results_agree_whatever_is_needed(gates: bool, need_u: bool, need_g: bool) -> None:
    of_gates = torch.ones(2, 1, dtype=torch.float64) if gates else None
    given = torch.ones(2, 3, 5), torch.ones(2, 1, 5).bfloat16(), of_gates, torch.zeros(2, 1, dtype=torch.int64)
    real, fake = (
        routing.scatter_backward_op(*(t if t is None else t.to(d) for t in given), need_u, need_g)
        for d in ("cpu", "meta")
    )
    for a, b, need in zip(real, fake, (need_u, need_g and gates), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bool(a.numel()) == need


def test_arguments_with_a_default_are_not_in_the_schema() -> None:
    names = [a.name for a in routing.scatter_backward_op._schema.arguments]
    assert names == ["d_y", "update", "gates", "indices", "need_update", "need_gates"]
    assert "into" not in [a.name for a in causal_choice.backward_op._schema.arguments]
