"""Triton kernels of weighted_sum and their launchers.

Both kernels keep one accumulator per vector in registers (a tuple of tiles) and reduce across lanes once, at the
end. Widths and strides come in units of `UNIT` elements, so that the compiler sees how far they are aligned: 16-byte
loads then survive at widths such as 3000 or 100, where Triton's own "divisible by 16" does not hold.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, cdiv, device_guard, next_power_of_2, sm_count


@triton.jit
def forward_kernel(
    x_ptr,  # (n_rows, n_cols), unit column stride
    w_ptr,  # (N_VECTORS, n_cols), contiguous
    y_ptr,  # (splits, n_rows, N_VECTORS), contiguous; the result itself when there is one split, else fp32 parts
    x_row_units,  # row stride of x / UNIT
    n_rows,
    n_col_units,  # n_cols / UNIT
    split_tiles,  # column tiles per split
    UNIT: tl.constexpr,
    N_VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,  # neighbours that one thread loads
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,  # n_cols is a multiple of BLOCK_C
):
    """One tile of rows and one share of the columns per program; each tile of x serves all vectors."""
    n_cols = tl.cast(n_col_units, tl.int64) * UNIT
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    # rows past the end read the last row and are not stored
    x_rows = x_ptr + tl.minimum(rows, n_rows - 1)[:, None] * x_row_units * UNIT
    # a thread sums its own VECTOR neighbours at once, so that an accumulator costs a few registers per vector
    accs = (tl.zeros((BLOCK_R, BLOCK_C // VECTOR), tl.float32),) * N_VECTORS
    first = tl.program_id(1).to(tl.int64) * split_tiles * BLOCK_C
    for start in range(first, tl.minimum(first + split_tiles * BLOCK_C, n_cols), BLOCK_C):
        in_cols = cols < n_cols - start
        if EVEN_C:
            x = tl.load(x_rows + start + cols[None, :]).to(tl.float32)
        else:
            x = tl.load(x_rows + start + cols[None, :], mask=in_cols[None, :], other=0.0).to(tl.float32)
        new = ()
        for r in tl.static_range(N_VECTORS):
            if EVEN_C:
                w = tl.load(w_ptr + (n_cols * r + start) + cols).to(tl.float32)
            else:
                w = tl.load(w_ptr + (n_cols * r + start) + cols, mask=in_cols, other=0.0).to(tl.float32)
            product = tl.reshape(x * w[None, :], (BLOCK_R, BLOCK_C // VECTOR, VECTOR))
            new = new + (accs[r] + tl.sum(product, 2),)
        accs = new
    out = (tl.program_id(1).to(tl.int64) * n_rows + rows) * N_VECTORS
    for r in tl.static_range(N_VECTORS):
        tl.store(y_ptr + out + r, tl.sum(accs[r], 1).to(y_ptr.dtype.element_ty), mask=rows < n_rows)


@triton.jit
def backward_kernel(
    dy_ptr,  # (n_rows, N_VECTORS), contiguous
    x_ptr,  # (n_rows, n_cols), unit column stride; not read without NEED_W
    w_ptr,  # (N_VECTORS, n_cols), contiguous; not read without NEED_X
    dx_ptr,  # (n_rows, n_cols), contiguous
    dw_ptr,  # (row groups, N_VECTORS, n_cols), contiguous; the result itself when there is one group, else fp32 parts
    x_row_units,  # row stride of x / UNIT
    n_rows,
    n_col_units,  # n_cols / UNIT
    UNIT: tl.constexpr,
    N_VECTORS: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_W: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,  # n_cols is a multiple of BLOCK_C
):
    """One tile of columns and every n-th tile of UNROLL·BLOCK_R rows per program: w and dw stay in registers."""
    n_cols = tl.cast(n_col_units, tl.int64) * UNIT
    group = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCK_C
    cols = tl.arange(0, BLOCK_C)
    in_cols = (cols < n_cols - first) | EVEN_C
    ws = ()
    if NEED_X:
        for r in tl.static_range(N_VECTORS):
            if EVEN_C:
                w = tl.load(w_ptr + (n_cols * r + first) + cols)
            else:
                w = tl.load(w_ptr + (n_cols * r + first) + cols, mask=in_cols, other=0.0)
            ws = ws + (w.to(tl.float32),)
    dws = (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),) * N_VECTORS
    for tile in tl.range(group, tl.cdiv(n_rows, UNROLL * BLOCK_R), tl.num_programs(1)):
        top = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        # every load of the tile before its first store: the compiler can't move a load over one
        xs = ()
        dys = ()
        for u in tl.static_range(UNROLL):
            rows = top + u * BLOCK_R
            in_rows = rows < n_rows
            if NEED_W:
                mask = in_rows[:, None] if EVEN_C else in_rows[:, None] & in_cols[None, :]
                x_rows = x_ptr + first + rows[:, None] * x_row_units * UNIT
                xs = xs + (tl.load(x_rows + cols[None, :], mask=mask, other=0.0),)
            for r in tl.static_range(N_VECTORS):
                dy = tl.load(dy_ptr + rows * N_VECTORS + r, mask=in_rows, other=0.0)
                dys = dys + (dy.to(tl.float32)[:, None],)
        for u in tl.static_range(UNROLL):
            if NEED_X:
                rows = top + u * BLOCK_R
                mask = (rows < n_rows)[:, None] if EVEN_C else (rows < n_rows)[:, None] & in_cols[None, :]
                dx = dys[u * N_VECTORS] * ws[0][None, :]
                for r in tl.static_range(1, N_VECTORS):
                    dx += dys[u * N_VECTORS + r] * ws[r][None, :]
                dx_rows = dx_ptr + first + rows[:, None] * n_cols
                tl.store(dx_rows + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if NEED_W:
                x = xs[u].to(tl.float32)
                new = ()
                for r in tl.static_range(N_VECTORS):
                    new = new + (dws[r] + dys[u * N_VECTORS + r] * x,)
                dws = new
    if NEED_W:
        for r in tl.static_range(N_VECTORS):
            out = (tl.cast(group, tl.int64) * N_VECTORS + r) * n_cols + first
            tl.store(dw_ptr + out + cols, tl.sum(dws[r], 0).to(dw_ptr.dtype.element_ty), mask=in_cols)


@triton.jit
def finish_kernel(
    parts_ptr,  # (n_parts, n) fp32, contiguous
    out_ptr,  # (n,)
    n_parts,
    n,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum the parts in a fixed order and round once."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, n_parts, BLOCK_P):
        parts = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        mask = (parts[:, None] < n_parts) & (cols[None, :] < n)
        acc += tl.load(parts_ptr + parts[:, None] * n + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=cols < n)


def _unit(n_cols: int, row_stride: int) -> int:
    """Largest power of two ≤ 16 that divides both; 1 where a 32-bit count of units would overflow."""
    return math.gcd(n_cols, row_stride, 16) if n_cols < 2**31 else 1


def _block_c(n_cols: int, vector: int, threads: int) -> int:
    """Widest tile of columns, 8 to `threads` vectors, that wastes hardly more than the best one."""
    if n_cols <= 8 * vector:
        return next_power_of_2(n_cols)
    widths = [v * vector for v in (8, 16, 32, 64, 128) if v <= threads]
    padded = {c: cdiv(n_cols, c) * c for c in widths}
    return max(c for c in widths if padded[c] <= 1.07 * min(padded.values()))


def _forward_tile(n_rows: int, n_cols: int, vector: int, n_vectors: int) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_C, num_warps), timed on an H200: short programs for one vector, few warps a row for several.

    One vector: two loads per thread and many programs. Several: every vector costs a reduction across the warps of a
    row, so one or two warps take a row and each thread has eight loads under way.
    """
    several = 1 < n_vectors <= 4
    block_c = _block_c(n_cols, vector, 128)
    if several and n_cols > block_c:
        block_c = _block_c(n_cols, vector, 64)
    # a loop over columns wants each warp's share of w in its own registers: as many warps as a row of the tile fills
    warps = (1 if several else 4) if n_cols <= block_c else min(4, max(1, block_c // (32 * vector)))
    if block_c < 32 * vector:
        warps = 4
    loads = 8 if several and block_c >= 32 * vector else 4 if several else 2
    block_r = max(1, loads * warps * 32 * vector // block_c)
    return min(block_r, next_power_of_2(n_rows)), block_c, warps


def _backward_tile(n_rows: int, n_cols: int, vector: int, n_vectors: int) -> tuple[int, int, int, int]:
    """(UNROLL, BLOCK_R, BLOCK_C, num_warps): one vector of columns per thread, UNROLL rows of them under way."""
    unroll = 8 if n_vectors == 1 else 4 if n_vectors <= 4 else 2
    if n_vectors > 4:
        vector = min(vector, 4)
    block_c = _block_c(n_cols, vector, 128)
    warps = 8 if block_c <= 16 * vector else 4
    block_r = max(1, warps * 32 * vector // block_c)
    return min(unroll, next_power_of_2(cdiv(n_rows, block_r))), block_r, block_c, warps


def _groups(x: Tensor, row_tiles: int, col_tiles: int, warps: int) -> int:
    """How many programs share the rows of one tile of columns: about 24 warps on each multiprocessor in all."""
    return max(1, min(row_tiles, sm_count(x) * 24 // warps // col_tiles))


def _splits(x: Tensor, row_tiles: int, col_tiles: int) -> int:
    """How many programs share one tile of rows: few long rows would leave most of the GPU idle."""
    wanted = cdiv(4 * sm_count(x), row_tiles)
    return 1 if wanted < 2 else max(1, min(wanted, col_tiles // 4))


def _finish(parts: Tensor, out: Tensor) -> None:
    n_parts, n = len(parts), out.numel()
    block_p = min(256, next_power_of_2(n_parts))
    block_c = min(128, max(16, 4096 // block_p))
    finish_kernel[(cdiv(n, block_c),)](
        parts, out, n_parts, n, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4, **OPTIONS
    )  # fmt: skip


def forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """X (rows, D) with unit column stride, weight (R, D) contiguous → y (rows, R)."""
    n_rows, n_cols = x.shape
    n_vectors = weight.shape[0]
    if not n_rows or not n_cols:
        return torch.zeros((n_rows, n_vectors), dtype=out_dtype, device=x.device)
    y = torch.empty((n_rows, n_vectors), dtype=out_dtype, device=x.device)
    unit = _unit(n_cols, x.stride(0))
    vector = min(unit, 16 // x.element_size())
    block_r, block_c, warps = _forward_tile(n_rows, n_cols, vector, n_vectors)
    row_tiles, col_tiles = cdiv(n_rows, block_r), cdiv(n_cols, block_c)
    split_tiles = cdiv(col_tiles, _splits(x, row_tiles, col_tiles))
    splits = cdiv(col_tiles, split_tiles)
    parts = y if splits == 1 else torch.empty((splits, n_rows, n_vectors), dtype=torch.float32, device=x.device)
    with device_guard(x):
        forward_kernel[(row_tiles, splits)](
            x, weight, parts, x.stride(0) // unit, n_rows, n_cols // unit, split_tiles,
            UNIT=unit, N_VECTORS=n_vectors, VECTOR=min(vector, block_c), BLOCK_R=block_r, BLOCK_C=block_c,
            EVEN_C=n_cols % block_c == 0, num_warps=warps, **OPTIONS,
        )  # fmt: skip
        if splits > 1:
            _finish(parts, y)
    return y


def backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, n_cols: int, x_dtype: torch.dtype, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    """Dy (rows, R) contiguous → dx (rows, D) and dweight (R, D); what is not needed comes back empty.

    x (rows, D) with unit column stride may be None when dweight is not needed.
    """
    n_rows, n_vectors = dy.shape
    dx = torch.empty((n_rows, n_cols) if need_x else (0,), dtype=x_dtype, device=dy.device)
    dw = torch.empty_like(weight) if need_w else weight.new_empty(0)
    if not n_rows or not n_cols:
        return dx, dw.zero_()
    source = dy if x is None else x
    row_stride = n_cols if x is None else x.stride(0)
    unit = _unit(n_cols, row_stride)
    unroll, block_r, block_c, warps = _backward_tile(
        n_rows, n_cols, min(unit, 16 // x_dtype.itemsize), n_vectors
    )  # fmt: skip
    row_tiles, col_tiles = cdiv(n_rows, unroll * block_r), cdiv(n_cols, block_c)
    groups = _groups(source, row_tiles, col_tiles, warps)
    parts = dw
    if need_w and groups > 1:
        parts = torch.empty((groups, n_vectors, n_cols), dtype=torch.float32, device=dy.device)
    with device_guard(dy):
        backward_kernel[(col_tiles, groups)](
            dy, source, weight, dx, parts, row_stride // unit, n_rows, n_cols // unit,
            UNIT=unit, N_VECTORS=n_vectors, NEED_X=need_x, NEED_W=need_w, UNROLL=unroll, BLOCK_R=block_r,
            BLOCK_C=block_c, EVEN_C=n_cols % block_c == 0, num_warps=warps, **OPTIONS,
        )  # fmt: skip
        if need_w and groups > 1:
            _finish(parts, dw)
    return dx, dw
