"""Rows of tokens (batch, n, d) for Triton kernels: tokens by index, tiles, strides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import next_power_of_2

# elements of one program of a row kernel, and its warps: four 16-byte loads of a 16-bit tensor per thread
ELEMENTS = 4096
WARPS = 4


@triton.jit
def named(index_ptr, at, inside, n):
    """(indices, which of them name one of n tokens)."""
    index = tl.load(index_ptr + at, mask=inside, other=-1)
    return index, (index >= 0) & (index < n)


def tile(d: int) -> tuple[int, int]:
    """(BLOCK_R, BLOCK_C): as much of a row as one program takes at a time, and rows to make up ELEMENTS."""
    block_c = min(ELEMENTS, next_power_of_2(d))
    return min(64, ELEMENTS // block_c), block_c


def strided(x: Tensor) -> tuple[Tensor, int, int]:
    """X (batch, n, d) with unit column stride, and its batch and row strides; copied only where it has none."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1)
