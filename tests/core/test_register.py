"""Operators of backward passes: their schema."""

from __future__ import annotations

from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.routing import op as routing


def test_arguments_with_a_default_are_not_in_the_schema() -> None:
    names = [a.name for a in routing.scatter_backward_op._schema.arguments]
    assert names == ["d_y", "update", "gates", "indices", "need_update", "need_gates"]
    assert "into" not in [a.name for a in causal_choice.backward_op._schema.arguments]
