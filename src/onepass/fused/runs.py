"""Runs of keys that follow from sizes alone, kept: a dozen small kernels and calls of torch that need not repeat."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.ops.span_attention import op as span


def neighbours(n: int, window: int, causal: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last + 1 of the tokens that each of n tokens sees: its window, the one before, and the one after.

    With `causal` there is no window after, and nothing after the token itself.
    """
    i = torch.arange(n, device=device, dtype=torch.int32)
    start = i // window * window
    return (start - window).clamp_min(0), i + 1 if causal else (start + 2 * window).clamp_max(n)


class Runs(NamedTuple):
    """Who sees which keys, as `span_attention` takes it."""

    mask: Tensor | None  # (batch, keys) bool
    first: Tensor  # (1 or batch, queries) int32
    last: Tensor
    begin: Tensor | None  # both `span_attention.op.edges`; None where no kernel asks, or they are not known yet
    end: Tensor | None


Make = Callable[..., tuple[Tensor, Tensor]]
Queries = tuple[torch.device, torch.dtype, int]  # the last: width of a head


def _runs(make: Make, sizes: tuple[int, ...], keys: int, where: torch.device, like: Tensor) -> Runs:
    """`make(*sizes, where)` and its edges, on the device of `like`, for queries of its width and dtype."""
    first, last = (t[None] for t in make(*sizes, where))
    edges = span.edges(like, first, last, keys) or (None, None)
    return Runs(None, *(None if t is None else t.to(like.device) for t in (first, last, *edges)))  # type: ignore[arg-type]


@lru_cache(64)
def _kept(make: Make, sizes: tuple[int, ...], keys: int, device: torch.device, dtype: torch.dtype, width: int,
          precision: str) -> Runs:  # fmt: skip
    # made on the CPU, and copied: complete when the copy returns, for whatever stream; autograd refuses to keep what
    # inference mode made
    with torch.inference_mode(False):
        return _runs(make, sizes, keys, torch.device("cpu"), torch.empty(width, dtype=dtype, device=device))


def _of(make: Make, sizes: tuple[int, ...], keys: int, queries: Queries) -> Runs:
    device, dtype, width = queries
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # a graph's memory is its own
        return _runs(make, sizes, keys, device, torch.empty(width, dtype=dtype, device=device))
    # the last argument decides the tiles, of which the edges are
    return _kept(make, sizes, keys, device, dtype, width, torch.get_float32_matmul_precision())


def window_runs(n: int, window: int, causal: bool, queries: Queries) -> Runs:
    """Runs of `neighbours`."""
    return _of(neighbours, (n, window, causal), n, queries)


def _all(n: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    last = torch.full((n,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(last), last


def whole_runs(n: int, keys: int, queries: Queries) -> Runs:
    """N queries that see all of so many keys."""
    return _of(_all, (n, keys), keys, queries)


__all__ = ["Runs", "neighbours", "whole_runs", "window_runs"]
