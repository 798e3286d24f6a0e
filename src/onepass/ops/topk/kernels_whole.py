"""The selection from rows that one program holds in registers, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_keys import (
    EMPTY,
    EMPTY_HALF,
    LARGEST_KEY,
    NAN,
    NOTHING,
    Row,
    bounds,
    load_keys,
    pack,
    pack_half,
    to_key,
    to_score,
)  # fmt: skip
from .kernels_sort import Results, deliver

INTS = [
    "s_row_stride", "mask_row_stride", "start_stride", "lengths_stride", "n_rows", "n_cols", "k",
]  # fmt: skip


@triton.jit
def threshold_of(key, k, nothing, SHIFT: tl.constexpr):
    """Return the key of the k-th largest score of each row, 0 or more scores, and how many are a score.

    Counts bracket the threshold. The next guess is on the line through both ends, with log(count/(n - count)) for the
    count: a row of normal scores is solved by 7 counts instead of 18. Every other guess from the seventh on bisects
    keys, so that a row of any scores is solved.
    """
    valid = tl.sum((key > nothing).to(tl.int32), 1)
    few = valid <= k
    # at least k keys are ≥ lo, fewer than k are ≥ hi
    lo = tl.where(few, nothing, tl.min(tl.where(key > nothing, key, LARGEST_KEY), 1))
    hi = tl.where(few, nothing, tl.max(key, 1)) + 1
    total = valid.to(tl.float32) + 0.5
    aim = tl.log((k + 0.5) / tl.maximum(total - k, 0.5))
    at_lo = tl.log(total * 2.0) - aim
    at_hi = -tl.log(total * 2.0) - aim
    side = tl.zeros_like(valid)
    i = 0
    while tl.max((lo + 1 < hi).to(tl.int32), 0) > 0:
        low = tl.maximum(tl.minimum(to_score(lo, SHIFT), 1e38), -1e38)
        high = tl.maximum(tl.minimum(to_score(hi - 1, SHIFT), 1e38), -1e38)
        guess = to_key(low + (high - low) * (at_lo / tl.maximum(at_lo - at_hi, 1e-30))) >> SHIFT
        halfway = (lo & hi) + ((lo ^ hi) >> 1)
        bisect = (i >= 6) & (i % 2 == 0)
        middle = tl.where(bisect, halfway, tl.maximum(tl.minimum(guess, hi - 1), lo + 1))
        # a row that is solved keeps lo
        middle = tl.where(lo + 1 < hi, middle, lo)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        found = tl.log((count.to(tl.float32) + 0.5) / tl.maximum(total - count.to(tl.float32), 0.5)) - aim
        above = count < k
        # an end that stays twice counts half
        at_lo = tl.where(above, tl.where(side == -1, 0.5 * at_lo, at_lo), found)
        at_hi = tl.where(above, found, tl.where(side == 1, 0.5 * at_hi, at_hi))
        side = tl.where(above, -1, 1)
        # exactly k: this row is solved, so set hi = lo + 1
        hi = tl.where(above, middle, tl.where(count == k, middle + 1, hi))
        lo = tl.where(above, lo, middle)
        i += 1
    return lo, valid


@triton.jit(do_not_specialize=INTS)
def whole_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    packed_ptr,  # (n_rows, k) survivors for `sort_kernel`, which delivers: int64, int32 of 16-bit scores; or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1; at first survivors' columns in int32
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) like s
    gate_ptr,  # (n_rows, k) like s, or None
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
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    nothing: tl.constexpr = NOTHING >> SHIFT
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    here_row = tl.minimum(row, n_rows - 1)
    first, last = bounds(start_ptr, lengths_ptr, here_row * start_stride, here_row * lengths_stride, n_cols)
    first = (first + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    last = (last + tl.zeros((BLOCK_R,), tl.int32))[:, None]
    rows = row[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    present = rows < n_rows
    scores = Row(s_ptr, mask_ptr, rows * s_row_stride, rows * mask_row_stride, first, last, n_cols)
    key = load_keys(scores, cols, present, ranged, LARGEST, SHIFT)
    top = tl.max(key, 1)
    nan = (top == (NAN >> SHIFT))[:, None]
    threshold, valid = threshold_of(key, k, nothing, SHIFT)
    lo = threshold[:, None]
    room = k - tl.sum((key > lo).to(tl.int32), 1)[:, None]
    kept = tl.minimum(valid, k)[:, None]
    above_before = tl.zeros((BLOCK_R, 1), tl.int32)
    level_before = tl.zeros((BLOCK_R, 1), tl.int32)
    # survivors' columns pass through the memory of the indices, as int32
    columns_ptr = index_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    columns_row = rows * k * (index_ptr.dtype.element_ty.primitive_bitwidth // 32)
    # load the scores again, from the cache: registers can't hold them beside the scan
    for begin in range(0, BLOCK_C, BLOCK_T):
        here = (begin + tl.arange(0, BLOCK_T))[None, :]
        near_key = load_keys(scores, here, present, ranged, LARGEST, SHIFT)
        above = near_key > lo
        level = (near_key == lo) & (near_key > nothing)
        # one scan for both counts, 16 bits each
        ones = (above.to(tl.int32) << 16) | level.to(tl.int32)
        total = tl.sum(ones, 1)
        if tl.max(total, 0) > 0:
            both = tl.cumsum(ones, 1)
            n_level = level_before + (both & 0xFFFF)
            chosen = above | (level & (n_level <= room))
            slot = above_before + (both >> 16) + tl.minimum(n_level, room) - 1
            tl.store(columns_ptr + columns_row + slot, here + tl.zeros_like(slot), mask=chosen)
        above_before += (total >> 16)[:, None]
        level_before += (total & 0xFFFF)[:, None]
    tl.debug_barrier()
    place = tl.arange(0, BLOCK_K)[None, :]
    wanted = present & (place < k)
    index = tl.load(columns_ptr + columns_row + place, mask=wanted & (place < kept), other=-1)
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
            index = tl.where(place < kept, 0x7FFFFFFF - number.to(tl.int32), -1)
        tl.debug_barrier()
        to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
        deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST)
