"""The selection from rows that one program holds in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_keys import COUNTERS, EMPTY, LARGEST_KEY, NAN, NOTHING, bounds, load_scores, pack, to_key

INTS = [
    "s_row_stride", "mask_row_stride", "start_stride", "lengths_stride", "n_rows", "n_cols", "k",
]  # fmt: skip


@triton.jit(do_not_specialize=INTS)
def whole_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    out_ptr,  # (n_rows, k) int64: packed survivors in the order of columns, then empty places
    state_ptr,  # (n_rows, COUNTERS) int32
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_rows,
    n_cols,
    k,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    LARGEST: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    nothing: tl.constexpr = NOTHING >> SHIFT
    has_range: tl.constexpr = HAS_START or HAS_LENGTHS
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    here_row = tl.minimum(row, n_rows - 1)
    first, last = bounds(
        start_ptr, lengths_ptr, here_row * start_stride, here_row * lengths_stride, n_cols, HAS_START, HAS_LENGTHS
    )
    first = (first + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    last = (last + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    rows = row[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    present = rows < n_rows
    key = to_key(
        load_scores(
            s_ptr, mask_ptr, rows * s_row_stride + cols, rows * mask_row_stride + cols, cols, present, first, last,
            n_cols, HAS_MASK, has_range, LARGEST,
        )
    )  # fmt: skip
    key = key >> SHIFT
    valid = tl.sum((key > nothing).to(tl.int32), 1)
    top = tl.max(key, 1)
    few = valid <= k
    # at least k keys are ≥ lo, fewer than k are ≥ hi
    lo = tl.where(few, nothing, tl.min(tl.where(key > nothing, key, LARGEST_KEY), 1))
    hi = tl.where(few, nothing, top) + 1
    while tl.max((lo + 1 < hi).to(tl.int32), 0) > 0:
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        # exactly k: this row is solved, so set hi = lo + 1
        hi = tl.where(count < k, middle, tl.where(count == k, middle + 1, hi))
        lo = tl.where(count < k, lo, middle)
    room = (k - tl.sum((key > lo[:, None]).to(tl.int32), 1))[:, None]
    kept = tl.where(few, valid, k)[:, None]
    above_before = tl.zeros((BLOCK_R, 1), tl.int32)
    level_before = tl.zeros((BLOCK_R, 1), tl.int32)
    # load the scores again, from the cache: registers can't hold them beside the scan
    for begin in range(0, BLOCK_C, BLOCK_T):
        here = (begin + tl.arange(0, BLOCK_T))[None, :]
        near = load_scores(
            s_ptr, mask_ptr, rows * s_row_stride + here, rows * mask_row_stride + here, here, present, first, last,
            n_cols, HAS_MASK, has_range, LARGEST,
        )  # fmt: skip
        near_key = to_key(near) >> SHIFT
        above = near_key > lo[:, None]
        level = (near_key == lo[:, None]) & (near_key > nothing)
        # one scan for both counts, 16 bits each
        ones = (above.to(tl.int32) << 16) | level.to(tl.int32)
        total = tl.sum(ones, 1)
        if tl.max(total, 0) > 0:
            both = tl.cumsum(ones, 1)
            n_level = level_before + (both & 0xFFFF)
            chosen = above | (level & (n_level <= room))
            slot = above_before + (both >> 16) + tl.minimum(n_level, room) - 1
            tl.store(out_ptr + rows * k + slot, pack(near, here), mask=chosen)
        above_before += (total >> 16)[:, None]
        level_before += (total & 0xFFFF)[:, None]
        empty = present & (here >= kept) & (here < k)
        tl.store(out_ptr + rows * k + here, tl.full((BLOCK_R, BLOCK_T), EMPTY, tl.int64), mask=empty)
    state = state_ptr + row * COUNTERS
    tl.store(state, tl.zeros((BLOCK_R,), tl.int32) + k, mask=row < n_rows)
    tl.store(state + 1, (top == (NAN >> SHIFT)).to(tl.int32), mask=row < n_rows)
    tl.store(state + 2, tl.zeros((BLOCK_R,), tl.int32), mask=row < n_rows)
