"""What the kernels of the selection share: scores as keys, the range of a row, survivors packed in one int64.

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

    From there on VECTOR neighbours are in one thread, wherever the row begins; elsewhere they are in as many threads.
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
        # a sum beyond int64 takes a start beyond every row, and is empty
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
    """Return log2(x) + 127 of positive numbers within 0.01, which is enough for a guess and a third of a logarithm."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return bits.to(tl.float32) * 1.1920928955078125e-07 + 0.344 * fraction * (1.0 - fraction)


@triton.jit
def threshold_of(key, k, most, nothing, SHIFT: tl.constexpr):
    """Return a key that k to `most` keys of each row reach, how many keys are a score, and how many reach it.

    Where keys are equal it is the k-th largest, which more than `most` reach; where there are fewer, `nothing`. Counts
    bracket the threshold. The next guess is on the line through both ends, with log(count/(n - count)) for the
    count: a row of normal scores is solved by 7 counts instead of 18. Every other guess from the seventh on bisects
    keys, so that a row of any scores is solved.
    """
    valid = tl.sum((key > nothing).to(tl.int32), 1)
    few = valid <= k
    # at least k keys are ≥ lo, fewer than k are ≥ hi
    lo = tl.where(few, nothing, tl.min(tl.where(key > nothing, key, LARGEST_KEY), 1))
    hi = tl.where(few, nothing, tl.max(key, 1)) + 1
    total = valid.to(tl.float32) + 0.5
    aimed = 0.5 * (k + most) + tl.zeros_like(total)
    aim = about_log2(aimed + 0.5) - about_log2(tl.maximum(total - aimed, 0.5))
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
        found = about_log2(n_above + 0.5) - about_log2(tl.maximum(total - n_above, 0.5)) - aim
        above = count < k
        # an end that stays twice counts half
        at_lo = tl.where(above, tl.where(side == -1, 0.5 * at_lo, at_lo), found)
        at_hi = tl.where(above, found, tl.where(side == 1, 0.5 * at_hi, at_hi))
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


__all__ = [
    "COUNTERS", "EMPTY", "EMPTY_HALF", "INFINITY", "LOW", "NAN", "NOTHING", "Row", "bounds",
    "from_boundary", "is_nan", "key_of", "load_keys", "load_scores", "ordered", "pack", "pack_half", "threshold_of",
    "to_column", "to_key", "to_score", "unpack_half",
]  # fmt: skip
