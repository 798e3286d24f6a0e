"""The sum of partial sums that programs of another kernel left, always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from onepass.core.launch import cdiv, gpu, launch, next_power_of_2


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

    If a model fixes n, pass the largest such power of two: the compiler then knows how rows are aligned. If n changes
    from call to call, pass 1: every other unit is another compilation.
    """
    n_partials, n = partials.shape[0], out.numel()
    block_p = min(256, next_power_of_2(n_partials))
    block_c = min(128, max(16, 4096 // block_p))
    constants = (unit, block_p, block_c)
    launch(partials_kernel, (cdiv(n, block_c), 1, 1), (partials, out), (n_partials, n // unit), constants, num_warps=4)


@triton.jit(do_not_specialize=["n_partials", "n_entries"])
def vector_partials_kernel(
    partials_ptr,  # (1 or 2, n_entries, n_partials, N_COLS) fp32, contiguous: of dw, then of db, whichever are needed
    dw_ptr,  # (n_entries, N_COLS), dtype of the weight; None: not needed
    db_ptr,  # (n_entries, N_COLS), dtype of the bias; None: not needed
    n_partials,
    n_entries,
    N_COLS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Add the partials of dw and of db, always in the same order, and round once.

    WAITS: the kernel starts before the previous one ends and waits inside, which hides its launch time.
    """
    if WAITS:
        gdc_wait()
    COLUMNS: tl.constexpr = (N_COLS + BLOCK_C - 1) // BLOCK_C
    vector = tl.program_id(1)
    entry = (tl.program_id(0) // COLUMNS).to(tl.int64)
    cols = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    partials_ptr += (vector * n_entries + entry) * n_partials * N_COLS
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, n_partials, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < n_partials)[:, None] & (cols < N_COLS)[None, :]
        total += tl.load(partials_ptr + rows.to(tl.int64)[:, None] * N_COLS + cols[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    out = entry * N_COLS + cols
    if dw_ptr is not None and db_ptr is not None:
        if vector == 0:
            tl.store(dw_ptr + out, result.to(dw_ptr.dtype.element_ty), mask=cols < N_COLS)
        else:
            tl.store(db_ptr + out, result.to(db_ptr.dtype.element_ty), mask=cols < N_COLS)
    elif dw_ptr is not None:
        tl.store(dw_ptr + out, result.to(dw_ptr.dtype.element_ty), mask=cols < N_COLS)
    else:
        tl.store(db_ptr + out, result.to(db_ptr.dtype.element_ty), mask=cols < N_COLS)


def dependent_launch(x: Tensor) -> bool:
    """Return whether a kernel may start before the previous one ends and wait for it inside (sm_90 on)."""
    return torch.version.hip is None and gpu(x).capability >= (9, 0)


def add_vector_partials(
    partials: Tensor, dw: Tensor | None, db: Tensor | None, n_partials: int, n_entries: int
) -> None:
    """Add the partials of dw and db, which stand in this order in `partials` (1 or 2, ..., N)."""
    n_cols, rows = partials.shape[-1], min(256, next_power_of_2(n_partials))
    # 32 columns fill a 128-byte line, and give enough programs even for a narrow row
    cols = max(32, min(256, 4096 // rows, next_power_of_2(n_cols)))
    waits = dependent_launch(partials)
    launch(
        vector_partials_kernel, (cdiv(n_cols, cols) * n_entries, len(partials), 1), (partials, dw, db),
        (n_partials, n_entries), (n_cols, rows, cols, waits), num_warps=4, **({"launch_pdl": True} if waits else {}),
    )  # fmt: skip
