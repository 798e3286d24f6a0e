"""The sum of partial sums that programs of another kernel left, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=["n_parts", "n_units"])
def parts_kernel(
    parts_ptr,  # (n_parts, n) fp32, contiguous
    out_ptr,  # (n,)
    n_parts,
    n_units,  # n / UNIT
    UNIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the partials in a fixed order and round once."""
    n = tl.cast(n_units, tl.int64) * UNIT
    cols = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, n_parts, BLOCK_P):
        parts = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (parts[:, None] < n_parts) & (cols[None, :] < n)
        acc += tl.load(parts_ptr + parts[:, None] * n + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=cols < n)


def add_parts(parts: Tensor, out: Tensor, unit: int) -> None:
    """Fill out (n,) with the sums over the rows of parts (n_parts, n), fp32 and contiguous; `unit` ≤ 16 divides n.

    Where n follows from a model, pass its largest such power of two: the compiler then knows how rows are aligned.
    Where n changes from call to call, pass 1: each other number is another compilation.
    """
    n_parts, n = parts.shape[0], out.numel()
    block_p = min(256, next_power_of_2(n_parts))
    block_c = min(128, max(16, 4096 // block_p))
    constants = (unit, block_p, block_c)
    launch(parts_kernel, (cdiv(n, block_c), 1, 1), (parts, out), (n_parts, n // unit), constants, num_warps=4)
