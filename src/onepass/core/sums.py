"""Sums of rows on a CPU whose order of addition depends on the width alone."""

from __future__ import annotations

import torch
from torch import Tensor

# columns per sum. From 32768 elements on torch splits the sum of a single row among threads, so its order would depend
# on the number of threads and of rows
BLOCK = 1 << 14


def block_sums(x: Tensor) -> Tensor:
    """Sum x (..., n) of unit column stride over blocks of BLOCK columns → (..., ⌈n / BLOCK⌉); the last may be short."""
    n = x.shape[-1]
    if n <= BLOCK:
        return x.sum(-1, keepdim=True)
    whole = n - n % BLOCK
    sums = x[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1)  # type: ignore[no-untyped-call]
    return sums if whole == n else torch.cat((sums, x[..., whole:].sum(-1, keepdim=True)), -1)


def row_sum(x: Tensor) -> Tensor:
    """Sum x (..., n) of unit column stride over its columns → (..., 1)."""
    return x.sum(-1, keepdim=True) if x.shape[-1] <= BLOCK or x.is_cuda else block_sums(x).sum(-1, keepdim=True)
