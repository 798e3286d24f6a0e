"""Triton kernel that walks a row twice, tile by tile: for rows too wide for registers. The second walk reads L2."""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_memory import load, store

from .kernels_triton import add_residual, load_streamed, load_tile


@triton.jit(do_not_specialize=["x_row_stride", "r_row_stride", "n_rows"])
def wide_forward_kernel(
    x_ptr,  # (n_rows, N_COLS), unit column stride
    r_ptr,  # (n_rows, N_COLS), unit column stride; None: no residual
    w_ptr,  # (N_COLS,) or None
    b_ptr,  # (N_COLS,) or None
    y_ptr,  # (n_rows, N_COLS), contiguous
    s_ptr,  # (n_rows, N_COLS), contiguous; None without residual
    stats_ptr,  # (1 or 2, n_rows) fp32: 1/σ, mean
    x_row_stride,  # in units of VEC elements
    r_row_stride,
    n_rows,
    eps,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Normalise one row per program in two walks; the second finds the row in L2.

    The first walk sums x − shift and its square, where shift is the mean of the first tile: that avoids most of the
    cancellation of E[x²] − mean².
    """
    MASKED: tl.constexpr = N_COLS % BLOCK_C != 0
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride * VEC
    y_ptr += row * N_COLS
    if r_ptr is not None:
        r_ptr += row * r_row_stride * VEC
        s_ptr += row * N_COLS

    shift = 0.0
    if HAS_MEAN:
        cols = tl.arange(0, BLOCK_C)
        first = add_residual(load_tile(x_ptr, cols, cols < N_COLS, MASKED), r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        shift = tl.sum(first, 0) / min(N_COLS, BLOCK_C)

    sums = tl.zeros((BLOCK_C,), tl.float32)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        x = load_streamed(x_ptr, cols, cols < N_COLS, MASKED)
        if r_ptr is not None:
            x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
            store(s_ptr, cols, x, cols < N_COLS, MASKED)
        if HAS_MEAN:
            x -= shift
            if MASKED:
                x = tl.where(cols < N_COLS, x, 0.0)
            sums += x
        squares += x * x
    var = tl.sum(squares, 0) / N_COLS
    if HAS_MEAN:
        drift = tl.sum(sums, 0) / N_COLS
        var = tl.maximum(var - drift * drift, 0.0)
        shift += drift
    rstd = tl.rsqrt(var + eps)

    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        # read for the last time and written once: such lines leave L2 first, which keeps the rows of other programs
        x = load(x_ptr, cols, cols < N_COLS, MASKED, "evict_first").to(tl.float32)
        x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        y = (x - shift) * rstd
        if w_ptr is not None:
            y *= load_tile(w_ptr, cols, cols < N_COLS, MASKED) + offset
        if b_ptr is not None:
            y += load_tile(b_ptr, cols, cols < N_COLS, MASKED)
        store(y_ptr, cols, y, cols < N_COLS, MASKED, "evict_first")

    tl.store(stats_ptr + row, rstd)
    if HAS_MEAN:
        tl.store(stats_ptr + n_rows + row, shift)
