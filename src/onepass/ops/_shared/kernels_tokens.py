"""Rows of tokens (batch, n, d) for Triton kernels: tokens by index, tiles, strides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, next_power_of_2

# elements and warps of one program of a row kernel: four 16-byte loads of a 16-bit tensor per thread
ELEMENTS = 4096
WARPS = 4


@triton.jit
def named(index_ptr, offsets, inside, n):
    """Load indices; return them, and which of them are in [0, n)."""
    index = tl.load(index_ptr + offsets, mask=inside, other=-1)
    return index, (index >= 0) & (index < n)


def tile(d: int) -> tuple[int, int]:
    """Return (BLOCK_R, BLOCK_C): columns of a row up to ELEMENTS, and up to 64 rows that fill ELEMENTS."""
    block_c = min(ELEMENTS, next_power_of_2(d))
    return min(64, ELEMENTS // block_c), block_c


def least_padding(d: int, vector: int, threads: int = 128) -> int:
    """Return the widest tile of columns, 8 to `threads` vectors, that pads at most 7 % more than the best one."""
    if d <= 8 * vector:
        return next_power_of_2(d)
    widths = [v * vector for v in (8, 16, 32, 64, 128) if v <= threads]
    padded = {c: cdiv(d, c) * c for c in widths}
    return max(c for c in widths if padded[c] <= 1.07 * min(padded.values()))


def strided(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x (batch, n, d) with unit column stride, copied if needed, and its batch and row strides."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1)
