"""`soft_topk` on DTensors: rows may be sharded; each is solved whole, on one device."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import Way, beside, gradient, row_dims


def forward(scores: Any, k: Any, eps: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard scores, k, eps and mask, with gates and solution."""
    n = scores.ndim
    return [((d, d), (d, beside(k, n - 1, d), beside(eps, n - 1, d), beside(mask, n, d))) for d in row_dims(scores)]


def backward(gy: Any, scores: Any, state: Any, k: Any, eps: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard all tensors, with the gradients of scores, k and eps."""
    need_scores, need_k, need_eps = rest[-3:]
    n = scores.ndim
    ways: list[Way] = []
    for d in row_dims(scores):
        of_k, of_eps = beside(k, n - 1, d), beside(eps, n - 1, d)
        results = gradient(d, need_scores), gradient(of_k, need_k), gradient(of_eps, need_eps)
        ways.append((results, (d, d, d, of_k, of_eps, beside(mask, n, d))))
    return ways
