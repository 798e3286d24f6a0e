"""`span_attention` and `rotary` on DTensors: batch and heads may be sharded."""

from __future__ import annotations

from typing import Any

from onepass.core.sharding import REPLICATE, Placement, Way


def _batch(t: Any) -> Placement:
    """Return how a tensor that may have one row for the whole batch is placed beside a sharded batch."""
    return REPLICATE if t is None or t.shape[0] == 1 else 0


def forward(q: Any, k: Any, v: Any, first: Any, last: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard q, k, v, first, last and mask, with the output and lse (batch, heads, n)."""
    return [
        ((0, 0), (0, 0, 0, _batch(first), _batch(last), 0)),
        ((2, 1), (2, 2, 2, REPLICATE, REPLICATE, REPLICATE)),
    ]


def backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, first: Any, last: Any, mask: Any, *rest: Any
) -> list[Way]:
    """List the ways to shard all tensors, with the gradients of q, k and v."""
    return [
        ((0, 0, 0), (0, 0, 0, 0, 0, 0, _batch(first), _batch(last), 0)),
        ((2, 2, 2), (2, 2, 2, 2, 2, 1, REPLICATE, REPLICATE, REPLICATE)),
    ]


def rotary(x: Any, positions: Any, *rest: Any) -> list[Way]:
    """List the ways to shard x (batch, n, heads, width) and positions (1 or batch, n), with the result."""
    ways: list[Way] = [((0,), (0, _batch(positions))), ((2,), (2, REPLICATE))]
    # without positions, the first token of a shard would count as token 0
    return ways if positions is None else [*ways, ((1,), (1, 1))]


def packed_forward(qkv: Any, first: Any, last: Any, mask: Any, *rest: Any) -> list[Way]:
    """List the ways to shard qkv (batch, n, 3, heads, width), first, last and mask, with three results."""
    return [((0, 0, 0), (0, _batch(first), _batch(last), 0))]


def packed_backward(
    dout: Any, qkv: Any, out: Any, lse: Any, qk: Any, first: Any, last: Any, mask: Any, *rest: Any
) -> list[Way]:
    """List the ways to shard all tensors, with the gradient of qkv."""
    return [((0,), (0, 0, 0, 0, 0, _batch(first), _batch(last), 0))]
