"""The sum of partial sums that programs of another kernel left, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=["n_partials", "n_units"])
def partials_kernel(
    partials_ptr,  # (n_partials, n) fp32, contiguous
    out_ptr,  # (n,)
    n_partials,
    n_units,  # n / UNIT
    UNIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the partials in a fixed order and round once."""
    n = tl.cast(n_units, tl.int64) * UNIT
    cols = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, n_partials, BLOCK_P):
        rows = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (rows[:, None] < n_partials) & (cols[None, :] < n)
        acc += tl.load(partials_ptr + rows[:, None] * n + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=cols < n)


def add_partials(partials: Tensor, out: Tensor, unit: int) -> None:
    """Fill out (n,) with the sums over the rows of partials (n_partials, n), fp32, contiguous; `unit` ≤ 16 divides n.

    Where n follows from a model, pass its largest such power of two: the compiler then knows how rows are aligned.
    Where n changes from call to call, pass 1: each other number is another compilation.
    """
    n_partials, n = partials.shape[0], out.numel()
    block_p = min(256, next_power_of_2(n_partials))
    block_c = min(128, max(16, 4096 // block_p))
    constants = (unit, block_p, block_c)
    launch(partials_kernel, (cdiv(n, block_c), 1, 1), (partials, out), (n_partials, n // unit), constants, num_warps=4)
