"""The selection from rows that one program holds in registers, in one launch, and a few scores of many narrow rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_sort import (
    EMPTY,
    EMPTY_HALF,
    NAN,
    NOTHING,
    SIZES,
    Results,
    Row,
    bounds,
    by_column,
    deliver,
    from_boundary,
    load_keys,
    pack,
    pack_half,
    threshold_of,
    to_key,
)


@triton.jit
def rounds(number, k, nothing, beyond, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the k + 1 largest numbers of each row, and whether two of a row differ only in the bits below COLUMNS.

    Numbers are distinct, but for `nothing`, and below `beyond`; their differences fit their dtype.
    """
    unsigned: tl.constexpr = tl.uint32 if number.dtype == tl.int32 else tl.uint64
    place = tl.arange(0, BLOCK_K)[None, :]
    best = tl.zeros((BLOCK_R, BLOCK_K), number.dtype) + nothing
    top = tl.zeros((BLOCK_R,), number.dtype) + beyond
    close = tl.zeros((BLOCK_R,), tl.int1)
    for i in range(k + 1):
        # as unsigned, number - top is largest for the largest number below top: an addition and a maximum a number
        gap = tl.max((number - top[:, None]).to(unsigned, bitcast=True), 1).to(number.dtype, bitcast=True)
        below = tl.where(gap < 0, top + gap, nothing)
        close = close | (((top ^ below) < COLUMNS) & ((top ^ below) > 0) & (below > nothing))
        best = tl.where(place == i, below[:, None], best)
        top = below
    return best, tl.max(close.to(tl.int32), 0) > 0


@triton.jit
def side_by_side(
    scores, first, step, present, RANGED: tl.constexpr, LARGEST: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return the keys of PARTS tiles of WIDTH columns that begin `step` apart, their equal places side by side."""
    if PARTS == 1:
        key = load_keys(scores, first + tl.arange(0, WIDTH)[None, :], present, RANGED, LARGEST, 0)
    else:
        even = side_by_side(scores, first, 2 * step, present, RANGED, LARGEST, PARTS // 2, WIDTH, BLOCK_R)
        odd = side_by_side(scores, first + step, 2 * step, present, RANGED, LARGEST, PARTS // 2, WIDTH, BLOCK_R)
        key = tl.reshape(tl.join(even, odd), (BLOCK_R, WIDTH * PARTS))
    return key


@triton.jit(do_not_specialize=SIZES)
def narrow_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) like s
    gate_ptr,  # (n_rows, k) like s
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
    safe_row = tl.minimum(row, n_rows - 1)
    first, last = bounds(start_ptr, lengths_ptr, safe_row * start_stride, safe_row * lengths_stride, n_cols)
    first = (first + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    last = (last + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    rows = row[:, None]
    present = rows < n_rows
    at = tl.arange(0, BLOCK_C)[None, :]
    WIDTH: tl.constexpr = BLOCK_C // PARTS
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    # keys have all their bits (SHIFT 0): those of 16-bit scores leave the low ones free
    scores = Row(s_ptr, mask_ptr, rows * s_row_stride, rows * mask_row_stride, first, last, n_cols)
    # a thread holds the same columns of all parts: fewer threads share a row
    key = side_by_side(scores, 0, WIDTH, present, ranged, LARGEST, PARTS, WIDTH, BLOCK_R)
    cols = (at % PARTS) * WIDTH + at // PARTS
    from_end = BLOCK_C - 1 - cols
    empty: tl.constexpr = -(1 << 30)
    number = tl.where(key > NOTHING, ((key >> 1) & -BLOCK_C) | from_end, empty)
    best, close = rounds(number, k, empty, 1 << 30, BLOCK_C if SHIFT == 0 else 0, BLOCK_R, BLOCK_K)
    index = tl.where(best == empty, -1, BLOCK_C - 1 - (best & (BLOCK_C - 1)))
    nan = tl.max(best, 1)[:, None] >= ((NAN >> 1) & -BLOCK_C)
    if SHIFT == 0:
        if close:
            empty_wide: tl.constexpr = -(1 << 62)
            wide = tl.where(key > NOTHING, (key.to(tl.int64) << 31) | from_end, empty_wide)
            best_wide, _ = rounds(wide, k, empty_wide, 1 << 62, 0, BLOCK_R, BLOCK_K)
            index = tl.where(best_wide == empty_wide, -1, BLOCK_C - 1 - (best_wide & (BLOCK_C - 1)).to(tl.int32))
    place = tl.arange(0, BLOCK_K)[None, :]
    if not SORTED:
        index = by_column(tl.where(place < k, index, -1))
    wanted = (rows < n_rows) & (place < k)
    at = rows * k + place
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST)


@triton.jit(do_not_specialize=SIZES)
def whole_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    packed_ptr,  # (n_rows, k) survivors for `sort_kernel`, which delivers: int64, int32 of 16-bit scores; or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1; at first survivors' columns in int32
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) like s
    gate_ptr,  # (n_rows, k) like s
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
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
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    nothing: tl.constexpr = NOTHING >> SHIFT
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    safe_row = tl.minimum(row, n_rows - 1)
    first, last = bounds(start_ptr, lengths_ptr, safe_row * start_stride, safe_row * lengths_stride, n_cols)
    first = (first + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    last = (last + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    rows = row[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    present = rows < n_rows
    # columns count from a boundary of VECTOR scores until they are stored
    off = rows * 0
    scores = Row(s_ptr, mask_ptr, rows * s_row_stride, rows * mask_row_stride, first, last, n_cols)
    off_boundary: tl.constexpr = UNIT < VECTOR
    if off_boundary:
        boundary, off = from_boundary(rows * s_row_stride, VECTOR)
        scores = Row(s_ptr, mask_ptr, boundary, scores.mask_at, first + off, last + off, n_cols + off)
    key = load_keys(scores, cols, present, ranged or off_boundary, LARGEST, SHIFT)
    top = tl.max(key, 1)
    nan = (top == (NAN >> SHIFT))[:, None]
    threshold, valid, _ = threshold_of(key, k, k, nothing, SHIFT)
    lo = threshold[:, None]
    room = k - tl.sum((key > lo).to(tl.int32), 1)[:, None]
    n_survivors = tl.minimum(valid, k)[:, None]
    # survivors' columns pass through the memory of the indices, as int32
    columns_ptr = index_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    columns_row = rows * k * (index_ptr.dtype.element_ty.primitive_bitwidth // 32)
    # the VECTOR neighbours of one load become bits: a scan of their counts is shorter than one of the row
    above = tl.reshape(key > lo, (BLOCK_R, BLOCK_C // VECTOR, VECTOR))
    level = tl.reshape((key == lo) & (key > nothing), (BLOCK_R, BLOCK_C // VECTOR, VECTOR))
    bit = (1 << tl.arange(0, VECTOR))[None, None, :]
    # two counts share a number, 16 bits each
    counts = tl.sum(tl.where(above, 1 << 16, level.to(tl.int32)), 2)
    above_bits = tl.sum(tl.where(above, bit, 0), 2)
    level_bits = tl.sum(tl.where(level, bit, 0), 2)
    before = tl.cumsum(counts, 1) - counts
    n_level = before & 0xFFFF
    slot = (before >> 16) + tl.minimum(n_level, room)
    for i in tl.static_range(VECTOR):
        is_level = (level_bits >> i) & 1
        chosen = ((above_bits >> i) & 1) | (is_level & (n_level < room).to(tl.int32))
        column = tl.arange(0, BLOCK_C // VECTOR)[None, :] * VECTOR + i - off + tl.zeros_like(slot)
        tl.store(columns_ptr + columns_row + slot, column, mask=chosen > 0)
        slot += chosen
        n_level += is_level
    tl.debug_barrier()
    place = tl.arange(0, BLOCK_K)[None, :]
    wanted = present & (place < k)
    index = tl.load(columns_ptr + columns_row + place, mask=wanted & (place < n_survivors), other=-1)
    at = rows * k + place
    if SORTED:
        s = tl.load(s_ptr + rows * s_row_stride + index, mask=index >= 0, other=0.0).to(tl.float32)
        s = s if LARGEST else -s
    if packed_ptr is not None:
        if packed_ptr.dtype.element_ty == tl.int32:
            number = tl.where(index >= 0, pack_half(s, index, s_ptr.dtype.element_ty), EMPTY_HALF)
        else:
            number = tl.where(index >= 0, pack(s, index), EMPTY)
        tl.store(packed_ptr + at, number, mask=wanted)
    else:
        if SORTED:
            key = to_key(s) >> SHIFT
            number = tl.where(index >= 0, (key.to(tl.int64) << 32) | (0x7FFFFFFF - index), -0x8000000000000000)
            number = tl.sort(number, 1, descending=True)
            index = tl.where(place < n_survivors, 0x7FFFFFFF - number.to(tl.int32), -1)
        tl.debug_barrier()
        to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
        deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST)
