"""Norms on DTensors: rows may be sharded, the normalised dimension may not; dw and db are sums over the rows."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import REPLICATE, Way, gradient, row_dims


def forward(x: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, weight and bias, with y and the statistics (1 to 3, ...)."""
    return [((d, d + 1), (d, REPLICATE, REPLICATE)) for d in row_dims(x)]


def forward_residual(x: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, residual, weight and bias, with y, their sum and the statistics."""
    return [((d, d, d + 1), (d, d, REPLICATE, REPLICATE)) for d in row_dims(x)]


def backward(dy: Any, ds: Any, x: Any, *rest: Any) -> list[Way]:
    """List the ways to shard dy, ds, x, statistics and weight, with dx, dw and db."""
    need_x, need_w, need_b = rest[-3:]
    vectors = gradient(REPLICATE, need_w), gradient(REPLICATE, need_b)
    return [((gradient(d, need_x), *vectors), (d, d, d, d + 1, REPLICATE)) for d in row_dims(x)]
