"""`weighted_sum` on DTensors: rows may be sharded, the summed dimension (then y is partial), or the vectors."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import PARTIAL, REPLICATE, Placement, Way, gradient


def forward(x: Any, weight: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x (..., D) and weight (D,) or (R, D), with y."""
    last = x.ndim - 1
    ways: list[Way] = [((d,), (d, REPLICATE)) for d in range(last)]
    ways.append(((PARTIAL,), (last, weight.ndim - 1)))
    if weight.ndim == 2:
        ways.append(((last,), (REPLICATE, 0)))
    return ways


def backward(dy: Any, x: Any, weight: Any, need_x: bool, need_w: bool) -> list[Way]:
    """List the ways to shard dy, x and weight, with dx and dw."""
    last, own = x.ndim - 1, weight.ndim - 1
    inputs: list[tuple[Placement, ...]] = [(d, d, REPLICATE) for d in range(last)]
    inputs.append((REPLICATE, last, own))
    if weight.ndim == 2:
        inputs.append((last, REPLICATE, 0))
    return [((gradient(way[1], need_x), gradient(way[2], need_w)), way) for way in inputs]
