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
    NOTHING,
    Row,
    bounds,
    from_boundary,
    load_scores,
    ordered,
    pack,
    threshold_of,
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
    # until they are packed, columns count from a boundary of GROUP scores
    seen = scores
    off_boundary: tl.constexpr = UNIT < GROUP and mask_ptr is None
    if off_boundary:
        boundary, off = from_boundary(s_row, GROUP)
        seen = Row(s_ptr, mask_ptr, boundary, scores.mask_at, first + off, last + off, n_cols + off)
    begin = seen.first // CHUNK
    end = (seen.last + CHUNK - 1) // CHUNK
    top = tl.full((CHUNK // GROUP,), -float("inf"), tl.float32)
    for chunk in range(begin, end):
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        s = load_scores(seen, cols, True, ranged or off_boundary, LARGEST)
        top = larger(top, tl.reduce(tl.reshape(s, (CHUNK // GROUP, GROUP)), 1, larger))
    key = to_key(top) >> SHIFT
    # a bound that k to GROUPS maxima reach, or all that are a score, where these are fewer
    lo, _, reached = threshold_of(key[None, :], k, k + k // 4, nothing, SHIFT)
    lo, reached = tl.maximum(tl.sum(lo, 0), nothing + 1), tl.sum(reached, 0)
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
        s = load_scores(seen, cols, tl.reshape(present, (AGAIN,)), ranged or off_boundary, LARGEST)
        # the scores of a group as bits: a scan of their counts is shorter than one of the scores
        above = tl.reshape((to_key(s) >> SHIFT) >= pivot, (AGAIN // GROUP, GROUP))
        counts = tl.sum(above.to(tl.int32), 1)
        bits = tl.sum(tl.where(above, (1 << tl.arange(0, GROUP))[None, :], 0), 1)
        slot = found + tl.cumsum(counts, 0) - counts
        begins = tl.reshape(outer[None, :] * CHUNK + group[:, None] * GROUP, (AGAIN // GROUP,))
        for i in tl.static_range(GROUP):
            here_above = (bits >> i) & 1
            # a register can't be chosen by an index; the score comes from the cache
            s = tl.load(s_ptr + (seen.s_at + begins) + i, mask=here_above > 0, other=0).to(tl.float32)
            s = s if LARGEST else -s
            col = begins + i - (seen.n_cols - n_cols)
            tl.store(candidates_ptr + slot, pack(s, col), mask=(here_above > 0) & (slot < ROOM))
            slot += here_above
        found += tl.sum(counts, 0)
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
