"""`coor_descent` on DTensors: rows may be sharded; each is solved whole, on one device."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import Way, beside, gradient, row_dims


def forward(scores: Any, k: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard scores, k and mask, with gates and trace."""
    n = scores.ndim
    return [((d, d), (d, beside(k, n - 1, d), beside(mask, n, d))) for d in row_dims(scores)]


def backward(gy: Any, scores: Any, trace: Any, k: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard all tensors, with the gradients of scores and k."""
    need_scores, need_k = rest[-2:]
    n = scores.ndim
    ways: list[Way] = []
    for d in row_dims(scores):
        of_k = beside(k, n - 1, d)
        ways.append(((gradient(d, need_scores), gradient(of_k, need_k)), (d, d, d, of_k, beside(mask, n, d))))
    return ways
