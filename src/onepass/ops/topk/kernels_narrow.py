"""The selection of a few scores from narrow rows: many rows a program, one round of maxima for each score."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_keys import NAN, NOTHING, Row, bounds, load_keys
from .kernels_sort import Results, by_column, deliver

INTS = ["s_row_stride", "mask_row_stride", "start_stride", "lengths_stride", "n_rows", "n_cols", "k"]


@triton.jit
def rounds(number, k, nothing, beyond, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the k + 1 largest numbers of each row, and whether two of them differ in COLUMNS only.

    Numbers differ and lie between `nothing`, of which there may be many, and `beyond`, closely enough for a difference.
    """
    unsigned: tl.constexpr = tl.uint32 if number.dtype == tl.int32 else tl.uint64
    place = tl.arange(0, BLOCK_K)[None, :]
    best = tl.zeros((BLOCK_R, BLOCK_K), number.dtype) + nothing
    top = tl.zeros((BLOCK_R,), number.dtype) + beyond
    close = tl.zeros((BLOCK_R,), tl.int1)
    for i in range(k + 1):
        # the numbers below the last one wrap around to the largest unsigned ones: an addition and a maximum a number
        step = tl.max((number - top[:, None]).to(unsigned, bitcast=True), 1).to(number.dtype, bitcast=True)
        below = tl.where(step < 0, top + step, nothing)
        close = close | (((top ^ below) < COLUMNS) & ((top ^ below) > 0) & (below > nothing))
        best = tl.where(place == i, below[:, None], best)
        top = below
    return best, tl.max(close.to(tl.int32), 0) > 0


@triton.jit
def side_by_side(
    scores, first, step, present, RANGED: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the keys of PARTS tiles of WIDTH columns that begin `step` apart; equal places are neighbours."""
    if PARTS == 1:
        key = load_keys(scores, first + tl.arange(0, WIDTH)[None, :], present, RANGED, LARGEST, 0)
    else:
        even = side_by_side(scores, first, 2 * step, present, RANGED, LARGEST, PARTS // 2, WIDTH, BLOCK_R)
        odd = side_by_side(scores, first + step, 2 * step, present, RANGED, LARGEST, PARTS // 2, WIDTH, BLOCK_R)
        key = tl.reshape(tl.join(even, odd), (BLOCK_R, WIDTH * PARTS))
    return key


@triton.jit(do_not_specialize=INTS)
def narrow_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) like s
    gate_ptr,  # (n_rows, k) like s, or None
    s_row_stride,  # in UNITs, like n_cols
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_rows,
    n_cols,
    k,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SORTED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Find the largest number of each row k times.

    A number is a score's key and, in its low bits, the column from the end. 16-bit scores leave these bits free. Of
    fp32 scores the low bits give way, and two scores that differ in nothing else send the program through 64-bit
    numbers.
    """
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here_row = tl.minimum(row, n_rows - 1)
    first, last = bounds(start_ptr, lengths_ptr, here_row * start_stride, here_row * lengths_stride, n_cols)
    first = (first + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    last = (last + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    rows = row[:, None]
    present = rows < n_rows
    at = tl.arange(0, BLOCK_C)[None, :]
    WIDTH: tl.constexpr = BLOCK_C // PARTS
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    # of fp32 all bits: 16-bit scores leave low ones free
    scores = Row(s_ptr, mask_ptr, rows * s_row_stride, rows * mask_row_stride, first, last, n_cols)
    # parts of a row side by side in a thread: fewer threads share a row
    key = side_by_side(scores, 0, WIDTH, present, ranged, LARGEST, PARTS, WIDTH, BLOCK_R)
    cols = (at % PARTS) * WIDTH + at // PARTS
    from_end = BLOCK_C - 1 - cols
    none: tl.constexpr = -(1 << 30)
    number = tl.where(key > NOTHING, ((key >> 1) & -BLOCK_C) | from_end, none)
    best, close = rounds(number, k, none, 1 << 30, BLOCK_C if SHIFT == 0 else 0, BLOCK_R, BLOCK_K)
    index = tl.where(best == none, -1, BLOCK_C - 1 - (best & (BLOCK_C - 1)))
    nan = tl.max(best, 1)[:, None] >= ((NAN >> 1) & -BLOCK_C)
    if SHIFT == 0:
        if close:
            none_wide: tl.constexpr = -(1 << 62)
            wide = tl.where(key > NOTHING, (key.to(tl.int64) << 31) | from_end, none_wide)
            far, _ = rounds(wide, k, none_wide, 1 << 62, 0, BLOCK_R, BLOCK_K)
            index = tl.where(far == none_wide, -1, BLOCK_C - 1 - (far & (BLOCK_C - 1)).to(tl.int32))
    place = tl.arange(0, BLOCK_K)[None, :]
    if not SORTED:
        index = by_column(tl.where(place < k, index, -1))
    wanted = (rows < n_rows) & (place < k)
    at = rows * k + place
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST)
