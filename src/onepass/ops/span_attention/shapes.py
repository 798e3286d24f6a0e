"""Tiles, warps and pipeline stages of each kernel."""

from __future__ import annotations

import torch

from onepass.core.launch import next_power_of_2

# queries, keys, warps, stages of (forward, queries, keys), for heads up to 64 wide
_16_BITS = ((128, 64, 8, 2), (64, 64, 4, 3), (32, 64, 4, 1))
# within the 99 KB of shared memory of smaller GPUs; forward spills registers on sm_90, yet larger tiles are faster
_TF32 = ((128, 64, 4, 1), (128, 32, 4, 2), (32, 64, 4, 1))
# a product in three TF32 parts takes three times the registers
_FP32 = ((32, 32, 4, 2), (16, 32, 4, 1), (32, 32, 8, 1))
# for wider heads
_WIDE_16_BITS = ((64, 64, 8, 2),) * 3
_WIDE = ((32, 32, 8, 1),) * 3
KERNELS = ("forward", "queries", "keys")


def shape(kernel: str, width: int, dtype: torch.dtype, precision: str) -> tuple[int, int, int, int, int]:
    """Return queries, keys and padded width of a tile, warps and stages, for one of `KERNELS`."""
    block_d = max(16, next_power_of_2(width))
    if dtype == torch.float32:
        table = _WIDE if block_d > 64 else _TF32 if precision == "tf32" else _FP32
    else:
        table = _16_BITS if block_d <= 64 else _WIDE_16_BITS if block_d == 128 else _WIDE
    block_q, block_k, warps, stages = table[KERNELS.index(kernel)]
    return block_q, block_k, block_d, warps, stages
