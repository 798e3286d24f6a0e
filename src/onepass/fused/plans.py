"""Settings of routed layers that are not tensors: hashable, and for an operator as a dtype and two lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .choice import Choice

# how an operator takes a plan: the branches' dtype, whole numbers and conditions, other numbers
Numbers = tuple[torch.dtype, Sequence[int], Sequence[float]]


def _ints(values: Sequence[int]) -> list[int]:
    # keep a symbolic number: int() would tie a graph to one length
    return [int(v) if isinstance(v, bool) else v for v in values]


class FeedForwardPlan(NamedTuple):
    """Settings of a routed feed-forward; the fields after `k` up to `memory` are ints or bools, the rest floats."""

    dtype: torch.dtype  # of the branches
    k: int
    kind: int  # of the gates: index in KINDS
    hard: bool  # straight-through: gates are 1
    explore_stride: int  # every so many tokens, one gives the router a gradient (`nn.explore`); 0: off
    residual: bool  # return x + y, and take its gradient
    block: int  # of a causal choice; 0: choose the best of all tokens
    memory: int
    light_eps: float  # of the norms
    heavy_eps: float
    score_eps: float
    gate_eps: float  # temperature of the gates
    explore_weight: float
    share: float = 0.0  # k are the places for this share of each row's real tokens; 0: k tokens of each row

    def choice(self) -> Choice:
        """Return how the router chooses."""
        causal = (self.block, self.memory) if self.block else None
        return Choice(self.k, self.gate_eps, self.kind, self.hard, causal, self.share)

    def numbers(self) -> Numbers:
        """Return the plan as an operator takes it."""
        return self.dtype, _ints(self[1:8]), list(self[8:])  # type: ignore[arg-type]


class AttentionPlan(NamedTuple):
    """Settings of routed attention; the fields after `dtype` up to `residual` are ints or bools, the rest floats."""

    dtype: torch.dtype  # of the branches
    light_heads: int
    heavy_heads: int
    width: int  # of a head
    window: int
    causal: bool  # attention looks back only, and each window gives k_kv keys
    k_q: int
    q_kind: int  # of the gates: index in KINDS
    q_hard: bool  # straight-through: gates are 1
    q_block: int  # of a causal choice of queries; 0: choose the best of all tokens
    q_memory: int
    k_kv: int  # of the sequence; causal: of each window
    kv_kind: int
    kv_hard: bool
    explore_stride: int  # every so many tokens, one gives the queries' router a gradient (`nn.explore`); 0: off
    residual: bool  # return x + y, and take its gradient
    eps: float  # of the norms
    score_eps: float
    q_eps: float  # temperature of the gates
    kv_eps: float
    explore_weight: float
    q_share: float = 0.0  # k_q are the places for this share of each row's real tokens; 0: k_q tokens of each row
    kv_share: float = 0.0  # the same of k_kv and the rows or windows that keys are chosen from

    def queries(self) -> Choice:
        """Return how queries are chosen."""
        causal = (self.q_block, self.q_memory) if self.q_block else None
        return Choice(self.k_q, self.q_eps, self.q_kind, self.q_hard, causal, self.q_share)

    def keys(self) -> Choice:
        """Return how keys are chosen, of the sequence or of a window."""
        return Choice(self.k_kv, self.kv_eps, self.kv_kind, self.kv_hard, share=self.kv_share)

    def numbers(self) -> Numbers:
        """Return the plan as an operator takes it."""
        return self.dtype, _ints(self[1:16]), list(self[16:])  # type: ignore[arg-type]


__all__ = ["AttentionPlan", "FeedForwardPlan", "Numbers"]
