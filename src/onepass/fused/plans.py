"""Settings of routed layers that are not tensors: hashable, and for an operator as a dtype and two lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch

from .choice import Choice


class FeedForwardPlan(NamedTuple):
    """Settings of a routed feed-forward."""

    dtype: torch.dtype  # of the branches
    choice: Choice
    explore_stride: int  # every so many tokens, one gives the router a gradient (`nn.explore`); 0: off
    explore_weight: float
    residual: bool  # return x + y, and take its gradient
    eps: float  # of the norm of all tokens
    heavy_eps: float  # of that of the chosen ones
    score_eps: float


class AttentionPlan(NamedTuple):
    """Settings of routed attention."""

    dtype: torch.dtype  # of the branches
    light_heads: int
    heavy_heads: int
    width: int  # of a head
    window: int
    causal: bool  # attention looks back only, and each window gives `keys.k` keys
    queries: Choice
    keys: Choice  # never causal: of the whole sequence, or of a whole window
    explore_stride: int  # as in `FeedForwardPlan`, for the queries' router
    explore_weight: float
    residual: bool  # return x + y, and take its gradient
    eps: float  # of the norms
    score_eps: float


# how an operator takes a plan: the branches' dtype, whole numbers and conditions, other numbers
NUMBERS = (("dtype", torch.dtype), ("ints", Sequence[int]), ("floats", Sequence[float]))
_TYPES = {kind: tuple(get_type_hints(kind).values()) for kind in (Choice, FeedForwardPlan, AttentionPlan)}


def numbers(plan: FeedForwardPlan | AttentionPlan) -> tuple[torch.dtype, list[int], list[float]]:
    """Return the plan as an operator takes it."""
    ints: list[int] = []
    floats: list[float] = []
    part: Any
    for part in (plan, *(field for field in plan if isinstance(field, Choice))):
        for value, kind in zip(part, _TYPES[type(part)], strict=True):
            if kind is float:
                floats.append(value)
            elif kind is int or kind is bool:
                ints.append(value if kind is int else int(value))
    return plan.dtype, ints, floats


def plan_of(kind: type[Any], dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float]) -> Any:
    """Return the plan of such numbers."""
    whole = iter(ints)
    read: dict[Any, Any] = {int: whole, bool: map(bool, whole), float: iter(floats), torch.dtype: iter((dtype,))}

    def fields(kind: type[Any]) -> list[Any]:
        return [None if t is Choice else next(read[t]) for t in _TYPES[kind]]

    # the plan's own numbers come first, then those of its choices
    own = zip(fields(kind), _TYPES[kind], strict=True)
    return kind(*(Choice(*fields(Choice)) if t is Choice else value for value, t in own))
