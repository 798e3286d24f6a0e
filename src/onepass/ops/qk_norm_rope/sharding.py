"""`qk_norm_rope` on DTensors: batch, heads, and tokens that have positions may be sharded."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import REPLICATE, Way, beside, gradient, row_dims


def _dims(q: Any, positions: Any) -> list[tuple[int, Any]]:
    """Return the dimensions along which q (..., T, heads, D) may be sharded, and the placement of positions beside it.

    Tokens may be if each has a position of its own.
    """
    heads = q.ndim - 2
    dims = [d for d in row_dims(q) if d != heads - 1 or positions is not None]
    return [(d, None if positions is None else REPLICATE if d == heads else beside(positions, heads, d)) for d in dims]


def forward(q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, *rest: Any) -> list[Way]:
    """List the ways to shard q, k, the weights, cos, sin and positions, with q and k rotated."""
    whole = (REPLICATE,) * 4
    return [((d, d), (d, d, *whole, at)) for d, at in _dims(q, positions)]


def backward(dq: Any, dk: Any, q: Any, k: Any, *rest: Any) -> list[Way]:
    """List the ways to shard the gradients, q, k, the weights, cos, sin and positions, with what backward returns."""
    need_q, need_k, *of_weights = rest[-4:]
    vectors = [gradient(REPLICATE, need) for need in of_weights]
    return [
        ((gradient(d, need_q), gradient(d, need_k), *vectors), (d, d, d, d, *(REPLICATE,) * 4, at))
        for d, at in _dims(q, rest[4])
    ]
