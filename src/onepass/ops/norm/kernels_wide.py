"""Triton kernels that walk a row twice, tile by tile: for rows too wide for registers. The second walk reads L2."""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_memory import load, store

from .kernels_triton import add_residual, load_streamed, load_tile, power_of_two, signed_scale


@triton.jit(do_not_specialize=["x_row_stride", "r_row_stride", "n_rows"])
def wide_forward_kernel(
    x_ptr,  # (n_rows, N_COLS), unit column stride
    r_ptr,  # (n_rows, N_COLS), unit column stride; None: no residual
    w_ptr,  # (N_COLS,) or None
    b_ptr,  # (N_COLS,) or None
    y_ptr,  # (n_rows, N_COLS), contiguous
    s_ptr,  # (n_rows, N_COLS), contiguous; None without residual
    stats_ptr,  # (1 to 3, n_rows) fp32: 1/σ, mean, ±m
    x_row_stride,  # in units of VEC elements
    r_row_stride,
    n_rows,
    eps,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    STABLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Normalise one row per program in two walks; the second finds the row in L2.

    The first walk sums x − shift and its square, where shift is the mean of the first tile: that avoids most of the
    cancellation of E[x²] − mean². For `stable` the unit is about the max|x| of the first tile: no extra walk for it.
    """
    MASKED: tl.constexpr = N_COLS % BLOCK_C != 0
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride * VEC
    y_ptr += row * N_COLS
    if r_ptr is not None:
        r_ptr += row * r_row_stride * VEC
        s_ptr += row * N_COLS

    unit = 1.0
    per_unit = 1.0
    shift = 0.0
    if HAS_MEAN:
        cols = tl.arange(0, BLOCK_C)
        first = add_residual(load_tile(x_ptr, cols, cols < N_COLS, MASKED), r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        if STABLE:
            # bounded below: after a tiny first tile, the squares of the others must not overflow
            unit, per_unit = power_of_two(tl.maximum(tl.max(tl.abs(first), 0), 1e-12))
            first *= per_unit
        shift = tl.sum(first, 0) / min(N_COLS, BLOCK_C)

    sums = tl.zeros((BLOCK_C,), tl.float32)
    squares = tl.zeros((BLOCK_C,), tl.float32)
    largest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    smallest = tl.full((BLOCK_C,), float("inf"), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        x = load_streamed(x_ptr, cols, cols < N_COLS, MASKED)
        if r_ptr is not None:
            x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
            store(s_ptr, cols, x, cols < N_COLS, MASKED)
        if STABLE:
            largest = tl.maximum(largest, tl.where(cols < N_COLS, x, float("-inf")))
            smallest = tl.minimum(smallest, tl.where(cols < N_COLS, x, float("inf")))
            x *= per_unit
        if HAS_MEAN:
            x -= shift
            if MASKED:
                x = tl.where(cols < N_COLS, x, 0.0)
            sums += x
        squares += x * x
    eps_row = eps
    if STABLE:
        signed = signed_scale(tl.max(largest, 0), tl.min(smallest, 0))
        relative = signed * per_unit
        eps_row = eps * relative * relative
    var = tl.sum(squares, 0) / N_COLS
    if HAS_MEAN:
        drift = tl.sum(sums, 0) / N_COLS
        var = tl.maximum(var - drift * drift, 0.0)
        shift += drift
    rstd = tl.rsqrt(var + eps_row)

    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        # read for the last time and written once: such lines leave L2 first, which keeps the rows of other programs
        x = load(x_ptr, cols, cols < N_COLS, MASKED, "evict_first").to(tl.float32)
        x = add_residual(x, r_ptr, s_ptr, cols, cols < N_COLS, MASKED)
        y = (x * per_unit - shift) * rstd
        if w_ptr is not None:
            y *= load_tile(w_ptr, cols, cols < N_COLS, MASKED) + offset
        if b_ptr is not None:
            y += load_tile(b_ptr, cols, cols < N_COLS, MASKED)
        store(y_ptr, cols, y, cols < N_COLS, MASKED, "evict_first")

    tl.store(stats_ptr + row, rstd * per_unit)
    if HAS_MEAN:
        tl.store(stats_ptr + n_rows + row, shift * unit)
    if STABLE:
        tl.store(stats_ptr + n_rows + n_rows + row, signed)


@triton.jit(do_not_specialize=["x_row_stride", "dy_row_stride", "n_rows", "first_row"])
def wide_sums_kernel(
    dy_ptr,  # (n_rows, N_COLS), unit column stride
    x_ptr,  # (n_rows, N_COLS), unit column stride
    w_ptr,  # (N_COLS,) or None
    stats_ptr,  # (1 to 3, n_rows) fp32: 1/σ, mean, ±m
    sums_ptr,  # (3, group rows) fp32: mean(g·n), mean(g), share of each position that attains ±m
    x_row_stride,  # in units of VEC elements
    dy_row_stride,
    n_rows,
    first_row,  # of this group
    eps,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    STABLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the row sums that dx needs, one row of the group per program."""
    MASKED: tl.constexpr = N_COLS % BLOCK_C != 0
    row = tl.program_id(0).to(tl.int64) + first_row
    x_ptr += row * x_row_stride * VEC
    dy_ptr += row * dy_row_stride * VEC
    rstd = tl.load(stats_ptr + row)
    if HAS_MEAN:
        mean = tl.load(stats_ptr + n_rows + row)
    if STABLE:
        signed = tl.load(stats_ptr + n_rows + n_rows + row)
    products = tl.zeros((BLOCK_C,), tl.float32)
    total = tl.zeros((BLOCK_C,), tl.float32)
    attained = tl.zeros((BLOCK_C,), tl.float32)
    for start in tl.range(0, N_COLS, BLOCK_C, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_C)
        n = load_tile(x_ptr, cols, cols < N_COLS, MASKED)
        g = load_tile(dy_ptr, cols, cols < N_COLS, MASKED)
        if w_ptr is not None:
            g *= load_tile(w_ptr, cols, cols < N_COLS, MASKED) + offset
        if STABLE:
            attained += ((cols < N_COLS) & (n == signed)).to(tl.float32)
        if HAS_MEAN:
            n -= mean
            total += g
        products += g * (n * rstd)
    out = sums_ptr + tl.program_id(0)
    a = tl.sum(products, 0) / N_COLS
    tl.store(out, a)
    if HAS_MEAN:
        tl.store(out + tl.num_programs(0), tl.sum(total, 0) / N_COLS)
    if STABLE:
        share = N_COLS * a * eps * (signed * rstd) * rstd / tl.maximum(tl.sum(attained, 0), 1.0)
        tl.store(out + 2 * tl.num_programs(0), share)


@triton.jit(do_not_specialize=["x_row_stride", "dy_row_stride", "ds_row_stride", "n_rows", "first_row", "group_rows"])
def wide_apply_kernel(
    dy_ptr,  # (n_rows, N_COLS), unit column stride
    ds_ptr,  # (n_rows, N_COLS), unit column stride: gradient of x + residual; None: none
    x_ptr,  # (n_rows, N_COLS), unit column stride
    w_ptr,  # (N_COLS,) or None
    stats_ptr,  # (1 to 3, n_rows) fp32: 1/σ, mean, ±m
    sums_ptr,  # (3, group rows) fp32, see wide_sums_kernel
    dx_ptr,  # (n_rows, N_COLS), contiguous; None: not needed
    dw_ptr,  # (row splits, N_COLS) fp32, added to from the second group on; None: not needed
    db_ptr,  # (row splits, N_COLS) fp32, likewise
    x_row_stride,  # in units of VEC elements
    dy_row_stride,
    ds_row_stride,
    n_rows,
    first_row,  # of this group
    group_rows,
    offset,
    N_COLS: tl.constexpr,
    VEC: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    STABLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx and add up dw and db in registers: one tile of columns and every n-th row of the group per program."""
    MASKED: tl.constexpr = N_COLS % BLOCK_C != 0
    split = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = cols < N_COLS
    out = split.to(tl.int64) * N_COLS + cols
    dw = tl.zeros((BLOCK_C,), tl.float32)
    db = tl.zeros((BLOCK_C,), tl.float32)
    if w_ptr is not None:
        w = load_tile(w_ptr, cols, ok, MASKED) + offset
    for i in tl.range(split, group_rows, tl.num_programs(1), num_stages=STAGES):
        row = tl.cast(first_row + i, tl.int64)
        n = load_tile(x_ptr, row * x_row_stride * VEC + cols, ok, MASKED)
        g = load_tile(dy_ptr, row * dy_row_stride * VEC + cols, ok, MASKED)
        rstd = tl.load(stats_ptr + row)
        if STABLE:
            attained = n == tl.load(stats_ptr + n_rows + n_rows + row)
        if HAS_MEAN:
            n -= tl.load(stats_ptr + n_rows + row)
        n *= rstd
        if dw_ptr is not None:
            dw += g * n
        if db_ptr is not None:
            db += g
        if dx_ptr is not None:
            if w_ptr is not None:
                g *= w
            dx = g - n * tl.load(sums_ptr + i)
            if HAS_MEAN:
                dx -= tl.load(sums_ptr + group_rows + i)
            dx *= rstd
            if ds_ptr is not None:
                dx += load_tile(ds_ptr, row * ds_row_stride * VEC + cols, ok, MASKED)
            if STABLE:
                dx -= tl.where(attained, tl.load(sums_ptr + 2 * group_rows + i), 0.0)
            store(dx_ptr, row * N_COLS + cols, dx, ok, MASKED)
    if dw_ptr is not None:
        if first_row > 0:
            dw += tl.load(dw_ptr + out, mask=ok, other=0.0)
        tl.store(dw_ptr + out, dw, mask=ok)
    if db_ptr is not None:
        if first_row > 0:
            db += tl.load(db_ptr + out, mask=ok, other=0.0)
        tl.store(db_ptr + out, db, mask=ok)
