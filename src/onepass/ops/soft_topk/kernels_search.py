"""The search for the threshold of a row, shared by the kernels of soft_topk: stats, first guess, steps.

One search for a threshold (base, c) with y = φ((s - base)/eps - c) solves all kinds: a pass over the row computes sums,
and `advance` turns them into the next threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_gates import CAPPED_EXP, CLAMP, LAPLACE, SIGMOID
from onepass.ops._shared.kernels_rows import INF, LOG2E, largest, pair_sum, row_max, row_sum

# far enough to saturate every gate, finite so that -inf scores stay -inf
ALL_ONES = tl.constexpr(-1e30)
# beyond this many eps a threshold is a trial point, whose low digits don't matter
FAR = tl.constexpr(1e4)
# rounding of fp32, and the Newton step whose square is below it
TINY = tl.constexpr(1.2e-7)
SMALL = tl.constexpr(2e-4)
# capped_exp counts scores this close to the threshold as saturated: otherwise a rounding in the sum of many equal gates
# would look like the gate of another score
EDGE = tl.constexpr(16 * 1.2e-7)
# largest accepted error of the threshold, in eps, from the rounding of a plain sum of gates (rounding over slopes). For
# clamp, entries this close to an edge of the window are left out of the slopes, which jump there
FIRM = tl.constexpr(5e-5)
# a sum smaller than this may lack terms that underflowed
UNDERFLOWN = tl.constexpr(1e-25)

# passes without a bracket, then with one
SWIFT_PASSES = tl.constexpr(10)
MAX_PASSES = tl.constexpr(160)
# largest step without a bracket, in eps
REACH = tl.constexpr(16.0)
# rows of this many columns or more use every fourth column for the guess
QUARTER = tl.constexpr(2048)


@triton.jit
def inverse(k, n, KIND: tl.constexpr):
    """Return φ⁻¹(k/n), computed from n - k, which is exact where 1 - k/n is not."""
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
    """Return for each row: finite entries (NaN if one is NaN), Σ d and Σ d² of d = s - pivot, +inf entries, extremes.

    The extremes are those of the finite entries. Without +inf, warps exchange data once.
    """
    allowed = s > -INF
    n = tl.where(s != s, s, tl.where(allowed, 1.0, 0.0))
    d = tl.where(allowed, s - pivot, 0.0)
    lo = tl.where(allowed, s, INF)
    squares = d * d
    if BLOCK_R > 1:
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
def load_pivot(scores, rows):
    """Return the first score of each row, 0 if it is not finite: sums of differences to it lose fewer digits."""
    pivot = tl.load(scores.s_ptr + rows * scores.row_stride, mask=rows < scores.n_rows, other=0.0).to(tl.float32)
    return tl.where(tl.abs(pivot) < INF, pivot, 0.0)


@triton.jit
def add_triples(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def triple_sum(a, b, c, BLOCK_R: tl.constexpr):
    """Return three sums of each row, with one exchange between the warps."""
    if BLOCK_R > 1:
        a, b, c = tl.reduce((a, b, c), 1, add_triples, keep_dims=True)
    else:
        a, b, c = tl.reduce((a, b, c), 0, add_triples)
    return a, b, c


@triton.jit
def moments(s, pivot, SAMPLE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return for each row: valid entries, Σ d and Σ d² of d = s - pivot; with SAMPLE, of every fourth column."""
    if SAMPLE:
        s, _ = tl.split(tl.reshape(s, (s.shape[0] // 2, 2)))
        s, _ = tl.split(tl.reshape(s, (s.shape[0] // 2, 2)))
    allowed = s != -INF
    n = tl.where(allowed, 1.0, 0.0)
    d = tl.where(allowed, s - pivot, 0.0)
    return triple_sum(n, d, d * d, BLOCK_R)


@triton.jit
def guess(pivot, count, total, squares, p, eps, KIND: tl.constexpr):
    """Guess the base as if the scores were normal, blurred by the gate; a poor guess costs passes, not accuracy."""
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
    """Return bracket and first guess of the search from a row's stats, or the solution if it has a closed form."""
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
    """Move the base as close to the threshold as fp32 allows; c keeps the rest."""
    moved = base + eps * c
    d = (moved - base) / eps
    left = tl.where(tl.abs(d) < FAR, c - d, 0.0)
    return tl.where(done > 0, base, moved), tl.where(done > 0, c, left)


@triton.jit
def measure(s, base, c, eps, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return the sums of a pass: entries above, Σ of the gates' differences from 1 above and from 0 below, Σ slopes.

    "Above" means above the threshold, for clamp above the middle of its window, for capped_exp saturated. The count is
    exact; a plain sum of many gates near 1 would have no digits left for the small ones.
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
    """Return Σ gates - k, the size of the saturated set (or Σ slopes) and Newton's step for c, from a pass's sums."""
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
    """Return integers in the order of fp32 numbers; neighbouring numbers differ by 1."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def to_number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def bracket(lo, hi, edge, eps):
    """Return the ends of the bracket as keys: the thresholds of rows whose scores all equal lo, or all hi."""
    infinite = to_key(tl.zeros_like(lo) + INF)
    return tl.maximum(to_key(lo - edge * eps) - 1, -infinite - 1), tl.minimum(to_key(hi - edge * eps) + 1, infinite)


@triton.jit
def advance(base, c, lo, hi, fine, last, done, excess, size, step, k, eps, i, KIND: tl.constexpr):
    """Do one step of the bracketed search, which ends for any scores: check for the end, tighten, Newton or bisect.

    At first the ends of the bracket are keys of bases, and c is the rounding error of Newton's target. Bisecting keys
    closes any bracket in 32 steps, however many orders of magnitude it spans. Once no base lies between the ends, the
    search goes on in units of eps from the nearer end, and the ends are keys of c. The first pass between them shows
    which end is nearer (fine is 1 there, 2 afterwards): relative to the other, gates near 0 would lose their digits.
    """
    if KIND == CAPPED_EXP:
        arrived = (size < k) & ((size == last) | (step == 0))
    elif KIND == CLAMP:
        arrived = tl.abs(excess) <= 4 * TINY * tl.minimum(k, size)
    else:
        arrived = tl.abs(step) <= SMALL
    # no gate is further from its value than the sum is from k. In the gap between two groups of scores no gate changes,
    # so that any threshold there is right
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
    # Newton solves most rows; in case it cycles, every fourth step bisects, and so do steps 32 to 63 of every 64
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
        # if k entries are saturated, the sum is k already, and a step would unsaturate some
        finish = tl.where(size < k, finish, c)
    if KIND == CLAMP:
        # no last step if its rounding changes many equal gates by more
        finish = tl.where(tl.abs(excess) <= size * TINY * tl.abs(c), c, finish)
    base = tl.where((done > 0) | arrived, base, next_base)
    c = tl.where(done > 0, c, tl.where(arrived, finish, next_c))
    done = tl.where(arrived, 1.0, done)
    return base, c, lo, hi, fine, last, done


@triton.jit
def swift_step(u, raw, b, last, k):
    """Do one active-set step of capped_exp on u = e^c; return (next u, whether it is reliable, whether it is exact).

    raw is the sum of the entries of E below u, b the number of the others, last that of the previous step.
    """
    newton = u * tl.exp2(tl.minimum((raw + (b - k) * u) / raw, REACH) * LOG2E)
    new = tl.where(b < k, raw / (k - b), newton)
    good = (raw > UNDERFLOWN) & (new < 1e17) & (new > 1e-17)
    return new, good, good & (b < k) & (b == last)
