"""The selection of a few scores from wide rows: maxima of groups, then only the groups that reach a bound.

Order a row's groups by their largest score: the k best scores stand in the first k groups, and none of them is below
the k-th of these maxima. So one read of the row, one comparison a score, gives a bound that few scores reach, and these
are in groups that are known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_keys import (
    EMPTY,
    INFINITY,
    LARGEST_KEY,
    NOTHING,
    Row,
    bounds,
    load_scores,
    ordered,
    pack,
    to_column,
    to_key,
)  # fmt: skip
from .kernels_pivot import collect, exact_threshold
from .kernels_sort import Results, by_column, deliver

INTS = ["s_row_stride", "mask_row_stride", "start_stride", "lengths_stride", "n_cols", "k"]


@triton.jit
def larger(a, b):
    """Return the larger score; NaN counts as the largest."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=INTS)
def wide_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    groups_ptr,  # (n_rows, GROUPS) int32 scratch: groups that reach the bound
    candidates_ptr,  # (n_rows, ROOM) int64 scratch: scores that reach it, packed
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) like s
    gate_ptr,  # (n_rows, k) like s, or None
    s_row_stride,  # in UNITs, like n_cols
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_cols,
    k,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    SHIFT: tl.constexpr,
    SORTED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    AGAIN: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One program a row. A group is GROUP neighbours of each CHUNK, at the same place of all chunks."""
    n_cols = n_cols * UNIT
    row = tl.program_id(0).to(tl.int64)
    nothing: tl.constexpr = NOTHING >> SHIFT
    # chunks whose groups are read again at a time
    SPAN: tl.constexpr = AGAIN // (GROUPS * GROUP)
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    first, last = bounds(start_ptr, lengths_ptr, row * start_stride, row * lengths_stride, n_cols)
    s_row = row * s_row_stride * UNIT
    scores = Row(s_ptr, mask_ptr, s_row, row * mask_row_stride, first, last, n_cols)
    begin = first // CHUNK
    end = (last + CHUNK - 1) // CHUNK
    top = tl.full((CHUNK // GROUP,), -float("inf"), tl.float32)
    for chunk in range(begin, end):
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        s = load_scores(scores, cols, True, ranged, LARGEST)
        top = larger(top, tl.reduce(tl.reshape(s, (CHUNK // GROUP, GROUP)), 1, larger))
    key = to_key(top) >> SHIFT
    # a bound that k to GROUPS maxima reach, or all that are a score, where these are fewer
    valid = tl.sum((key > nothing).to(tl.int32), 0)
    lo = tl.where(valid <= k, nothing + 1, tl.min(tl.where(key > nothing, key, LARGEST_KEY), 0))
    hi = tl.where(valid <= k, lo, tl.max(key, 0)) + 1
    reached = valid
    while (lo + 1 < hi) & (reached > k + k // 4):
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        hi = tl.where(count < k, middle, hi)
        lo = tl.where(count < k, lo, middle)
        reached = tl.where(count < k, reached, count)
    # a plateau of maxima: their groups stay out, and the first scores equal to them follow the others
    plateau = reached > GROUPS
    pivot = lo + plateau.to(tl.int32)
    chosen = key >= pivot
    ones = chosen.to(tl.int32)
    reached = tl.sum(ones, 0)
    groups_ptr += row * GROUPS
    candidates_ptr += row * ROOM
    tl.store(groups_ptr + tl.cumsum(ones, 0) - 1, tl.arange(0, CHUNK // GROUP), mask=chosen)
    tl.debug_barrier()
    here = tl.arange(0, GROUPS)
    group = tl.load(groups_ptr + here, mask=here < reached, other=0)
    inner = group[:, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    there = (here < reached)[:, None, None]
    found = 0
    for chunk in range(begin, end, SPAN):
        outer = chunk + tl.arange(0, SPAN)
        present = tl.broadcast_to(there & (outer < end)[None, :, None], (GROUPS, SPAN, GROUP))
        cols = tl.reshape(outer[None, :, None] * CHUNK + inner, (AGAIN,))
        s = load_scores(scores, cols, tl.reshape(present, (AGAIN,)), ranged, LARGEST)
        above = (to_key(s) >> SHIFT) >= pivot
        slot = found + tl.cumsum(above.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + slot, pack(s, cols), mask=above & (slot < ROOM))
        found += tl.sum(above.to(tl.int32), 0)
    if plateau & (found < k):
        found = collect(scores, candidates_ptr, k, found, lo, k - found, False, ranged, LARGEST, SHIFT, AGAIN)
    if found > ROOM:
        # one group holds many of the best
        threshold, room = exact_threshold(scores, k, ranged, LARGEST, SHIFT, AGAIN)
        tl.debug_barrier()
        found = collect(scores, candidates_ptr, k, 0, threshold, room, True, ranged, LARGEST, SHIFT, AGAIN)
    tl.debug_barrier()
    here = tl.arange(0, ROOM)
    best = tl.sort(ordered(tl.load(candidates_ptr + here, mask=here < found, other=EMPTY)), descending=True)
    index = tl.where(here < k, to_column(best), -1).to(tl.int32)
    nan = tl.max((best >> 32).to(tl.int32), 0) > INFINITY
    if not SORTED:
        index = by_column(index)
    wanted = here < k
    at = row * k + here
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, s_row, row * n_cols, LARGEST)
