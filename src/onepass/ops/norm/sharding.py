"""Norms on DTensors: rows may be sharded, the normalised dimension may not; dw and db are sums over the rows."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import REPLICATE, Way, beside, gradient, row_dims


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


def options(x: Any, residual: Any, gate: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, residual, gate, weight and bias, with y, s, e4m3 values, scales and statistics.

    Weights that differ between rows are sharded with them. A result that is left out is empty, the same everywhere.
    """
    quant, keep_y = rest[-3], rest[-1]
    ways: list[Way] = []
    for d in row_dims(x):
        vectors = beside(weight, x.ndim, d), beside(bias, x.ndim, d)
        made = keep_y, residual is not None, quant, quant
        results = tuple(d if yes else REPLICATE for yes in made)
        ways.append(((*results, d + 1), (d, d, d, *vectors)))
    return ways


def options_backward(dy: Any, ds: Any, x: Any, gate: Any, stats: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard dy, ds, x, gate, statistics, weight and bias, with dx, dz, dw, db and dx again."""
    need_x, need_z, need_w, need_b = rest[-4:]
    ways: list[Way] = []
    for d in row_dims(x):
        w, b = beside(weight, x.ndim, d), beside(bias, x.ndim, d)
        copied = need_x and rest[-5] != x.tensor_meta.dtype
        results = (
            gradient(d, need_x), gradient(d, need_z), gradient(w, need_w), gradient(b, need_b), gradient(d, copied),
        )  # fmt: skip
        ways.append((results, (d, d, d, d, d + 1, w, b)))
    return ways
