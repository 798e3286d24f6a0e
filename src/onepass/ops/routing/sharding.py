"""Routing on DTensors: the batch may be sharded, and what each operator says below."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import PARTIAL, REPLICATE, Placement, Way, gradient


def score(x: Any, weight: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x (batch, n, dim) and weight, with scores and 1/rms: along batch or tokens."""
    return [((0, 0), (0, REPLICATE)), ((weight.ndim, 1), (1, REPLICATE))]


def score_backward(ds: Any, x: Any, weight: Any, *rest: Any) -> list[Way]:
    """List the ways to shard ds, x, weight, scores and 1/rms, with dx and dw."""
    need_x, need_w = rest[-2:]
    dw = gradient(REPLICATE, need_w)
    return [
        ((gradient(0, need_x), dw), (0, 0, REPLICATE, 0, 0)),
        ((gradient(1, need_x), dw), (weight.ndim, 1, REPLICATE, weight.ndim, 1)),
    ]


def gather(x: Any, indices: Any) -> list[Way]:
    """List the ways to shard x and indices, with the rows: along batch, features or chosen tokens."""
    return [((0,), (0, 0)), ((indices.ndim,), (2, REPLICATE)), ((indices.ndim - 1,), (REPLICATE, indices.ndim - 1))]


def gather_backward(dy: Any, indices: Any, n: int) -> list[Way]:
    """List the ways to shard dy and indices, with dx."""
    chosen = indices.ndim - 1
    return [((0,), (0, 0)), ((2,), (indices.ndim, REPLICATE)), ((PARTIAL,), (chosen, chosen))]


def scatter_add(y: Any, update: Any, gates: Any, indices: Any) -> list[Way]:
    """List the ways to shard y, update, gates and indices, with the sum: along features or, for 3-d y, the batch."""
    ways: list[Way] = [((y.ndim - 1,), (y.ndim - 1, update.ndim - 1, REPLICATE, REPLICATE))]
    return [*ways, ((0,), (0, 0, 0, 0))] if y.ndim == 3 else ways


def scatter_add_backward(dy: Any, update: Any, gates: Any, indices: Any, need_u: bool, need_g: bool) -> list[Way]:
    """List the ways to shard dy, update, gates and indices, with the gradients of update and gates."""

    def way(du: Placement, dg: Placement, *inputs: Placement) -> Way:
        return (du if need_u else REPLICATE, dg if need_g and gates is not None else REPLICATE), inputs

    last = update.ndim - 1
    ways = [way(last, PARTIAL, dy.ndim - 1, last, REPLICATE, REPLICATE)]
    return [*ways, way(0, 0, 0, 0, 0, 0)] if dy.ndim == 3 else ways
