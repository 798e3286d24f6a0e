"""`causal_choice` on DTensors: the batch may be sharded."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import Way, row_dims


def forward(scores: Any, *rest: Any) -> list[Way]:
    """List the ways to shard scores and mask, with gates, indices, thresholds and starts."""
    return [((0,) * 4, (0, 0)) for _ in row_dims(scores)]


def backward(g_gates: Any, scores: Any, *rest: Any) -> list[Way]:
    """List the ways to shard all tensors, with the gradient of the scores."""
    return [((0,), (0,) * 7) for _ in row_dims(scores)]
