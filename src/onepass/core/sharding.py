"""Sharding rules of operators: which shards of DTensor arguments give which shards of the results.

A rule is written without torch.distributed, so that importing onepass does not import it. `register_rules` hands all
rules to torch when a DTensor first meets an operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

# a placement on one axis of a device mesh: an int is the sharded dimension; None stands for an absent tensor
Placement = int | str | None
REPLICATE, PARTIAL = "replicate", "partial"
# one way to run an operator on shards: placements of its results and of its tensor arguments, in their order
Way = tuple[Sequence[Placement], Sequence[Placement]]
# takes the arguments of the operator, with shapes and placements (DTensorSpec) in place of tensors, or tensors
Rule = Callable[..., list[Way]]

rules: dict[Any, Rule] = {}
_waiting: list[Any] = []


def add_rule(op: Any, rule: Rule) -> None:
    """Let `rule` list the ways to run `op` on shards; running it on whole tensors is always one more."""
    rules[op] = rule
    _waiting.append(op)


def register_rules() -> None:
    """Register the waiting rules if torch.distributed.tensor is loaded; every fake implementation calls this.

    DTensor computes shapes by the fake implementation before it looks for a rule.
    """
    if not _waiting or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    dispatcher: Any = DTensor._op_dispatcher
    while _waiting:
        op = _waiting.pop()
        register_sharding(op)(_ways(op, rules[op]))
        # torch caches the chosen way by the arguments from the first int on: calls that differ only in a bool or an
        # absent tensor would share it. So all arguments become part of the key
        dispatcher.sharding_propagator.op_to_schema_info[op].static_argnum = 0


def _ways(op: Any, rule: Rule) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """Return the rule in the form that `register_sharding` takes."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    is_tensor = ["Tensor" in str(a.type) for a in op._schema.arguments]
    n_results = len(op._schema.returns)

    def placement(p: Placement) -> Any:
        return Shard(p) if isinstance(p, int) else Partial() if p == PARTIAL else Replicate()

    def ways(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        unsharded = [REPLICATE] * n_results, [REPLICATE] * sum(is_tensor)
        accepted = []
        for results, tensors in (unsharded, *rule(*args)):
            placed = iter(tensors)
            in_order = [next(placed) if flag else None for flag in is_tensor]
            # an absent tensor has no placement, whatever the way
            inputs = [None if arg is None or p is None else placement(p) for arg, p in zip(args, in_order, strict=True)]
            accepted.append(([placement(p) for p in results], inputs))
        return accepted

    return ways


def row_dims(x: Any) -> list[int]:
    """Return the dimensions of x (..., n) along which an operator on rows may be sharded: all but the last.

    If the last one is sharded, only those that are sharded as well: rows are then gathered, not exchanged between
    devices, and the results have the same bits as on one device.
    """
    last, dims = x.ndim - 1, [getattr(p, "dim", None) for p in getattr(x, "placements", ())]
    return [d for d in range(last) if last not in dims or d in dims]


def beside(t: Any, ndim: int, d: int) -> Placement:
    """Return how t, broadcast to `ndim` dimensions, is placed beside tensors that are sharded along dimension d."""
    if t is None:
        return None
    dim = d - (ndim - t.ndim)
    return dim if dim >= 0 and t.shape[dim] != 1 else REPLICATE


def gradient(placed: Placement, needed: bool) -> Placement:
    """Return how the gradient of a broadcast tensor is placed: like the tensor, or one part of a sum over the shards.

    A gradient that is not needed is an empty tensor, the same everywhere.
    """
    if not needed or placed is None:
        return REPLICATE
    return PARTIAL if placed == REPLICATE else placed
