"""The selection from long and wide rows.

Long rows: a pivot from a sample, one pass that keeps what lies above it, a choice among that. The result is exact
whatever the sample says. Where it misleads, `choose_kernel` reads the row again, in its launch. Several programs write
their candidates in the order in which they reserve room, which differs from run to run. The set of candidates is always
the same, and so is the choice among them.

A few scores of wide rows (`wide_kernel`): take the maximum of each group of a row. The k best scores are in the k
groups with the largest maxima, and none is below the k-th of these maxima. So one read of the row, one comparison a
score, gives a bound that few scores reach, and the groups that hold them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_sort import (
    COUNTERS,
    EMPTY,
    INFINITY,
    NOTHING,
    SIZES,
    Results,
    Row,
    bounds,
    by_column,
    deliver,
    from_boundary,
    key_of,
    load_keys,
    load_scores,
    ordered,
    pack,
    threshold_of,
    to_column,
    to_key,
    to_score,
)


@triton.jit(do_not_specialize=SIZES)
def pivot_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    pivot_ptr,  # (n_rows,) fp32: a score with probably more than k above it, -inf .. inf
    state_ptr,  # (n_rows, COUNTERS) int32: set to their first values
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_cols,
    k,
    capacity,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    SHIFT: tl.constexpr,
    DISORDERED: tl.constexpr,
    SIGMAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Find the score whose rank in the sample lies SIGMAS beyond that of the k-th."""
    n_cols = n_cols * UNIT
    row = tl.program_id(0).to(tl.int64)
    nothing: tl.constexpr = NOTHING >> SHIFT
    first, last = bounds(start_ptr, lengths_ptr, row * start_stride, row * lengths_stride, n_cols)
    scores = Row(s_ptr, mask_ptr, row * s_row_stride * UNIT, row * mask_row_stride, first, last, n_cols)
    group = tl.arange(0, GROUPS).to(tl.int64)
    first_group = first // GROUP
    n_groups = (last + GROUP - 1) // GROUP - first_group
    whole = n_groups <= GROUPS
    # sample one group of each of GROUPS equal parts of the row, at a scattered place: no period of the data meets it
    part = tl.maximum(n_groups // GROUPS, 1)
    scattered = ((group * 2654435769) & 0xFFFFFFFF) * part >> 32
    sampled_group = first_group + tl.where(whole, group, group * n_groups // GROUPS + scattered)
    cols = (sampled_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]).to(tl.int32)
    present = (group < n_groups)[:, None]
    key = tl.reshape(load_keys(scores, cols, present, True, LARGEST, SHIFT), (GROUPS * GROUP,))
    sampled = tl.sum(tl.sum((present & (cols >= first) & (cols < last)).to(tl.int32), 1), 0)
    ratio = sampled.to(tl.float32) / tl.maximum(last - first, 1).to(tl.float32)
    rank = k * ratio
    room = capacity * ratio
    wanted = tl.where(whole, k + 1, (rank + SIGMAS * tl.sqrt(rank) + SIGMAS + 0.999).to(tl.int32))
    most = tl.where(whole, capacity, (room - SIGMAS * tl.sqrt(room)).to(tl.int32))
    lo, _, n_lo = threshold_of(key[None, :], wanted, most, nothing, SHIFT)
    lo, n_lo = tl.sum(lo, 0), tl.sum(n_lo, 0)
    # pass the keys ≥ lo if these are few enough, else those > lo: then many scores are equal to lo. No score has the
    # key -1, because -0 counts as 0
    fits = (n_lo <= most) & (lo > nothing)
    key_of_pivot = tl.minimum(tl.where(fits, lo - 1 - (lo == 0).to(tl.int32), lo), INFINITY >> SHIFT)
    tl.store(pivot_ptr + row, to_score(key_of_pivot, SHIFT))
    state = state_ptr + row * COUNTERS
    tl.store(state, 0)
    tl.store(state + 1, 0)
    tl.store(state + 2, DISORDERED)


@triton.jit
def write_above(
    row, out_ptr, at, capacity, begin, off, left, counts, totals, LARGEST: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the chosen scores of a tile, in the order of columns.

    A tile is PARTS loads of VECTOR scores by each of LANES lanes, and begins at `begin`, where the row begins at `off`.
    A bit of `left` is a score of a lane. `counts` (of a lane) and `totals` have a field for each part. A lane goes
    from bit to bit and loads the score again, from the cache: an index can't choose a register.
    """
    FIELD: tl.constexpr = 16 if PARTS == 1 else 32 // PARTS
    lane = tl.arange(0, LANES)
    before = tl.cumsum(counts, 0) - counts
    # a field for each part: the place of the lane's next score in this tile
    places = tl.zeros((LANES,), tl.int64)
    n_before = totals * 0
    for i in tl.static_range(PARTS):
        in_part = n_before + ((before >> (FIELD * i)) & ((1 << FIELD) - 1))
        places |= in_part.to(tl.int64) << (16 * i)
        n_before += (totals >> (FIELD * i)) & ((1 << FIELD) - 1)
    while tl.max(left, 0) > 0:
        # the exponent of a power of two
        bit = ((left & -left).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        part = bit // VECTOR
        col = begin + (part * LANES + lane) * VECTOR + bit % VECTOR
        slot = at + ((places >> (16 * part)) & 0xFFFF).to(tl.int32)
        s = tl.load(row.s_ptr + (row.s_at + col), mask=left > 0, other=0).to(tl.float32)
        if not LARGEST:
            s = -s
        tl.store(out_ptr + slot, pack(s, col - off), mask=(left > 0) & (slot < capacity))
        places += tl.full((LANES,), 1, tl.int64) << (16 * part)
        left &= left - 1


@triton.jit(do_not_specialize=SIZES)
def pass_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    pivot_ptr,  # (n_rows,) fp32
    state_ptr,  # (n_rows, COUNTERS) int32: how many scores are above the pivot, also beyond the room for them
    out_ptr,  # (n_rows, capacity) int64: these, packed
    s_row_stride,  # in UNITs, like n_cols
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_cols,
    k,
    capacity,
    tiles,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Collect the scores above the pivot from `tiles` tiles of a row; ALONE: one program per row, in order."""
    n_cols = n_cols * UNIT
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    off_boundary: tl.constexpr = UNIT < VECTOR and mask_ptr is None
    first, last = bounds(start_ptr, lengths_ptr, row * start_stride, row * lengths_stride, n_cols)
    scores = Row(s_ptr, mask_ptr, row * s_row_stride * UNIT, row * mask_row_stride, first, last, n_cols)
    if off_boundary:
        boundary, off = from_boundary(scores.s_at, VECTOR)
        scores = Row(s_ptr, mask_ptr, boundary, scores.mask_at, first + off, last + off, n_cols + off)
    pivot = tl.load(pivot_ptr + row)
    counter = state_ptr + row * COUNTERS
    n_found = 0
    out_ptr += row * capacity
    LANES: tl.constexpr = BLOCK // (PARTS * VECTOR)
    FIELD: tl.constexpr = 16 if PARTS == 1 else 32 // PARTS
    part, place = tl.arange(0, PARTS)[:, None, None], tl.arange(0, VECTOR)[None, None, :]
    first, last = scores.first, scores.last
    begin = tl.maximum(split * tiles, first // BLOCK)
    end = (last + BLOCK - 1) // BLOCK
    if split + 1 < tl.num_programs(1):
        end = tl.minimum((split + 1) * tiles, end)
    for tile in tl.range(begin, end, num_stages=STAGES):
        cols = tile * BLOCK + tl.arange(0, BLOCK)
        s = load_scores(scores, cols, True, False, LARGEST)
        if ranged or off_boundary:
            # few tiles contain an end of the range
            if (tile * BLOCK < first) | ((tile + 1) * BLOCK > last):
                s = tl.where((cols >= first) & (cols < last), s, -float("inf"))
        # NaN is above every pivot
        above = tl.reshape((s <= pivot) == 0, (PARTS, LANES, VECTOR))
        counts = tl.sum(tl.sum(tl.where(above, 1 << (part * FIELD), 0), 2), 0)
        totals = tl.sum(counts, 0)
        if totals != 0:
            n_above = totals & 0
            for i in tl.static_range(PARTS):
                n_above += (totals >> (FIELD * i)) & ((1 << FIELD) - 1)
            at = n_found
            if not ALONE:
                at = tl.atomic_add(counter, n_above, sem="relaxed")
            left = tl.sum(tl.sum(tl.where(above, 1 << (part * VECTOR + place), 0), 2), 0)
            write_above(
                scores, out_ptr, at, capacity, tile * BLOCK, scores.n_cols - n_cols, left, counts, totals, LARGEST,
                LANES, VECTOR, PARTS,
            )  # fmt: skip
            n_found += n_above
    if ALONE:
        tl.store(counter, n_found)


@triton.jit
def exact_threshold(row, k, RANGED: tl.constexpr, LARGEST: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the key of the k-th largest score of a range of at least k, and how many of its equals are wanted.

    A radix select: it counts the values of one byte after another, among the keys whose higher bytes are the k-th's.
    """
    digit = tl.arange(0, 256)
    n_bytes: tl.constexpr = (39 - SHIFT) // 8
    prefix = 0
    wanted = k
    for i in tl.static_range(n_bytes):
        counts = tl.zeros((256,), tl.int32)
        for tile in range(row.first // TILE, (row.last + TILE - 1) // TILE):
            cols = tile * TILE + tl.arange(0, TILE)
            key = load_keys(row, cols, True, RANGED, LARGEST, SHIFT) >> (8 * (n_bytes - 1 - i))
            counted = (cols >= row.first) & (cols < row.last)
            if i == 0:
                value = key + 128
            else:
                counted = counted & ((key >> 8) == prefix)
                value = key & 255
            counts += tl.histogram(value, 256, mask=counted)
        from_top = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        byte = tl.sum((from_top >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(digit > byte, counts, 0), 0)
        if i == 0:
            prefix = byte - 128
        else:
            prefix = prefix * 256 + byte
    return prefix, wanted


@triton.jit
def collect(
    row, out_ptr, k, n_before, threshold, room, ABOVE: tl.constexpr, RANGED: tl.constexpr, LARGEST: tl.constexpr,
    SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the keys above the threshold and the first `room` equal to it behind `n_before` others; return the total.

    Without ABOVE, write only the equal ones. Keys are in the order of columns; the search ends at k of them.
    """
    n_above = n_before
    n_level = 0
    tile = row.first // TILE
    end = (row.last + TILE - 1) // TILE
    while (tile < end) & (n_above + tl.minimum(n_level, room) < k):
        cols = tile * TILE + tl.arange(0, TILE)
        s = load_scores(row, cols, True, RANGED, LARGEST)
        key = to_key(s) >> SHIFT
        level = key == threshold
        flags = level.to(tl.int32)
        if ABOVE:
            above = key > threshold
            flags += above.to(tl.int32) << 16
        total = tl.sum(flags, 0)
        if total > 0:
            ranks = tl.cumsum(flags, 0)
            level_rank = n_level + (ranks & 0xFFFF)
            chosen = level & (level_rank <= room)
            if ABOVE:
                chosen = chosen | above
            slot = n_above + (ranks >> 16) + tl.minimum(level_rank, room) - 1
            tl.store(out_ptr + slot, pack(s, cols), mask=chosen)
        n_above += total >> 16
        n_level += total & 0xFFFF
        tile += 1
    return n_above + tl.minimum(n_level, room)


@triton.jit
def choose(candidates_ptr, out_ptr, n_found, k, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Write the k best candidates in the order they have, or all if there are fewer."""
    nothing: tl.constexpr = NOTHING >> SHIFT
    packed = tl.load(candidates_ptr + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < n_found, other=EMPTY)
    # an empty place has the key of -inf, which no candidate has
    key = key_of(packed) >> SHIFT
    lo, _, n_lo = threshold_of(key[None, :], k, k, nothing, SHIFT)
    lo, n_lo = tl.sum(lo, 0), tl.sum(n_lo, 0)
    chosen = (key >= lo) & (key > nothing)
    if n_lo > k:
        # of the scores equal to the k-th take the first columns, up to `last`: search it between two bounds
        above, level = key > lo, key == lo
        room = k - tl.sum(above.to(tl.int32), 0)
        column = to_column(packed).to(tl.int32)
        before, n_before = room * 0 - 1, room * 0
        last, n_last = tl.max(tl.where(level, column, -1), 0), n_lo - k + room
        bisect = room < 0
        while n_last > room:
            # guess on the line through both ends, and halfway, in turns
            share = (room - n_before).to(tl.float32) / (n_last - n_before).to(tl.float32)
            share = tl.where(bisect, 0.5, share)
            middle = before + tl.maximum(((last - before).to(tl.float32) * share).to(tl.int32), 1)
            count = tl.sum((level & (column <= middle)).to(tl.int32), 0)
            enough = count >= room
            before, n_before = tl.where(enough, before, middle), tl.where(enough, n_before, count)
            last, n_last = tl.where(enough, middle, last), tl.where(enough, count, n_last)
            bisect = ~bisect
        chosen = above | (level & (column <= last))
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(out_ptr + slot, packed, mask=chosen)


@triton.jit(do_not_specialize=SIZES)
def choose_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    start_ptr,  # (n_rows,) int32 or int64, or None
    lengths_ptr,  # (n_rows,) int32 or int64, or None
    pivot_ptr,  # (n_rows,) fp32
    state_ptr,  # (n_rows, COUNTERS) int32; afterwards the first counts what `out` holds, at least k
    candidates_ptr,  # (n_rows, capacity) int64: packed scores above the pivot
    out_ptr,  # CHOOSE: (n_rows, k) int64: packed survivors, then empty places; else the candidates themselves
    s_row_stride,  # in UNITs, like n_cols
    mask_row_stride,
    start_stride,
    lengths_stride,
    n_cols,
    k,
    capacity,
    out_row_stride,
    UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
    SHIFT: tl.constexpr,
    CHOOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Choose the k best candidates of a row; read the row again if there are too few or too many.

    Without CHOOSE, enough candidates stay as they are: the sort that follows takes the k best.
    """
    n_cols = n_cols * UNIT
    row = tl.program_id(0).to(tl.int64)
    nothing: tl.constexpr = NOTHING >> SHIFT
    ranged: tl.constexpr = start_ptr is not None or lengths_ptr is not None
    out_ptr += row * out_row_stride
    state = state_ptr + row * COUNTERS
    pivot_key = to_key(tl.load(pivot_ptr + row)) >> SHIFT
    n_found = tl.load(state)
    few = n_found < k
    many = n_found > capacity
    if CHOOSE:
        if many == 0:
            candidates_ptr += row * capacity
            # most rows have far fewer candidates than there is room for
            if n_found <= BLOCK // 2:
                choose(candidates_ptr, out_ptr, n_found, k, SHIFT, BLOCK // 2)
            else:
                choose(candidates_ptr, out_ptr, n_found, k, SHIFT, BLOCK)
    if few | many:
        first, last = bounds(start_ptr, lengths_ptr, row * start_stride, row * lengths_stride, n_cols)
        scores = Row(s_ptr, mask_ptr, row * s_row_stride * UNIT, row * mask_row_stride, first, last, n_cols)
        n_kept = tl.minimum(n_found, k)
        exact = many
        disordered = tl.load(state + 2)
        if few & (pivot_key > nothing):
            # all candidates, then the first scores equal to the pivot
            n_kept = collect(scores, out_ptr, k, n_found, pivot_key, k - n_found, False, ranged, LARGEST, SHIFT, TILE)
            exact = n_kept < k
            disordered = 1
        if exact:
            threshold, room = exact_threshold(scores, k, ranged, LARGEST, SHIFT, TILE)
            # -inf is never chosen
            room = tl.where(threshold <= nothing, 0, room)
            # other threads of this program may still be writing candidates to the same places
            tl.debug_barrier()
            n_kept = collect(scores, out_ptr, k, 0, threshold, room, True, ranged, LARGEST, SHIFT, TILE)
            disordered = 0
        for begin in range(0, tl.where(n_kept < k, k, 0), TILE):
            place = begin + tl.arange(0, TILE)
            empty = tl.full((TILE,), EMPTY, tl.int64)
            tl.store(out_ptr + place, empty, mask=(place >= n_kept) & (place < k))
        tl.store(state, k)
        tl.store(state + 2, disordered)


@triton.jit
def larger(a, b):
    """Return the larger score; NaN counts as the largest."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=SIZES)
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
    gate_ptr,  # (n_rows, k) like s
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
    # columns count from a boundary of GROUP scores until they are packed
    shifted = scores
    off_boundary: tl.constexpr = UNIT < GROUP and mask_ptr is None
    if off_boundary:
        boundary, off = from_boundary(s_row, GROUP)
        shifted = Row(s_ptr, mask_ptr, boundary, scores.mask_at, first + off, last + off, n_cols + off)
    begin = shifted.first // CHUNK
    end = (shifted.last + CHUNK - 1) // CHUNK
    top = tl.full((CHUNK // GROUP,), -float("inf"), tl.float32)
    for chunk in range(begin, end):
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        s = load_scores(shifted, cols, True, ranged or off_boundary, LARGEST)
        top = larger(top, tl.reduce(tl.reshape(s, (CHUNK // GROUP, GROUP)), 1, larger))
    key = to_key(top) >> SHIFT
    # a bound that k to GROUPS maxima reach, or all that are a score, where these are fewer
    lo, _, n_reached = threshold_of(key[None, :], k, k + k // 4, nothing, SHIFT)
    lo, n_reached = tl.maximum(tl.sum(lo, 0), nothing + 1), tl.sum(n_reached, 0)
    # too many groups tie at the bound: skip them; `collect` appends the first scores equal to it
    plateau = n_reached > GROUPS
    pivot = lo + plateau.to(tl.int32)
    chosen = key >= pivot
    flags = chosen.to(tl.int32)
    n_reached = tl.sum(flags, 0)
    groups_ptr += row * GROUPS
    candidates_ptr += row * ROOM
    tl.store(groups_ptr + tl.cumsum(flags, 0) - 1, tl.arange(0, CHUNK // GROUP), mask=chosen)
    tl.debug_barrier()
    place = tl.arange(0, GROUPS)
    group = tl.load(groups_ptr + place, mask=place < n_reached, other=0)
    inner = group[:, None, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    in_list = (place < n_reached)[:, None, None]
    n_found = 0
    for chunk in range(begin, end, SPAN):
        outer = chunk + tl.arange(0, SPAN)
        present = tl.broadcast_to(in_list & (outer < end)[None, :, None], (GROUPS, SPAN, GROUP))
        cols = tl.reshape(outer[None, :, None] * CHUNK + inner, (AGAIN,))
        s = load_scores(shifted, cols, tl.reshape(present, (AGAIN,)), ranged or off_boundary, LARGEST)
        # the scores of a group as bits: a scan of their counts is shorter than one of the scores
        above = tl.reshape((to_key(s) >> SHIFT) >= pivot, (AGAIN // GROUP, GROUP))
        counts = tl.sum(above.to(tl.int32), 1)
        bits = tl.sum(tl.where(above, (1 << tl.arange(0, GROUP))[None, :], 0), 1)
        slot = n_found + tl.cumsum(counts, 0) - counts
        group_begin = tl.reshape(outer[None, :] * CHUNK + group[:, None] * GROUP, (AGAIN // GROUP,))
        for i in tl.static_range(GROUP):
            is_above = (bits >> i) & 1
            # a register can't be chosen by an index; the score comes from the cache
            s = tl.load(s_ptr + (shifted.s_at + group_begin) + i, mask=is_above > 0, other=0).to(tl.float32)
            s = s if LARGEST else -s
            col = group_begin + i - (shifted.n_cols - n_cols)
            tl.store(candidates_ptr + slot, pack(s, col), mask=(is_above > 0) & (slot < ROOM))
            slot += is_above
        n_found += tl.sum(counts, 0)
    if plateau & (n_found < k):
        n_found = collect(scores, candidates_ptr, k, n_found, lo, k - n_found, False, ranged, LARGEST, SHIFT, AGAIN)
    if n_found > ROOM:
        # one group holds many of the best
        threshold, room = exact_threshold(scores, k, ranged, LARGEST, SHIFT, AGAIN)
        tl.debug_barrier()
        n_found = collect(scores, candidates_ptr, k, 0, threshold, room, True, ranged, LARGEST, SHIFT, AGAIN)
    tl.debug_barrier()
    place = tl.arange(0, ROOM)
    best = tl.sort(ordered(tl.load(candidates_ptr + place, mask=place < n_found, other=EMPTY)), descending=True)
    index = tl.where(place < k, to_column(best), -1).to(tl.int32)
    nan = tl.max((best >> 32).to(tl.int32), 0) > INFINITY
    if not SORTED:
        index = by_column(index)
    wanted = place < k
    at = row * k + place
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, s_row, row * n_cols, LARGEST)
