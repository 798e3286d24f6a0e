"""Settings of routed layers that are not tensors: hashable, and for an operator as a dtype and two lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .choice import Choice

# how an operator takes a plan: the branches' dtype, whole numbers and conditions, other numbers
Numbers = tuple[torch.dtype, Sequence[int], Sequence[float]]


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

    def numbers(self) -> Numbers:
        """Return the plan as an operator takes it."""
        how = self.choice
        ints = [how.k, how.kind, int(how.hard), how.block, how.memory, self.explore_stride, int(self.residual)]
        floats = [how.eps, how.share, self.explore_weight, self.eps, self.heavy_eps, self.score_eps]
        return self.dtype, ints, floats

    @classmethod
    def of(cls, dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float]) -> FeedForwardPlan:
        """Return the plan of such numbers."""
        k, kind, hard, block, memory, stride, residual = ints
        eps, share, weight, *norms = floats
        how = Choice(k, eps, kind, bool(hard), block, memory, share)
        return cls(dtype, how, stride, weight, bool(residual), *norms)


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

    def numbers(self) -> Numbers:
        """Return the plan as an operator takes it."""
        q, kv = self.queries, self.keys
        ints = [
            self.light_heads, self.heavy_heads, self.width, self.window, int(self.causal), q.k, q.kind, int(q.hard),
            q.block, q.memory, kv.k, kv.kind, int(kv.hard), self.explore_stride, int(self.residual),
        ]  # fmt: skip
        floats = [q.eps, q.share, kv.eps, kv.share, self.explore_weight, self.eps, self.score_eps]
        return self.dtype, ints, floats

    @classmethod
    def of(cls, dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float]) -> AttentionPlan:
        """Return the plan of such numbers."""
        (
            light_heads, heavy_heads, width, window, causal, q_k, q_kind, q_hard, q_block, q_memory, kv_k, kv_kind,
            kv_hard, stride, residual,
        ) = ints  # fmt: skip
        q_eps, q_share, kv_eps, kv_share, weight, *norms = floats
        queries = Choice(q_k, q_eps, q_kind, bool(q_hard), q_block, q_memory, q_share)
        keys = Choice(kv_k, kv_eps, kv_kind, bool(kv_hard), share=kv_share)
        return cls(
            dtype, light_heads, heavy_heads, width, window, bool(causal), queries, keys, stride, weight,
            bool(residual), *norms,
        )  # fmt: skip
