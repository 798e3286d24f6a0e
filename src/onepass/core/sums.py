"""Sums of rows on a CPU, in an order that their width alone decides."""

from __future__ import annotations

import torch
from torch import Tensor

# columns that are added up at once. torch shares the sum of a single row among threads from 32768 elements on, so that
# its order depends on how many threads and how many rows there are
BLOCK = 1 << 14


def block_sums(x: Tensor) -> Tensor:
    """X (..., n) with unit column stride → (..., ⌈n / BLOCK⌉): sums of BLOCK columns each, of fewer at the end."""
    n = x.shape[-1]
    if n <= BLOCK:
        return x.sum(-1, keepdim=True)
    whole = n - n % BLOCK
    sums = x[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1)  # type: ignore[no-untyped-call]
    return sums if whole == n else torch.cat((sums, x[..., whole:].sum(-1, keepdim=True)), -1)


def row_sum(x: Tensor) -> Tensor:
    """X (..., n) with unit column stride → (..., 1)."""
    return x.sum(-1, keepdim=True) if x.shape[-1] <= BLOCK or x.is_cuda else block_sums(x).sum(-1, keepdim=True)


__all__ = ["BLOCK", "block_sums", "row_sum"]
