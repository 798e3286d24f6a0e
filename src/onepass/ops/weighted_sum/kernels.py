"""Triton kernels of weighted_sum and their launchers.

Forward and backward keep one accumulator per vector in registers (a tuple of tiles) and reduce across lanes once, at
the end. Widths and strides come in units of `UNIT` elements, so that the compiler sees their alignment: widths such as
3000 then keep 16-byte loads, though Triton's own test, "divisible by 16", fails.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import aligned, as_rows, cdiv, even_rows, launch, next_power_of_2, sm_count
from onepass.ops._shared.kernels_memory import load
from onepass.ops._shared.kernels_partials import add_partials
from onepass.ops._shared.kernels_tokens import least_padding

# column tiles of a split in forward; columns of a split with tensor cores; most splits of a row. Long rows are split,
# as few of them would otherwise leave most of the GPU idle
SPLIT_TILES, DOT_SPLIT_COLS, MAX_SPLITS = 8, 8192, 1024


@triton.jit
def add_products(acc, x, w, N: tl.constexpr):
    """Return acc (R, C / N) plus the sum of each N neighbouring products of x and w (R, C), in one order for all rows.

    Each step is an explicit fma. The compiler may contract ``x0 * w0 + x1 * w1`` to fma in two ways, and takes one for
    some rows of a tile and the other for others: a row's bits would then depend on its place.
    """
    if N == 1:
        acc = tl.fma(x, w, acc)
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        w0, w1 = tl.split(tl.reshape(w, (w.shape[0], w.shape[1] // 2, 2)))
        acc = add_products(add_products(acc, x0, w0, N // 2), x1, w1, N // 2)
    return acc


@triton.jit(do_not_specialize=["x_row_units", "n_rows", "n_col_units", "split_tiles"])
def forward_kernel(
    x_ptr,  # (n_rows, n_cols), unit column stride
    w_ptr,  # (N_VECTORS, n_cols), contiguous
    y_ptr,  # (splits, n_rows, N_VECTORS), contiguous; one split: the result, else fp32 partials
    x_row_units,  # row stride of x / UNIT
    n_rows,
    n_col_units,  # n_cols / UNIT
    split_tiles,  # column tiles per split
    UNIT: tl.constexpr,
    N_VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,  # neighbours that one thread loads; 0: x and w are of one 16-bit dtype, for tensor cores
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,  # n_cols is a multiple of BLOCK_C
    STAGES: tl.constexpr,  # with tensor cores
):
    """Sum one tile of rows over one split of the columns per program; each tile of x serves all vectors.

    Tensor cores take up to 16 vectors at once: 16-bit products are exact there, sums are fp32.
    """
    n_cols = tl.cast(n_col_units, tl.int64) * UNIT
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_C)
    # rows past the end read the last row and are not stored
    x_rows = x_ptr + tl.minimum(rows, n_rows - 1)[:, None] * x_row_units * UNIT
    if VECTOR == 0:
        vectors = tl.arange(0, 16)
        w_rows = w_ptr + vectors[None, :] * n_cols
        acc = tl.zeros((BLOCK_R, 16), tl.float32)
        first = tl.program_id(1).to(tl.int64) * split_tiles * BLOCK_C
        for start in tl.range(first, tl.minimum(first + split_tiles * BLOCK_C, n_cols), BLOCK_C, num_stages=STAGES):
            in_cols = (cols < n_cols - start) | EVEN_C
            x = load(x_rows + start, cols[None, :], in_cols[None, :], not EVEN_C)
            mask = in_cols[:, None] & (vectors < N_VECTORS)[None, :]
            acc = tl.dot(x, tl.load(w_rows + start + cols[:, None], mask=mask, other=0.0), acc)
        mask = (rows < n_rows)[:, None] & (vectors < N_VECTORS)[None, :]
        out = (tl.program_id(1).to(tl.int64) * n_rows + rows) * N_VECTORS
        tl.store(y_ptr + out[:, None] + vectors[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        # a thread sums its own VECTOR neighbours first, so that each vector's accumulator costs few registers
        accs = (tl.zeros((BLOCK_R, BLOCK_C // VECTOR), tl.float32),) * N_VECTORS
        first = tl.program_id(1).to(tl.int64) * split_tiles * BLOCK_C
        for start in range(first, tl.minimum(first + split_tiles * BLOCK_C, n_cols), BLOCK_C):
            in_cols = cols < n_cols - start
            x = load(x_rows + start, cols[None, :], in_cols[None, :], not EVEN_C).to(tl.float32)
            new_accs = ()
            for r in tl.static_range(N_VECTORS):
                w = load(w_ptr + (n_cols * r + start), cols, in_cols, not EVEN_C).to(tl.float32)
                w = tl.broadcast_to(w[None, :], (BLOCK_R, BLOCK_C))
                new_accs = new_accs + (add_products(accs[r], x, w, VECTOR),)
            accs = new_accs
        out = (tl.program_id(1).to(tl.int64) * n_rows + rows) * N_VECTORS
        for r in tl.static_range(N_VECTORS):
            tl.store(y_ptr + out + r, tl.sum(accs[r], 1).to(y_ptr.dtype.element_ty), mask=rows < n_rows)


@triton.jit(do_not_specialize=["x_row_units", "n_rows", "n_col_units"])
def backward_kernel(
    dy_ptr,  # (n_rows, N_VECTORS), contiguous
    x_ptr,  # (n_rows, n_cols), unit column stride; not read without NEED_W
    w_ptr,  # (N_VECTORS, n_cols), contiguous; not read without NEED_X
    dx_ptr,  # (n_rows, n_cols), contiguous
    dw_ptr,  # (row groups, N_VECTORS, n_cols), contiguous; one group: the result, else fp32 partials
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
    STAGES: tl.constexpr,  # of a software pipeline that reads x, where only dw is needed; None: no pipeline
):
    """Compute dx and dw: one tile of columns and every n-th tile of UNROLL·BLOCK_R rows per program.

    w and dw stay in registers.
    """
    # evict-last: lines that are written then leave L2 first, in an even stream
    POLICY: tl.constexpr = "evict_last" if STAGES is None else ""
    n_cols = tl.cast(n_col_units, tl.int64) * UNIT
    group = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCK_C
    cols = tl.arange(0, BLOCK_C)
    in_cols = (cols < n_cols - first) | EVEN_C
    ws = ()
    if NEED_X:
        for r in tl.static_range(N_VECTORS):
            ws = ws + (load(w_ptr + (n_cols * r + first), cols, in_cols, not EVEN_C).to(tl.float32),)
    dws = (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),) * N_VECTORS
    for tile in tl.range(group, tl.cdiv(n_rows, UNROLL * BLOCK_R), tl.num_programs(1), num_stages=STAGES):
        first_rows = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        # all loads of the tile before its first store: the compiler does not move loads across stores
        xs = ()
        dys = ()
        for u in tl.static_range(UNROLL):
            rows = first_rows + u * BLOCK_R
            in_rows = rows < n_rows
            if NEED_W:
                mask = in_rows[:, None] if EVEN_C else in_rows[:, None] & in_cols[None, :]
                x_rows = x_ptr + first + rows[:, None] * x_row_units * UNIT
                xs = xs + (tl.load(x_rows + cols[None, :], mask=mask, other=0.0, eviction_policy=POLICY),)
            for r in tl.static_range(N_VECTORS):
                dy = tl.load(dy_ptr + rows * N_VECTORS + r, mask=in_rows, other=0.0)
                dys = dys + (dy.to(tl.float32)[:, None],)
        for u in tl.static_range(UNROLL):
            if NEED_X:
                rows = first_rows + u * BLOCK_R
                mask = (rows < n_rows)[:, None] if EVEN_C else (rows < n_rows)[:, None] & in_cols[None, :]
                dx = dys[u * N_VECTORS] * ws[0][None, :]
                for r in tl.static_range(1, N_VECTORS):
                    dx += dys[u * N_VECTORS + r] * ws[r][None, :]
                dx_rows = dx_ptr + first + rows[:, None] * n_cols
                tl.store(dx_rows + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if NEED_W:
                x = xs[u].to(tl.float32)
                new_dws = ()
                for r in tl.static_range(N_VECTORS):
                    new_dws = new_dws + (dws[r] + dys[u * N_VECTORS + r] * x,)
                dws = new_dws
    if NEED_W:
        for r in tl.static_range(N_VECTORS):
            out = (tl.cast(group, tl.int64) * N_VECTORS + r) * n_cols + first
            tl.store(dw_ptr + out + cols, tl.sum(dws[r], 0).to(dw_ptr.dtype.element_ty), mask=in_cols)


def _unit(n_cols: int, row_stride: int) -> int:
    """Return the largest power of two ≤ 16 that divides both; 1 for rows of 2^31 columns or more."""
    return math.gcd(n_cols, row_stride, 16) if n_cols < 2**31 else 1


def _forward_tile(n_cols: int, vector: int, n_vectors: int) -> tuple[int, int, int]:
    """Return (BLOCK_R, BLOCK_C, num_warps), timed on an H200.

    One vector: four loads per thread and many programs. Two to four vectors: each costs a reduction across the warps of
    a row, so one or two warps take a row and each thread has eight loads in flight.
    """
    several = 1 < n_vectors <= 4
    block_c = least_padding(n_cols, vector)
    if several and n_cols > block_c:
        block_c = least_padding(n_cols, vector, 64)
    # for a loop over columns, use as many warps as a row of the tile fills: each then keeps its share of w in registers
    warps = (1 if several else 4) if n_cols <= block_c else min(4, max(1, block_c // (32 * vector)))
    if block_c < 32 * vector:
        warps = 4
    if several:
        loads = 8 if block_c >= 32 * vector else 4
    else:
        loads = 2 if n_vectors > 4 or (n_cols > block_c and (vector < 8 or block_c < 32 * vector)) else 4
    # neither tile nor splits depend on the number of rows: a row's sum has one order in every batch
    return max(1, loads * warps * 32 * vector // block_c), block_c, warps


def _backward_tile(
    n_rows: int, n_cols: int, vector: int, n_vectors: int, only_dw: bool
) -> tuple[int, int, int, int | None, int]:
    """Return (UNROLL, BLOCK_R, BLOCK_C, STAGES, num_warps).

    One 16-byte load per thread and tile, UNROLL tiles in flight; for dw of one vector alone four loads of x, three
    times as many in flight.
    """
    unroll = 8 if n_vectors == 1 else 4 if n_vectors <= 4 else 2
    if n_vectors > 4:
        vector = min(vector, 4)
    block_c = least_padding(n_cols, vector)
    warps = 8 if block_c <= 16 * vector else 4
    if only_dw:
        return 1, min(4 * warps * 32 * vector // block_c, next_power_of_2(n_rows)), block_c, 4, warps
    block_r = max(1, warps * 32 * vector // block_c)
    return min(unroll, next_power_of_2(cdiv(n_rows, block_r))), block_r, block_c, None, warps


def _in_two_passes(dx: Tensor, n_vectors: int) -> bool:
    """Return whether to read x for dw first, then write dx: for much data, separate streams beat mixed ones."""
    size = dx.element_size()
    wide = dx.shape[-1] * size >= (256 if size == 4 else 2048)
    return n_vectors == 1 and wide and dx.numel() * size >= 1 << 28


def forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Return y (...) or (..., R) from x (..., D) and weight (D,) or (R, D)."""
    dtype = out_dtype or torch.promote_types(x.dtype, weight.dtype)
    y = torch.empty(x.shape[:-1] + weight.shape[:-1], dtype=dtype, device=x.device)
    if not x.numel():
        return y.zero_()
    x, weight = even_rows(as_rows(x)), aligned(_matrix(weight))
    (n_rows, n_cols), n_vectors = x.shape, len(weight)
    row_stride = x.stride(0) if n_rows > 1 else n_cols
    unit = _unit(n_cols, row_stride)
    vector = min(unit, 16 // x.element_size())
    if n_vectors > 1 and x.dtype == weight.dtype and vector == 8 and n_cols >= 64:
        # tensor cores
        block_r, block_c, stages, warps = 64, 64 if n_cols <= 64 else 128, 4, 4
        split_tiles, neighbours = DOT_SPLIT_COLS // block_c, 0
    else:
        block_r, block_c, warps = _forward_tile(n_cols, vector, n_vectors)
        split_tiles, neighbours, stages = SPLIT_TILES, min(vector, block_c), 0
    split_tiles = max(split_tiles, cdiv(n_cols, MAX_SPLITS * block_c))
    row_tiles, splits = cdiv(n_rows, block_r), cdiv(n_cols, split_tiles * block_c)
    partials = y if splits == 1 else torch.empty((splits, n_rows, n_vectors), dtype=torch.float32, device=x.device)
    launch(
        forward_kernel, (row_tiles, splits, 1), (x, weight, partials),
        (row_stride // unit, n_rows, n_cols // unit, split_tiles),
        (unit, n_vectors, neighbours, block_r, block_c, n_cols % block_c == 0, stages), num_warps=warps,
    )  # fmt: skip
    if splits > 1:
        # unit 1 for any number of rows: another unit could change the order in which partials are added
        add_partials(partials, y, 1)
    return y


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dweight from dy (...) or (..., R); None where not needed."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    dw = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_w else None
    if not x.numel():
        return dx, None if dw is None else dw.zero_()
    vectors = _matrix(weight)
    # only dw reads x: skip the copy that its rows may need
    rows = as_rows(x) if need_w else None
    # `.sum().backward()` gives dy with stride 0
    dy = dy.reshape(-1, len(vectors)).contiguous()
    dx_rows, dw_rows = (None if t is None else t.view(-1, x.shape[-1]) for t in (dx, dw))
    if dx_rows is not None and dw_rows is not None and _in_two_passes(dx_rows, len(vectors)):
        _backward_pass(dy, rows, None, None, dw_rows)
        _backward_pass(dy, None, vectors, dx_rows, None)
    elif need_x or need_w:
        _backward_pass(dy, rows, vectors if need_x else None, dx_rows, dw_rows)
    return dx, dw


def _matrix(weight: Tensor) -> Tensor:
    return weight.contiguous() if weight.dim() == 2 else weight[None].contiguous()


def _backward_pass(dy: Tensor, x: Tensor | None, weight: Tensor | None, dx: Tensor | None, dw: Tensor | None) -> None:
    vectors = dw if weight is None else weight
    rows = dx if x is None else x
    assert vectors is not None
    assert rows is not None
    n_vectors, n_cols = vectors.shape
    n_rows = len(rows)
    row_stride = n_cols if x is None else x.stride(0)
    unit = _unit(n_cols, row_stride)
    vector = min(unit, 16 // rows.element_size())
    only_dw = dx is None and n_vectors == 1
    unroll, block_r, block_c, stages, warps = _backward_tile(n_rows, n_cols, vector, n_vectors, only_dw)
    row_tiles, col_tiles = cdiv(n_rows, unroll * block_r), cdiv(n_cols, block_c)
    partials, groups = dw, min(row_tiles, 65535)
    if dw is not None:
        # about 24 warps per multiprocessor in all
        groups = max(1, min(row_tiles, sm_count(dy) * 24 // warps // col_tiles))
        if groups > 1:
            partials = torch.empty((groups, n_vectors, n_cols), dtype=torch.float32, device=dy.device)
    launch(
        backward_kernel, (col_tiles, groups, 1), (dy, x, weight, dx, partials),
        (row_stride // unit, n_rows, n_cols // unit),
        (unit, n_vectors, dx is not None, dw is not None, unroll, block_r, block_c, n_cols % block_c == 0, stages),
        num_warps=warps,
    )  # fmt: skip
    if dw is not None and partials is not None and groups > 1:
        add_partials(partials, dw, _unit(dw.numel(), dw.numel()))
