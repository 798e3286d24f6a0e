"""What the kernels of the selection share; the order of the survivors, and their scores and gates.

A score becomes an int32 key in the same order (NaN above +inf, -0 equal to 0), so a threshold is an integer and ties
are exact. A survivor travels as its score's bits (high half) and its column, counted from the end (low half): two moves
make it, and `ordered` makes of it an integer that sorts by score, then by lowest column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# key of -inf: only larger keys are chosen
NOTHING = tl.constexpr(-2139095041)
INFINITY = tl.constexpr(2139095040)
LARGEST_KEY = tl.constexpr(2147483647)
# key of every NaN, whatever its sign and payload: above +inf even in the leading bits that 16-bit dtypes keep
NAN = tl.constexpr(2143289344)
# an empty place among survivors: the bits of -inf, and a low half that no column has
EMPTY = tl.constexpr(-36028797018963968)
LOW = tl.constexpr(4294967295)
# an empty place among 16-bit survivors: below all keys, and a low half that no column has
EMPTY_HALF = tl.constexpr(-2147483648)
# counters of a row in `state`: candidates or survivors, whether one is NaN, whether their order is not that of columns
COUNTERS = tl.constexpr(3)
# arguments that kernels do not specialise on
SIZES = (
    "s_row_stride", "mask_row_stride", "start_stride", "lengths_stride", "n_rows", "n_cols", "k", "capacity",
    "packed_row_stride", "out_row_stride", "tiles", "run", "steps", "g_row_stride", "g_col_stride",
)  # fmt: skip


@triton.jit
def to_key(s):
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    return tl.where(s != s, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def to_score(key, SHIFT: tl.constexpr):
    """Return the score of a key without its SHIFT low bits, which are 0 in positive keys and 1 in negative ones."""
    full = tl.where(key < 0, (key << SHIFT) | ((1 << SHIFT) - 1), key << SHIFT)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


class Row(NamedTuple):
    """A row of scores, or rows (R, 1), as functions of the kernels take it."""

    s_ptr: Any
    mask_ptr: Any  # or None
    s_at: Any  # offset of the row's first score
    mask_at: Any
    first: Any  # first column of the row's range, and the one after its last
    last: Any
    n_cols: Any


@triton.jit
def from_boundary(at, VECTOR: tl.constexpr):
    """Return the last multiple of VECTOR up to a row's first score, and how many scores lie between.

    Read from there on, VECTOR neighbours are in one thread wherever the row begins; else VECTOR threads hold them.
    """
    return at // VECTOR * VECTOR, (at % VECTOR).to(tl.int32)


@triton.jit
def bounds(start_ptr, lengths_ptr, start_at, lengths_at, n_cols):
    """Return the first column of a row's range and the one after its last, both within the row."""
    n = n_cols.to(tl.int64)
    first = n - n
    last = n
    if start_ptr is not None:
        first = tl.load(start_ptr + start_at).to(tl.int64)
    if lengths_ptr is not None:
        # the sum leaves int64 only for a start beyond every row, where the range is empty anyway
        last = first + tl.minimum(tl.maximum(tl.load(lengths_ptr + lengths_at).to(tl.int64), 0), 1 << 62)
    first = tl.maximum(tl.minimum(first, n), 0)
    return first.to(tl.int32), tl.maximum(tl.minimum(last, n), first).to(tl.int32)


@triton.jit
def load_scores(row, cols, present, RANGED: tl.constexpr, LARGEST: tl.constexpr):
    """Return scores in fp32, negated for the smallest, -inf where masked or outside of the row's range, if it has one.

    The loads depend on n_cols alone: a range that begins anywhere would make them 4 bytes wide.
    """
    inside = present & (cols < row.n_cols)
    other: tl.constexpr = -float("inf") if LARGEST else float("inf")
    s = tl.load(row.s_ptr + (row.s_at + cols), mask=inside, other=other).to(tl.float32)
    if not LARGEST:
        s = -s
    if row.mask_ptr is not None:
        s = tl.where(tl.load(row.mask_ptr + (row.mask_at + cols), mask=inside, other=0) != 0, s, -float("inf"))
    if RANGED:
        s = tl.where((cols >= row.first) & (cols < row.last), s, -float("inf"))
    return s


@triton.jit
def load_keys(row, cols, present, RANGED: tl.constexpr, LARGEST: tl.constexpr, SHIFT: tl.constexpr):
    """Return the keys of scores, without the SHIFT low bits that all share."""
    return to_key(load_scores(row, cols, present, RANGED, LARGEST)) >> SHIFT


@triton.jit
def about_log2(x):
    """Return log2(x) + 127 of positive numbers within 0.01: enough for a guess, at a third of a logarithm's cost."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return bits.to(tl.float32) * 1.1920928955078125e-07 + 0.344 * fraction * (1.0 - fraction)


@triton.jit
def threshold_of(key, k, most, nothing, SHIFT: tl.constexpr):
    """Return a key that k to `most` keys of each row reach, how many keys are a score, and how many reach it.

    If many keys are equal it is the k-th largest, which more than `most` reach; with fewer than k keys, `nothing`.
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
    target = 0.5 * (k + most) + tl.zeros_like(total)
    aim = about_log2(target + 0.5) - about_log2(tl.maximum(total - target, 0.5))
    at_lo = about_log2(total) - 126.0 - aim
    at_hi = 126.0 - about_log2(total) - aim
    side = tl.zeros_like(valid)
    n_lo = valid
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
        n_above = count.to(tl.float32)
        at_middle = about_log2(n_above + 0.5) - about_log2(tl.maximum(total - n_above, 0.5)) - aim
        above = count < k
        # an end that stays twice counts half
        at_lo = tl.where(above, tl.where(side == -1, 0.5 * at_lo, at_lo), at_middle)
        at_hi = tl.where(above, at_middle, tl.where(side == 1, 0.5 * at_hi, at_hi))
        side = tl.where(above, -1, 1)
        # k to `most`: this row is solved, so set hi = lo + 1
        hi = tl.where(above, middle, tl.where(count <= most, middle + 1, hi))
        lo = tl.where(above, lo, middle)
        n_lo = tl.where(above, n_lo, count)
        i += 1
    return lo, valid, n_lo


@triton.jit
def pack(s, cols):
    """Return survivors: the bits of a score, and its column counted from the end."""
    return (s.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)


@triton.jit
def pack_half(s, cols, DTYPE: tl.constexpr):
    """Return 16-bit scores, held as fp32, and columns up to 65534 as int32 that sort by score, then lowest column."""
    bits = tl.where(s == 0.0, 0.0, s).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
    key = tl.where(s != s, 0x7FFF, bits ^ ((bits >> 31) & 0x7FFF))
    return (key << 16) | (0xFFFF - cols)


@triton.jit
def unpack_half(number, DTYPE: tl.constexpr):
    """Return scores in fp32, and columns; -1 for an empty place, whose score is NaN."""
    key = number >> 16
    score = (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    low = number & 0xFFFF
    return score, tl.where(low == 0, -1, 0xFFFF - low)


@triton.jit
def key_of(packed):
    return to_key((packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def ordered(packed):
    """Return packed survivors as integers that sort by score, then by lowest column; empty places come last."""
    return (key_of(packed).to(tl.int64) << 32) | (packed & LOW)


@triton.jit
def to_column(packed):
    """Return the column of a survivor, packed or ordered; -1 for an empty place."""
    low = packed & LOW
    return tl.where(low == 0, -1, 0x7FFFFFFF - low)


@triton.jit
def is_nan(packed):
    return ((packed >> 32).to(tl.int32) & 0x7FFFFFFF) > INFINITY


class Results(NamedTuple):
    """Where a kernel takes values and gates from, and where its results go."""

    s_ptr: Any  # scores
    y_ptr: Any  # soft gates like s; None: the gates are 1
    index_ptr: Any  # int32 or int64: columns, then -1
    value_ptr: Any  # like s
    gate_ptr: Any  # like s


@triton.jit
def deliver(to, index, at, wanted, nan, s_row, y_row, LARGEST: tl.constexpr, score=None):
    """Store columns, their scores and gates; -inf (of the smallest: inf) and 0 where the column is -1.

    Without `score` (of the smallest: negated) scores are loaded; so are 0 and NaN, which have several bit patterns.
    """
    tl.store(to.index_ptr + at, index.to(to.index_ptr.dtype.element_ty), mask=wanted)
    present = wanted & (index >= 0)
    missing: tl.constexpr = -float("inf") if LARGEST else float("inf")
    if score is None:
        value = tl.load(to.s_ptr + s_row + index, mask=present, other=missing)
    else:
        value = tl.where(index >= 0, score if LARGEST else -score, missing).to(to.value_ptr.dtype.element_ty)
        reload = present & ((score == 0.0) | (score != score))
        value = tl.where(reload, tl.load(to.s_ptr + s_row + index, mask=reload, other=missing), value)
    tl.store(to.value_ptr + at, value, mask=wanted)
    if to.y_ptr is None:
        # the gates of a row with a NaN are NaN
        gate = tl.where(present, tl.where(nan, float("nan"), 1.0), 0.0)
    else:
        gate = tl.load(to.y_ptr + y_row + index, mask=present, other=0.0)
    tl.store(to.gate_ptr + at, gate.to(to.gate_ptr.dtype.element_ty), mask=wanted)


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def exchange(number, rank, BIT: tl.constexpr, HELD: tl.constexpr, LOG: tl.constexpr, DIMS: tl.constexpr):
    """Put the larger of two numbers whose ranks differ in one bit before the other."""
    axis: tl.constexpr = DIMS - 1 - (BIT + LOG - HELD if BIT < HELD else BIT - HELD)
    other = number ^ tl.xor_sum(number, axis, keep_dims=True)
    return tl.where((number < other) != (((rank >> BIT) & 1) == 1), other, number)


@triton.jit
def best_first(number, WARPS: tl.constexpr):
    """Return rows (R, n) of integers, largest first.

    A bitonic network exchanges the low bits of the rank most often. Here these number a thread's own registers, the
    next ones a warp's threads. `tl.sort` begins with the threads, then the warps.
    """
    log: tl.constexpr = log2(number.shape[1])
    dims: tl.constexpr = log2(number.shape[0] * number.shape[1])
    held: tl.constexpr = log - log2(32 * WARPS)
    if held < 0:
        x = tl.sort(number, 1, descending=True)
    else:
        # numbers that lie side by side are in neighbouring threads
        place = tl.arange(0, number.shape[0] * number.shape[1]) & (number.shape[1] - 1)
        rank = tl.reshape((place >> (log - held)) | ((place << held) & (number.shape[1] - 1)), [2] * dims)
        x = tl.reshape(number, [2] * dims)
        for merge in tl.static_range(1, log + 1):
            # every other run is sorted in ascending order: with its bits inverted there, all exchanges are alike
            x ^= -((rank >> merge) & 1).to(x.dtype)
            for i in tl.static_range(merge):
                x = exchange(x, rank, merge - 1 - i, held, log, dims)
            x ^= -((rank >> merge) & 1).to(x.dtype)
        x = tl.permute(tl.reshape(x, (number.shape[0], 1 << held, 32 * WARPS)), (0, 2, 1))
        x = tl.reshape(x, number.shape)
    return x


@triton.jit
def by_column(index):
    """Return columns (…, k) in ascending order, those that are -1 last."""
    index = tl.sort(tl.where(index < 0, 0x7FFFFFFF, index))
    return tl.where(index == 0x7FFFFFFF, -1, index)


@triton.jit(do_not_specialize=SIZES)
def sort_kernel(
    packed_ptr,  # (n_rows, k) packed survivors: int64, or int32 in the order of columns, which are sorted
    state_ptr,  # (n_rows, COUNTERS) int32: the third says that survivors are not in the order of columns; or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    s_ptr,  # (n_rows, n_cols) scores
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) scores of the survivors, like s
    gate_ptr,  # (n_rows, k) gates of the survivors, like s
    s_row_stride,
    n_rows,
    n_cols,
    k,
    SORTED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Order whole rows of survivors, best score first, or by column."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    wanted = (rows < n_rows) & (cols < k)
    at = rows * k + cols
    if packed_ptr.dtype.element_ty == tl.int32:
        number = best_first(tl.load(packed_ptr + at, mask=wanted, other=EMPTY_HALF), WARPS)
        score, index = unpack_half(number, s_ptr.dtype.element_ty)
        nan = tl.max(((score != score) & (index >= 0)).to(tl.int32), 1, keep_dims=True) > 0
    else:
        packed = tl.load(packed_ptr + at, mask=wanted, other=EMPTY)
        nan = tl.max(is_nan(packed).to(tl.int32), 1, keep_dims=True) > 0
        if SORTED:
            number = best_first(ordered(packed), WARPS)
            score, index = to_score((number >> 32).to(tl.int32), 0), to_column(number)
        else:
            low = (packed & LOW).to(tl.int32)
            disordered = tl.load(state_ptr + rows * COUNTERS + 2, mask=rows < n_rows, other=0)
            score = tl.where(disordered > 0, float("nan"), (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            if tl.max(tl.max(disordered, 1), 0) > 0:
                low = best_first(low, WARPS)
            index = to_column(low.to(tl.int64))
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST, score)


@triton.jit(do_not_specialize=SIZES)
def run_kernel(
    packed_ptr,  # (n_rows, packed_row_stride) int64 survivors: packed, or in order of their scores
    state_ptr,  # (n_rows, COUNTERS) int32: how many of them; whether one is NaN is written here
    out_ptr,  # (n_rows, out_row_stride) int64: every BLOCK of a row in descending order
    packed_row_stride,
    out_row_stride,
    k,
    BY_SCORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort runs of packed survivors by score, or of k sorted ones by column."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    count = k
    if BY_SCORE:
        count = tl.load(state_ptr + row * COUNTERS)
    if begin < count:
        place = begin + tl.arange(0, BLOCK)
        packed = tl.load(packed_ptr + row * packed_row_stride + place, mask=place < count, other=EMPTY)
        if BY_SCORE:
            if tl.max(is_nan(packed).to(tl.int32), 0) > 0:
                tl.store(state_ptr + row * COUNTERS + 1, 1)
            packed = ordered(packed)
        else:
            packed = packed & LOW
        tl.store(out_ptr + row * out_row_stride + place, tl.sort(packed, 0, descending=True), mask=place < count)


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
    packed_ptr,  # (n_rows, packed_row_stride) int64 survivors in sorted runs
    state_ptr,  # (n_rows, COUNTERS) int32: how many of them, whether one is NaN
    out_ptr,  # like packed: runs WAYS times as long; None in the last round with FETCH
    index_ptr,  # this and the next four as for sort_kernel, in the last round with FETCH
    s_ptr,
    y_ptr,
    value_ptr,
    gate_ptr,
    s_row_stride,
    n_cols,
    packed_row_stride,
    k,
    run,
    steps,
    BY_SCORE: tl.constexpr,
    FETCH: tl.constexpr,
    LARGEST: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge WAYS runs: a survivor's place is its place in its own run plus its rank in the others, by bisection."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    count = k
    if BY_SCORE:
        count = tl.load(state_ptr + row * COUNTERS)
    if begin < count:
        cols = begin + tl.arange(0, BLOCK)
        inside = cols < count
        packed_row = row * packed_row_stride
        survivor = tl.load(packed_ptr + packed_row + cols, mask=inside, other=EMPTY)
        own_run = cols // run
        first_run = own_run // WAYS * WAYS
        runs = first_run[:, None] + tl.arange(0, WAYS)[None, :]
        start = runs * run
        # empty places are equal: those of earlier runs come first
        earlier = runs < own_run[:, None]
        lo = tl.zeros((BLOCK, WAYS), tl.int32)
        hi = tl.where(runs == own_run[:, None], 0, tl.minimum(tl.maximum(count - start, 0), run))
        for _ in range(steps):
            middle = (lo + hi) // 2
            searching = (lo < hi) & inside[:, None]
            probe = tl.load(packed_ptr + packed_row + start + middle, mask=searching, other=EMPTY)
            is_before = (probe > survivor[:, None]) | (earlier & (probe == survivor[:, None]))
            lo = tl.where(searching & is_before, middle + 1, lo)
            hi = tl.where(searching & (is_before == 0), middle, hi)
        place = first_run * run + (cols - own_run * run) + tl.sum(lo, 1)
        if FETCH:
            wanted = inside & (place < k)
            at = row * k + place
            index = to_column(survivor)
            nan = tl.load(state_ptr + row * COUNTERS + 1) > 0
            to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
            deliver(to, index, at, wanted, nan, row * s_row_stride, row * n_cols, LARGEST)
        else:
            tl.store(out_ptr + packed_row + place, survivor, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def add_kernel(
    index_ptr,  # (n_rows, k) int32 or int64, contiguous: columns, distinct within a row, or -1
    g_ptr,  # (n_rows, k) gradients of the chosen entries, any float
    ds_ptr,  # (n_rows, n_cols) any float, contiguous: they are added here
    g_row_stride,
    g_col_stride,
    n_rows,
    n_cols,
    k,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // k
    index = tl.load(index_ptr + at, mask=row < n_rows, other=-1)
    chosen = index >= 0
    g = tl.load(g_ptr + row * g_row_stride + (at - row * k) * g_col_stride, mask=chosen, other=0.0).to(tl.float32)
    ds = ds_ptr + row * n_cols + index
    g += tl.load(ds, mask=chosen, other=0.0).to(tl.float32)
    tl.store(ds, g.to(ds_ptr.dtype.element_ty), mask=chosen)
