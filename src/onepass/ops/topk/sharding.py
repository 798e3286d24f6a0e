"""`topk` on DTensors: rows may be sharded; each is selected from whole, on one device."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import Way, beside, gradient, row_dims


def select(scores: Any, mask: Any, start: Any, lengths: Any, *rest: Any) -> list[Way]:
    """List the ways to shard scores, mask, start and lengths, with values and indices."""
    n = scores.ndim
    return [
        ((d, d), (d, beside(mask, n, d), beside(start, n - 1, d), beside(lengths, n - 1, d))) for d in row_dims(scores)
    ]


def forward(scores: Any, eps: Any, mask: Any, start: Any, lengths: Any, *rest: Any) -> list[Way]:
    """List the ways to shard scores, eps, mask, start and lengths, with values, indices, gates and solution."""
    n = scores.ndim
    return [
        (
            (d, d, d, d),
            (d, beside(eps, n - 1, d), beside(mask, n, d), beside(start, n - 1, d), beside(lengths, n - 1, d)),
        )
        for d in row_dims(scores)
    ]


def backward(
    g_values: Any, g_gates: Any, scores: Any, indices: Any, state: Any, eps: Any, mask: Any, start: Any, lengths: Any,
    *rest: Any,
) -> list[Way]:  # fmt: skip
    """List the ways to shard all tensors, with the gradients of scores and eps."""
    need_scores, need_eps = rest[-2:]
    n = scores.ndim
    ways: list[Way] = []
    for d in row_dims(scores):
        of_eps = beside(eps, n - 1, d)
        results = gradient(d, need_scores), gradient(of_eps, need_eps)
        ranges = beside(start, n - 1, d), beside(lengths, n - 1, d)
        ways.append((results, (d, d, d, d, d, of_eps, beside(mask, n, d), *ranges)))
    return ways
