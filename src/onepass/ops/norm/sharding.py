"""Norms on DTensors: rows may be sharded, the normalised dimension may not; dw and db are sums over the rows."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import REPLICATE, Way, beside, gradient, row_dims

from .options import Options


def forward(x: Any, residual: Any, gate: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x, residual, gate, weight and bias, with y, s, e4m3 values, scales and statistics.

    Weights that differ between rows are sharded with them. A result that is left out is empty, the same everywhere.
    """
    options = Options(*rest)
    present = options.keep_y, residual is not None, options.quantize, options.quantize
    ways: list[Way] = []
    for d in row_dims(x):
        results = tuple(d if yes else REPLICATE for yes in present)
        ways.append(((*results, d + 1), (d, d, d, beside(weight, x.ndim, d), beside(bias, x.ndim, d))))
    return ways


def backward(dy: Any, ds: Any, x: Any, gate: Any, stats: Any, weight: Any, bias: Any, *rest: Any) -> list[Way]:
    """List the ways to shard dy, ds, x, gate, statistics, weight and bias, with dx, dz, dw, db and dx again."""
    x_dtype, need_x, need_z, need_w, need_b = rest[-5:]
    copied = need_x and x_dtype != x.tensor_meta.dtype
    ways: list[Way] = []
    for d in row_dims(x):
        w, b = beside(weight, x.ndim, d), beside(bias, x.ndim, d)
        rows = gradient(d, need_x), gradient(d, need_z), gradient(d, copied)
        results = (*rows[:2], gradient(w, need_w), gradient(b, need_b), rows[2])
        ways.append((results, (d, d, d, d, d + 1, w, b)))
    return ways
