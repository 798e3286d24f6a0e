"""Triton kernels of soft_topk and their launchers.

One search for a threshold (base, c) with y = φ((s - base)/eps - c) solves all kinds: a pass over the row computes sums,
and `advance` turns them into the next threshold. A short row stays in registers for all passes. A team of programs that
run at once shares a long row: each holds a chunk in registers, and they exchange partials through a mailbox.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, launch
from onepass.ops._shared.kernels_gates import CAPPED_EXP, CLAMP, LAPLACE, SIGMOID, gates_and_slopes, offsets
from onepass.ops._shared.kernels_mailbox import in_registers, poll, publish, team_sums, teams
from onepass.ops._shared.kernels_rows import (
    HALF_PER_WARP,
    INF,
    LOG2E,
    SIZES,
    Scores,
    even,
    largest,
    load_option,
    load_scores,
    pair_sum,
    row_max,
    row_sum,
    scratch,
    shape,
    stride,
    tile_cols,
    tile_rows,
    within,
)

from .kernels_backward import backward as backward

# longest row that one program holds in registers, by kind
LONGEST = (32768, 16384, 16384, 16384)
# team: columns per program, warps per program, programs per multiprocessor
TEAM = (8192, 8, 2)
# warps, and registers per thread (0: the compiler's choice), by kind and columns, from measurements
TABLE: tuple[dict[int, tuple[int, int]], ...] = (
    {512: (1, 80), 1024: (1, 80), 2048: (1, 128), 4096: (2, 128), 8192: (8, 64), 16384: (8, 128), 32768: (32, 0)},
    {8192: (8, 64), 16384: (16, 64)},
    {8192: (8, 80), 16384: (16, 64)},
    {8192: (4, 128), 16384: (8, 128)},
)
# cap of exponentials that are divided by: their gates are 1 far below it, and values below 1/HUGE don't matter
HUGE = tl.constexpr(1e30)
# the largest fp32 number below 1
BELOW_ONE = tl.constexpr(1 - 2.0**-24)

# a c that saturates every gate; finite, so that -inf scores stay -inf
ALL_ONES = tl.constexpr(-1e30)
# more than this many eps from the base, c is only a trial: its low digits don't matter
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
    reduced = tl.reduce((n, d, squares, lo, s), 1 if BLOCK_R > 1 else 0, combine_looks, keep_dims=BLOCK_R > 1)
    n, total, squares, lo, hi = reduced
    n_infinite = tl.zeros_like(hi)
    if largest((hi == INF).to(tl.int32), BLOCK_R) > 0:
        finite = tl.abs(s) < INF
        d = tl.where(finite, s - pivot, 0.0)
        total, squares = pair_sum(d, d * d, BLOCK_R)
        n_infinite = row_sum(tl.where(s == INF, 1.0, 0.0), BLOCK_R)
        hi = row_max(tl.where(finite, s, -INF), BLOCK_R)
        n -= n_infinite
    return n, total, squares, n_infinite, lo, hi


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
    return tl.reduce((a, b, c), 1 if BLOCK_R > 1 else 0, add_triples, keep_dims=BLOCK_R > 1)


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
def begin(pivot, count, total, squares, n_infinite, lo, hi, k, eps, KIND: tl.constexpr):
    """Return bracket and first guess of the search from a row's stats, or the solution if it has a closed form."""
    k = tl.where((k > 0) & (eps > 0), k, float("nan"))
    nan = (count != count) | (k != k)
    ones = k >= count + n_infinite
    shared = (n_infinite >= k) & (ones == 0)
    done = tl.where(nan | ones | shared, 1.0, 0.0)
    edge = inverse(k - n_infinite, count, KIND)
    base = guess(pivot, count, total, squares, k / (count + n_infinite), eps, KIND)
    base = tl.where((base >= lo - edge * eps) & (base <= hi - edge * eps), base, 0.5 * lo + 0.5 * hi - edge * eps)
    c_shared = tl.where(k < n_infinite, -inverse(k, n_infinite, KIND), ALL_ONES)
    c = tl.where(nan, 0.0, tl.where(ones, ALL_ONES, tl.where(shared, c_shared, 0.0)))
    base = tl.where(ones, tl.where(count > 0, lo, 0.0), tl.where(shared, INF, base))
    base = tl.where(nan, float("nan"), base)
    lo_key, hi_key = bracket(lo, hi, edge, eps)
    return base, c, lo_key, hi_key, done


@triton.jit
def rebase(base, c, done, eps):
    """Move the base as close to the threshold as fp32 allows; c keeps the rest."""
    new_base = base + eps * c
    d = (new_base - base) / eps
    c_left = tl.where(tl.abs(d) < FAR, c - d, 0.0)
    return tl.where(done > 0, base, new_base), tl.where(done > 0, c, c_left)


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
    k_left = k - above
    excess = rest - k_left
    size = slopes
    step = excess / slopes
    if KIND == CAPPED_EXP:
        size = above
        # exact for this saturated set, and never below the root; with k or more saturated, Newton on the sum itself
        step = tl.where(k_left > 0, tl.log(rest / k_left), step)
        step = tl.where(rest > 0, step, float("nan"))
    elif KIND != CLAMP:
        # far from the root, since the tails are exponential: Newton on the logarithm of the smaller side
        asymptote = tl.where(k < 0.5 * n, 0.0, n)
        distance = (above - asymptote) + rest
        log = distance / slopes * tl.log(distance / (k - asymptote))
        step = tl.where((tl.abs(excess) > 0.1 * tl.abs(k - asymptote)) & (tl.abs(log) < INF), log, step)
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
    too_low = excess >= 0
    coarse = fine == 0
    key = to_key(tl.where(coarse, base, c))
    lo = tl.where(too_low, tl.maximum(lo, key - (coarse & (c < 0)).to(tl.int32)), lo)
    hi = tl.where(too_low, hi, tl.minimum(hi, key + (coarse & (c > 0)).to(tl.int32)))
    middle = (lo & hi) + ((lo ^ hi) >> 1)
    closed = middle <= lo
    narrow = closed & (fine > 0)
    arrived = arrived | narrow
    aim = c + step
    new_base = base + eps * aim
    c_left = tl.where(tl.abs(aim) < FAR, aim - (new_base - base) / eps, 0.0)
    target = to_key(tl.where(coarse, new_base, aim))
    flip = (fine == 1) & too_low
    # Newton solves most rows; in case it cycles, every fourth step bisects, and so do steps 32 to 63 of every 64
    newton = (target > lo) & (target < hi) & (tl.abs(step) < INF) & (i % 4 != 3) & (i % 64 < 32) & (flip == 0)
    last = tl.where(newton & (size < k), size, -1.0)
    halfway = to_number(middle)
    reach = to_number(hi)
    enter = closed & coarse
    gap = (reach - to_number(lo)) / eps
    next_base = tl.where(coarse, tl.where(newton, new_base, halfway), base)
    next_base = tl.where(enter, to_number(lo), tl.where(flip, base + eps * reach, next_base))
    next_c = tl.where(coarse, tl.where(newton, c_left, 0.0), tl.where(newton, aim, halfway))
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
        # no last step if its rounding would change many equal gates by more than it mends
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
    next_u = tl.where(b < k, raw / (k - b), newton)
    reliable = (raw > UNDERFLOWN) & (next_u < 1e17) & (next_u > 1e-17)
    return next_u, reliable, reliable & (b < k) & (b == last)


@triton.jit
def highest(a, mailbox_ptr, member, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest `a` of the team, and the next phase."""
    if TEAM > 0:
        slots = mailbox_ptr + (phase % 2) * TEAM
        publish(slots + member, a, tl.abs(a), phase)
        a, _ = poll(slots, phase, TEAM, WIDTH)
        a = tl.max(tl.where(tl.arange(0, WIDTH) < TEAM, a, -INF), 0)
    return a, phase + 1


@triton.jit
def unit(x):
    """Clip x to [0, 1], at no cost after the operation that computes x."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def measure_clipped(s, base, c, eps, BLOCK_R: tl.constexpr):
    """Return Σ gates and Σ slopes of clamp, without the slopes of entries within FIRM of an edge."""
    y = unit((s - base) * (1.0 / eps) - c)
    # the slope is 1 where y(1 - y) exceeds FIRM: clipping takes half the time of comparing and selecting
    return pair_sum(y, unit((y - y * y) * HUGE - FIRM * HUGE), BLOCK_R)


@triton.jit
def firm(k, slopes):
    """Return whether the rounding of a plain sum of gates moves the threshold by FIRM at most, in eps."""
    return 8 * TINY * k <= FIRM * slopes


@triton.jit
def exponentials(s, base, eps, KIND: tl.constexpr):
    """Return E = exp((s - base)/eps), capped for sigmoid, which divides by it."""
    e = tl.exp2((s - base) * (1.0 / eps) * LOG2E)
    if KIND == SIGMOID:
        e = tl.minimum(e, HUGE)
    return e


@triton.jit
def measure_exponentials(e, u, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return Σ gates and Σ slopes of sigmoid or laplace at c = log u, with one slow operation per entry.

    1/x is computed as rsqrt(x)², since a division checks the size of its operands first.
    """
    if KIND == SIGMOID:
        q = tl.rsqrt(e + u)
        y = e * (q * q)
        a, b = pair_sum(y, y * (q * q), BLOCK_R)
        b *= u
    else:
        p = e * (1.0 / u)
        q = tl.rsqrt(p)
        # e^-|x|: half of it is the gate below the threshold, and 1 minus the gate above
        small = tl.minimum(p, q * q)
        a, b = pair_sum(unit(1.0 - q * q), small, BLOCK_R)
        b *= 0.5
        a += b
    return a, b


@triton.jit
def gates_of_exponentials(e, u, KIND: tl.constexpr):
    """Return the gates at c = log u."""
    if KIND == CAPPED_EXP:
        y = e * (1.0 / u)
        y = tl.where(y > 1.0, 1.0, y)
    elif KIND == SIGMOID:
        # 1 exactly where E + u rounds to E, and below 1 elsewhere: the division is approximate. 1/(1 + u/E) spills
        t = e + u
        y = e / t
        y = tl.where(y > BELOW_ONE, BELOW_ONE, y)
        y = tl.where(t == e, 1.0, y)
    else:
        p = e * (1.0 / u)
        y = tl.where(p < 1.0, 0.5 * p, 1.0 - 0.5 / p)
    return y


@triton.jit
def solve(
    scores, k_ptr, eps_ptr, y_ptr, solution_ptr, mailbox_ptr, rows, cols, k_stride, eps_stride, k_value, eps_value,
    member, visit, phase, KIND: tl.constexpr, TEAM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Solve rows in registers, one program or a team per row: a guess, Newton, the bracketed search where that fails.

    All kinds but clamp keep E = exp((s - base)/eps) instead of the scores, so that a pass needs no exponential. The few
    rows that take the bracketed search load their scores again (from L2).
    """
    phase = tl.cast(phase, tl.int32)
    n_rows = scores.n_rows
    n_cols = scores.n_cols
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows)
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows)
    s = load_scores(scores, rows, cols, BLOCK_R)
    pivot = load_pivot(scores, rows)
    sample: tl.constexpr = KIND == CAPPED_EXP and BLOCK_R == 1 and BLOCK_C >= QUARTER
    n, total, squares = moments(s, pivot, sample, BLOCK_R)
    if TEAM > 0:
        slots = mailbox_ptr + (2 + visit % 2) * TEAM
        publish(slots + member, squares, squares, visit)
    total, n, phase = team_sums(total, n, mailbox_ptr, member, phase, TEAM, WIDTH)
    if TEAM > 0:
        squares, _same_squares = poll(slots, visit, TEAM, WIDTH)
        squares = tl.sum(squares, 0)
    base = guess(pivot, n, total, squares, k / (n * (4.0 if sample else 1.0)), eps, KIND)
    # a NaN or an infinity among the sampled scores makes base NaN or infinite
    swift = tl.where((k > 0) & (eps > 0) & (k < n_cols) & (tl.abs(base) < INF), 1.0, 0.0)
    if KIND != CAPPED_EXP:
        swift = tl.where(k < n, swift, 0.0)
    done = tl.zeros_like(swift)
    c = tl.zeros_like(swift)
    u = c + 1.0
    last = c - 1.0
    i = 0
    if KIND == CAPPED_EXP:
        s = tl.exp2((s - base) * (1.0 / eps) * LOG2E)
        while (i < SWIFT_PASSES) & (largest(swift, BLOCK_R) > 0):
            # entries at the threshold count as saturated; these passes can end only with fewer than k of them. A NaN
            # compares false, so it enters the sum, also if the guess did not sample it
            saturated = s >= u * (1.0 - EDGE)
            raw, b = pair_sum(tl.where(saturated, 0.0, s), tl.where(saturated, 1.0, 0.0), BLOCK_R)
            raw, b, phase = team_sums(raw, b, mailbox_ptr, member, phase, TEAM, WIDTH)
            next_u, reliable, exact = swift_step(u, raw, b, last, k)
            reliable = reliable & (swift > 0)
            u = tl.where(reliable, next_u, u)
            last = tl.where(b < k, b, -1.0)
            done = tl.where(reliable & exact, 1.0, done)
            swift = tl.where(reliable & (exact == 0), 1.0, 0.0)
            i += 1
        c = tl.log(u)
    elif KIND == CLAMP:
        while (i < SWIFT_PASSES) & (largest(swift, BLOCK_R) > 0):
            base, c = rebase(base, c, 1.0 - swift, eps)
            a, b = measure_clipped(s, base, c, eps, BLOCK_R)
            a, b, phase = team_sums(a, b, mailbox_ptr, member, phase, TEAM, WIDTH)
            excess, size, step = newton(0.0, a, b, k, n, KIND)
            # no score in the window: move on by half of it
            step = tl.where(size > 0, step, tl.where(excess > 0, 0.5, -0.5))
            reliable = (swift > 0) & (tl.abs(step) < REACH)
            exact = reliable & (tl.abs(excess) <= 4 * TINY * k)
            # a last step, unless its rounding would change many equal gates by more than it mends
            worse = exact & (tl.abs(excess) <= size * TINY * tl.abs(c))
            c = tl.where(reliable & (worse == 0), c + step, c)
            # with every gate 0 or 1 the sum is exact, and any threshold between these scores is right
            between = (swift > 0) & (size == 0) & (excess == 0)
            done = tl.where((exact & firm(k, size)) | between, 1.0, done)
            swift = tl.where(reliable & (exact == 0) & (between == 0), 1.0, 0.0)
            i += 1
    else:
        s = exponentials(s, base, eps, KIND)
        while (i < SWIFT_PASSES) & (largest(swift, BLOCK_R) > 0):
            a, b = measure_exponentials(s, u, KIND, BLOCK_R)
            a, b, phase = team_sums(a, b, mailbox_ptr, member, phase, TEAM, WIDTH)
            _excess, size, step = newton(0.0, a, b, k, n, KIND)
            # keep u itself: its logarithm c rounds relative to |c|
            next_u = u * tl.exp2(step * LOG2E)
            reliable = (swift > 0) & (tl.abs(step) < REACH) & (next_u < 1e17) & (next_u > 1e-17)
            exact = reliable & (tl.abs(step) <= SMALL)
            u = tl.where(reliable, next_u, u)
            done = tl.where(exact & firm(k, size), 1.0, done)
            swift = tl.where(reliable & (exact == 0), 1.0, 0.0)
            i += 1
        c = tl.log(u)
    if largest(1.0 - done, BLOCK_R) > 0:
        solved = done
        # clamp still has s, but the compiler would then keep the differences of `moments`, too: 64 registers
        s = load_scores(scores, rows, cols, BLOCK_R)
        n, total, squares, n_infinite, lo, hi = first_look(s, pivot, BLOCK_R)
        n, n_infinite, phase = team_sums(n, n_infinite, mailbox_ptr, member, phase, TEAM, WIDTH)
        total, squares, phase = team_sums(total, squares, mailbox_ptr, member, phase, TEAM, WIDTH)
        lo, phase = highest(-lo, mailbox_ptr, member, phase, TEAM, WIDTH)
        hi, phase = highest(hi, mailbox_ptr, member, phase, TEAM, WIDTH)
        first, shift, lo_key, hi_key, closed = begin(pivot, n, total, squares, n_infinite, -lo, hi, k, eps, KIND)
        base = tl.where(solved > 0, base, first)
        c = tl.where(solved > 0, c, shift)
        done = tl.maximum(solved, closed)
        n += n_infinite
        fine = tl.zeros_like(done)
        last = fine - 1.0
        i = 0
        while (i < MAX_PASSES) & (largest(1.0 - done, BLOCK_R) > 0):
            above, rest, slopes = measure(s, base, c, eps, KIND, BLOCK_R)
            rest, above, phase = team_sums(rest, above, mailbox_ptr, member, phase, TEAM, WIDTH)
            if KIND == CAPPED_EXP:
                slopes = rest
            else:
                slopes, _same, phase = team_sums(slopes, slopes, mailbox_ptr, member, phase, TEAM, WIDTH)
            excess, size, step = newton(above, rest, slopes, k, n, KIND)
            base, c, lo_key, hi_key, fine, last, done = advance(
                base, c, lo_key, hi_key, fine, last, done, excess, size, step, k, eps, i, KIND
            )
            i += 1
        if KIND != CLAMP:
            y, _ = gates_and_slopes(offsets(s, base, eps) - c, KIND)
            if BLOCK_R > 1:
                # rows solved before keep their bits, so that a row's result doesn't depend on its neighbours
                fast = gates_of_exponentials(exponentials(s, base, eps, KIND), u, KIND)
                y = tl.where(solved > 0, fast, y)
            tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    elif KIND != CLAMP:
        y = gates_of_exponentials(s, u, KIND)
        tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    if KIND == CLAMP:
        y, _ = gates_and_slopes(offsets(s, base, eps) - c, KIND)
        tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    if member == 0:
        tl.store(solution_ptr + rows * 2, base, mask=rows < n_rows)
        tl.store(solution_ptr + rows * 2 + 1, c, mask=rows < n_rows)
    return phase


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or None
    eps_ptr,  # (n_rows,) any float, or None
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or None
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    solution_ptr,  # (n_rows, 2) fp32: base and c
    mailbox_ptr,  # (teams, 4, TEAM) int64 zeros: per member two slots for the sums of a pass, two for Σ d² of a row
    s_row_stride,
    k_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k_value,
    eps_value,
    KIND: tl.constexpr,
    TEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """A program holds whole rows, TEAM programs hold a long one in chunks; all members take the same steps."""
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols * VEC)
    if TEAM == 0:
        solve(
            scores, k_ptr, eps_ptr, y_ptr, solution_ptr, None, tile_rows(BLOCK_R), tile_cols(0, BLOCK_R, BLOCK_C),
            k_stride, eps_stride, k_value, eps_value, 0, 0, 0, KIND, 0, 1, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        team = tl.program_id(0) // TEAM
        member = tl.program_id(0) % TEAM
        visit = 0
        phase = 0
        for row in range(team, n_rows, tl.num_programs(0) // TEAM):
            phase = solve(
                scores, k_ptr, eps_ptr, y_ptr, solution_ptr, mailbox_ptr + team * (4 * TEAM), tl.cast(row, tl.int64),
                member * BLOCK_C + tl.arange(0, BLOCK_C), k_stride, eps_stride, k_value, eps_value, member, visit,
                phase, KIND, TEAM, WIDTH, 1, BLOCK_C,
            )  # fmt: skip
            visit += 1


def holds(s: Tensor, kind: int) -> bool:
    """Return whether rows like those of s (..., n) stay in registers; others are torch's, forward and backward."""
    return in_registers(s, LONGEST[kind], TEAM)


def forward(
    scores: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None, k_value: float, eps_value: float,
    kind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gates and the solution (..., 2) of scores (..., n).

    Both are allocated in their shape: autograd forbids in-place changes of a view made inside a Function.
    """
    s = as_rows(scores)
    n_rows, n_cols = s.shape
    y = torch.empty(scores.shape, dtype=s.dtype, device=s.device)
    solution = scratch(s, *scores.shape[:-1], 2)
    if not y.numel():
        return y, solution.zero_()
    s, k, eps, mask = even(s, k, eps, mask)
    plan = shape(n_rows, n_cols, HALF_PER_WARP, LONGEST[kind])
    # a register limit lets more rows run at once, which hides waits
    warps, limit = TABLE[kind].get(plan.block_c if plan.block_r == 1 else 0, (plan.warps, 0))
    of_one = {"num_warps": warps, **({"maxnreg": limit} if limit and torch.version.hip is None else {})}
    strides = (s.stride(0), stride(k), stride(eps), stride(mask))
    vec = math.gcd(16, n_cols)
    numbers = (strides[0] // vec, *strides[1:3], strides[3] // vec, n_rows, n_cols // vec, k_value, eps_value)
    alone = plan.programs, (0, 1, plan.block_r, plan.block_c), None, of_one
    programs, tile, slots, options = alone if plan.splits == 1 else teams(s, *TEAM)
    launch(
        forward_kernel, (programs, 1, 1), (s, k, eps, mask, y, solution, slots), numbers, (kind, *tile, vec), **options
    )
    return y, solution
