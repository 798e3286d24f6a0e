"""Settings of routed layers that are not tensors: hashable; an operator takes each field by itself."""

from __future__ import annotations

from typing import NamedTuple

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
