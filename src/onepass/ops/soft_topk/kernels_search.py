"""The search for a row's threshold, shared by the kernels of soft_topk: first look, first guess, steps.

Every kind is solved by the same search for one threshold (base, c), y = φ((s - base)/eps - c): a pass over the row
gives two sums, `advance` turns them into the next threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_gates import CAPPED_EXP, CLAMP, LAPLACE, SIGMOID
from onepass.ops._shared.kernels_rows import INF, LOG2E, SEPARATE, largest, pair_sum, row_max, row_sum

# far enough to saturate every gate, finite so that -inf scores stay -inf
ALL_ONES = tl.constexpr(-1e30)
# beyond this many eps a threshold is only a place to look at, its digits don't matter
FAR = tl.constexpr(1e4)
# rounding of fp32, and the Newton step whose square is below it
TINY = tl.constexpr(1.2e-7)
SMALL = tl.constexpr(2e-4)
# capped_exp takes scores this close to the threshold for saturated: one rounding in the sum of many equal gates is not
# told from the gate of another score
EDGE = tl.constexpr(16 * 1.2e-7)
# a plain sum of gates leaves the threshold uncertain by its rounding over the slopes: more than FIRM is too much. The
# slope of clamp changes where an entry enters or leaves the window: those this close to its edges are not counted
FIRM = tl.constexpr(5e-5)
# terms that underflowed would be missing from a sum as small as this
UNDERFLOWN = tl.constexpr(1e-25)

# passes without a bracket, then with one
SWIFT_PASSES = tl.constexpr(10)
MAX_PASSES = tl.constexpr(160)
# a guess this many eps off is beyond a step without a bracket
REACH = tl.constexpr(16.0)
# columns from which a quarter of a row is enough for a guess
QUARTER = tl.constexpr(2048)


@triton.jit
def inverse(k, n, KIND: tl.constexpr):
    """φ⁻¹(k/n). From n - k, which is exact where 1 - k/n is not."""
    if KIND == CAPPED_EXP:
        x = tl.log(k / n)
    elif KIND == SIGMOID:
        x = tl.log(k / (n - k))
    elif KIND == LAPLACE:
        x = tl.where(k < 0.5 * n, tl.log(2.0 * (k / n)), -tl.log(2.0 * ((n - k) / n)))
    else:
        x = k / n
    return x


@triton.jit
def combine_looks(n0, a0, b0, lo0, hi0, n1, a1, b1, lo1, hi1):
    return n0 + n1, a0 + a1, b0 + b1, tl.minimum(lo0, lo1), tl.maximum(hi0, hi1)


@triton.jit
def first_look(s, pivot, BLOCK_R: tl.constexpr):
    """Of each row: finite entries (NaN if one is NaN), Σ d and Σ d² with d = s - pivot, +inf entries, ends of the rest.

    One exchange between the warps, unless there is a +inf.
    """
    allowed = s > -INF
    n = tl.where(s != s, s, tl.where(allowed, 1.0, 0.0))
    d = tl.where(allowed, s - pivot, 0.0)
    lo = tl.where(allowed, s, INF)
    squares = d * d
    if SEPARATE:
        n, total, squares = row_sum(n, BLOCK_R), row_sum(d, BLOCK_R), row_sum(squares, BLOCK_R)
        lo, hi = -row_max(-lo, BLOCK_R), row_max(s, BLOCK_R)
    elif BLOCK_R > 1:
        n, total, squares, lo, hi = tl.reduce((n, d, squares, lo, s), 1, combine_looks, keep_dims=True)
    else:
        n, total, squares, lo, hi = tl.reduce((n, d, squares, lo, s), 0, combine_looks)
    endless = tl.zeros_like(hi)
    if largest((hi == INF).to(tl.int32), BLOCK_R) > 0:
        finite = tl.abs(s) < INF
        d = tl.where(finite, s - pivot, 0.0)
        total, squares = pair_sum(d, d * d, BLOCK_R)
        endless = row_sum(tl.where(s == INF, 1.0, 0.0), BLOCK_R)
        hi = row_max(tl.where(finite, s, -INF), BLOCK_R)
        n -= endless
    return n, total, squares, endless, lo, hi


@triton.jit
def load_pivot(s_ptr, rows, s_row_stride, n_rows):
    """Some score of each row, finite: near it sums lose fewer digits."""
    pivot = tl.load(s_ptr + rows * s_row_stride, mask=rows < n_rows, other=0.0).to(tl.float32)
    return tl.where(tl.abs(pivot) < INF, pivot, 0.0)


@triton.jit
def add_triples(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def triple_sum(a, b, c, BLOCK_R: tl.constexpr):
    """Three sums of each row, through one exchange between the warps."""
    if SEPARATE:
        a, b, c = row_sum(a, BLOCK_R), row_sum(b, BLOCK_R), row_sum(c, BLOCK_R)
    elif BLOCK_R > 1:
        a, b, c = tl.reduce((a, b, c), 1, add_triples, keep_dims=True)
    else:
        a, b, c = tl.reduce((a, b, c), 0, add_triples)
    return a, b, c


@triton.jit
def moments(s, pivot, SAMPLE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Of each row: entries that may be chosen, Σ d, Σ d² with d = s - pivot; of every fourth column where SAMPLE."""
    if SAMPLE:
        s, _ = tl.split(tl.reshape(s, (s.shape[0] // 2, 2)))
        s, _ = tl.split(tl.reshape(s, (s.shape[0] // 2, 2)))
    allowed = s != -INF
    n = tl.where(allowed, 1.0, 0.0)
    d = tl.where(allowed, s - pivot, 0.0)
    return triple_sum(n, d, d * d, BLOCK_R)


@triton.jit
def guess(pivot, count, total, squares, p, eps, KIND: tl.constexpr):
    """Scores as a normal distribution seen through the gate's own noise: a guess, only its distance costs passes."""
    shift = total / count
    mean = pivot + shift
    variance = tl.maximum(squares / count - shift * shift, 0.0)
    p = tl.minimum(tl.maximum(p, 1e-6), 1.0 - 1e-6)
    z = 4.91 * (tl.exp2(0.14 * tl.log2(1.0 - p)) - tl.exp2(0.14 * tl.log2(p)))
    if KIND == CAPPED_EXP:
        base = mean + eps + z * tl.sqrt(variance + eps * eps)
    elif KIND == SIGMOID:
        base = mean + z * tl.sqrt(variance + 3.29 * eps * eps)
    elif KIND == LAPLACE:
        base = mean + z * tl.sqrt(variance + 2.0 * eps * eps)
    else:
        base = mean - 0.5 * eps + z * tl.sqrt(variance + 0.083 * eps * eps)
    return base


@triton.jit
def begin(pivot, count, total, squares, endless, lo, hi, k, eps, KIND: tl.constexpr):
    """From the first look: bracket and first guess of the search, or the answer where it has a closed form."""
    k = tl.where((k > 0) & (eps > 0), k, float("nan"))
    nan = (count != count) | (k != k)
    ones = k >= count + endless
    shared = (endless >= k) & (ones == 0)
    done = tl.where(nan | ones | shared, 1.0, 0.0)
    edge = inverse(k - endless, count, KIND)
    base = guess(pivot, count, total, squares, k / (count + endless), eps, KIND)
    base = tl.where((base >= lo - edge * eps) & (base <= hi - edge * eps), base, 0.5 * lo + 0.5 * hi - edge * eps)
    closed = tl.where(k < endless, -inverse(k, endless, KIND), ALL_ONES)
    c = tl.where(nan, 0.0, tl.where(ones, ALL_ONES, tl.where(shared, closed, 0.0)))
    base = tl.where(ones, tl.where(count > 0, lo, 0.0), tl.where(shared, INF, base))
    base = tl.where(nan, float("nan"), base)
    lo_key, hi_key = bracket(lo, hi, edge, eps)
    return base, c, lo_key, hi_key, done


@triton.jit
def rebase(base, c, done, eps):
    """The same threshold with a base that is as near as fp32 can say, and c what is missing."""
    moved = base + eps * c
    d = (moved - base) / eps
    left = tl.where(tl.abs(d) < FAR, c - d, 0.0)
    return tl.where(done > 0, base, moved), tl.where(done > 0, c, left)


@triton.jit
def measure(s, base, c, eps, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums of a pass: entries above, Σ of what gates differ by from 1 above and from 0 below, Σ slopes.

    "Above" is the threshold, for capped_exp where gates saturate, for clamp the middle of its window. Entries are
    counted, which is exact: a sum of many gates near 1 would have no digits left for the few that are not.
    """
    x = (s - base) * (1.0 / eps) - c
    if KIND == CAPPED_EXP:
        saturated = x > -EDGE
        y = tl.where(saturated, 0.0, tl.exp2(x * LOG2E))
        rest, above = pair_sum(y, tl.where(saturated, 1.0, 0.0), BLOCK_R)
        slopes = rest
    else:
        if KIND == CLAMP:
            high = x > 0.5
            tail = tl.maximum(tl.where(high, 1.0 - x, x), 0.0)
            w = tl.where(tail > EDGE, 1.0, 0.0)
        else:
            high = x > 0
            e = tl.exp2(-tl.abs(x) * LOG2E)
            if KIND == SIGMOID:
                r = 1.0 / (1.0 + e)
                tail = e * r
                w = tail * r
            else:
                tail = 0.5 * e
                w = tail
        above, rest, slopes = triple_sum(tl.where(high, 1.0, 0.0), tl.where(high, -tail, tail), w, BLOCK_R)
    return above, rest, slopes


@triton.jit
def newton(above, rest, slopes, k, n, KIND: tl.constexpr):
    """From the sums of a pass: Σ gates - k, size of the saturated set (or Σ slopes), Newton's step for c."""
    wanted = k - above
    excess = rest - wanted
    size = slopes
    step = excess / slopes
    if KIND == CAPPED_EXP:
        size = above
        # exact for this saturated set, and never below the root; with k or more saturated, Newton on the sum itself
        step = tl.where(wanted > 0, tl.log(rest / wanted), step)
        step = tl.where(rest > 0, step, float("nan"))
    elif KIND != CLAMP:
        # far from the root, since the tails are exponential: Newton on the logarithm of the smaller side
        left = tl.where(k < 0.5 * n, 0.0, n)
        side = (above - left) + rest
        log = side / slopes * tl.log(side / (k - left))
        step = tl.where((tl.abs(excess) > 0.1 * tl.abs(k - left)) & (tl.abs(log) < INF), log, step)
    return excess, size, step


@triton.jit
def to_key(x):
    """Integers in the order of fp32 numbers, neighbours next to each other."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bracket(lo, hi, edge, eps):
    """Ends of the threshold, as keys: equal scores at either end of the row bound it."""
    infinite = to_key(tl.zeros_like(lo) + INF)
    return tl.maximum(to_key(lo - edge * eps) - 1, -infinite - 1), tl.minimum(to_key(hi - edge * eps) + 1, infinite)


@triton.jit
def advance(base, c, lo, hi, fine, last, done, excess, size, step, k, eps, i, KIND: tl.constexpr):
    """One step of the bracketed search, which ends for any scores: test for arrival, tighten, Newton or divide.

    At first the bracket's ends are keys of bases, and c is what rounding left of Newton's target. Dividing keys closes
    any bracket in 32 steps, however many orders of magnitude it spans. Once no base lies between its ends, the rest is
    in units of eps from the nearer end, and the ends are keys of c. The first look between them says which is nearer
    (fine is 1 there, 2 from then on): from the other, which may be some eps away, gates near 0 would lose their digits.
    """
    if KIND == CAPPED_EXP:
        arrived = (size < k) & ((size == last) | (step == 0))
    elif KIND == CLAMP:
        arrived = tl.abs(excess) <= 4 * TINY * tl.minimum(k, size)
    else:
        arrived = tl.abs(step) <= SMALL
    # no gate is further from its value than their sum from k; in the gap between two groups of scores none changes, and
    # any threshold is right
    arrived = arrived | (tl.abs(excess) <= 4 * TINY * tl.minimum(k, 1.0))
    low = excess >= 0
    coarse = fine == 0
    at = to_key(tl.where(coarse, base, c))
    lo = tl.where(low, tl.maximum(lo, at - (coarse & (c < 0)).to(tl.int32)), lo)
    hi = tl.where(low, hi, tl.minimum(hi, at + (coarse & (c > 0)).to(tl.int32)))
    middle = (lo & hi) + ((lo ^ hi) >> 1)
    closed = middle <= lo
    narrow = closed & (fine > 0)
    arrived = arrived | narrow
    aim = c + step
    moved = base + eps * aim
    left = tl.where(tl.abs(aim) < FAR, aim - (moved - base) / eps, 0.0)
    goal = to_key(tl.where(coarse, moved, aim))
    flip = (fine == 1) & low
    # most scores are solved by Newton; where it goes in circles, every fourth step and then every step divides
    newton = (goal > lo) & (goal < hi) & (tl.abs(step) < INF) & (i % 4 != 3) & (i % 64 < 32) & (flip == 0)
    last = tl.where(newton & (size < k), size, -1.0)
    halfway = to_number(middle)
    reach = to_number(hi)
    enter = closed & coarse
    gap = (reach - to_number(lo)) / eps
    next_base = tl.where(coarse, tl.where(newton, moved, halfway), base)
    next_base = tl.where(enter, to_number(lo), tl.where(flip, base + eps * reach, next_base))
    next_c = tl.where(coarse, tl.where(newton, left, 0.0), tl.where(newton, aim, halfway))
    next_c = tl.where(enter, 0.5 * gap, tl.where(flip, 0.5 * (c - reach), next_c))
    lo = tl.where(enter, 0, tl.where(flip, to_key(c - reach), lo))
    hi = tl.where(enter, to_key(gap), tl.where(flip, 0, hi))
    fine = tl.where(enter, 1.0, tl.where(coarse, 0.0, 2.0))
    # where many equal scores begin to saturate, the sum jumps over k and Newton's steps lead out of the closed bracket
    finish = tl.where(tl.abs(step) < tl.where(narrow, EDGE, 1.0), aim, c)
    if KIND == CAPPED_EXP:
        # with k saturated entries and a gap below them, where the sum is k already, a step would unsaturate some
        finish = tl.where(size < k, finish, c)
    if KIND == CLAMP:
        # unless many equal gates would feel its rounding more
        finish = tl.where(tl.abs(excess) <= size * TINY * tl.abs(c), c, finish)
    base = tl.where((done > 0) | arrived, base, next_base)
    c = tl.where(done > 0, c, tl.where(arrived, finish, next_c))
    done = tl.where(arrived, 1.0, done)
    return base, c, lo, hi, fine, last, done


@triton.jit
def swift_step(u, raw, b, last, k):
    """One step of the active set on u = e^c, for capped_exp: (next u, whether it may be trusted, whether it is exact).

    Raw is the sum of the entries of E below u, b the number of the others, last that of the step before.
    """
    newton = u * tl.exp2(tl.minimum((raw + (b - k) * u) / raw, REACH) * LOG2E)
    new = tl.where(b < k, raw / (k - b), newton)
    good = (raw > UNDERFLOWN) & (new < 1e17) & (new > 1e-17)
    return new, good, good & (b < k) & (b == last)
