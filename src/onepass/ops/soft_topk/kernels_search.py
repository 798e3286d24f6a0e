"""The search for a row's threshold, shared by the kernels of soft_topk: first look, first guess, steps.

Every kind is solved by the same search for one threshold (base, c), y = φ((s - base)/eps - c): a pass over the row
gives two sums, `advance` turns them into the next threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_common import (
    CAPPED_EXP,
    CLAMP,
    INF,
    LAPLACE,
    LOG2E,
    SEPARATE,
    SIGMOID,
    largest,
    pair_sum,
    row_max,
    row_sum,
)

# far enough to saturate every gate, finite so that -inf scores stay -inf
ALL_ONES = tl.constexpr(-1e30)
# a bracket this many eps wide is left to Newton alone; a wider one is divided after a few Newton steps
NARROW = tl.constexpr(16.0)
STREAK = tl.constexpr(4.0)
# beyond this many eps a threshold is only a place to look at, its digits don't matter
FAR = tl.constexpr(1e4)
# exponents of E stay trustworthy this many eps around its base
WINDOW = tl.constexpr(40.0)
# rounding of fp32, and the Newton step whose square is below it
TINY = tl.constexpr(1.2e-7)
SMALL = tl.constexpr(2e-4)
# terms that underflowed would be missing from a sum as small as this
UNDERFLOWN = tl.constexpr(1e-25)

# passes of a search, and how many of them before it asks for a bracket
MAX_PASSES = tl.constexpr(64)
SWIFT_PASSES = tl.constexpr(10)
# a guess this many eps off is beyond a step without a bracket
REACH = tl.constexpr(16.0)


@triton.jit
def inverse(p, KIND: tl.constexpr):
    """φ⁻¹(p)."""
    if KIND == CAPPED_EXP:
        x = tl.log(p)
    elif KIND == SIGMOID:
        x = tl.log(p) - tl.log(1.0 - p)
    elif KIND == LAPLACE:
        x = tl.where(p < 0.5, tl.log(2.0 * p), -tl.log(2.0 * (1.0 - p)))
    else:
        x = p
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
def begin(pivot, count, total, squares, endless, lo, hi, k, eps, KIND: tl.constexpr):
    """From the first look: bracket and first guess of the search, or the answer where it has a closed form."""
    shift = total / count
    mean = pivot + shift
    variance = tl.maximum(squares / count - shift * shift, 0.0)
    k = tl.where((k > 0) & (eps > 0), k, float("nan"))
    nan = (count != count) | (k != k)
    ones = k >= count + endless
    shared = (endless >= k) & (ones == 0)
    done = tl.where(nan | ones | shared, 1.0, 0.0)
    # equal scores at either end of the row bound the threshold
    edge = inverse((k - endless) / count, KIND)
    # scores as a normal distribution seen through the gate's own noise: a guess, only its distance costs passes
    p = tl.minimum(tl.maximum(k / (count + endless), 1e-6), 1.0 - 1e-6)
    z = 4.91 * (tl.exp2(0.14 * tl.log2(1.0 - p)) - tl.exp2(0.14 * tl.log2(p)))
    if KIND == CAPPED_EXP:
        base = mean + eps + z * tl.sqrt(variance + eps * eps)
    elif KIND == SIGMOID:
        base = mean + z * tl.sqrt(variance + 3.29 * eps * eps)
    elif KIND == LAPLACE:
        base = mean + z * tl.sqrt(variance + 2.0 * eps * eps)
    else:
        base = mean - 0.5 * eps + z * tl.sqrt(variance + 0.083 * eps * eps)
    base = tl.where((base >= lo - edge * eps) & (base <= hi - edge * eps), base, 0.5 * lo + 0.5 * hi - edge * eps)
    share = k / endless
    closed = tl.where(share < 1, -inverse(share, KIND), ALL_ONES)
    c = tl.where(nan, 0.0, tl.where(ones, ALL_ONES, tl.where(shared, closed, 0.0)))
    base = tl.where(ones, tl.where(count > 0, lo, 0.0), tl.where(shared, INF, base))
    base = tl.where(nan, float("nan"), base)
    return base, c, edge, done


@triton.jit
def rebase(base, c, done, eps):
    """The same threshold with a base that is as near as fp32 can say, and c what is missing."""
    moved = base + eps * c
    d = (moved - base) / eps
    left = tl.where(tl.abs(d) < FAR, c - d, 0.0)
    return tl.where(done > 0, base, moved), tl.where(done > 0, c, left)


@triton.jit
def newton(a, b, c, k, n, KIND: tl.constexpr):
    """From the two sums of a pass: Σ gates, size of the saturated set (or Σ slopes), Newton's step for c.

    For capped_exp the sums are of the unsaturated gates and of the saturated entries; else of gates and slopes.
    """
    if KIND == CAPPED_EXP:
        total = a + b
        # exact for this saturated set, and never below the root; with k or more saturated, Newton on the sum itself
        step = tl.where(b < k, tl.log(a) - tl.log(k - b), (total - k) / a)
        step = tl.where(a > 0, step, float("nan"))
    else:
        total = a
        plain = (a - k) / b
        step = plain
        if KIND != CLAMP:
            # the tails are exponential: Newton on the logarithm of the smaller side
            rest = n - a
            step = tl.where(k < 0.5 * n, a / b * tl.log(a / k), -rest / b * tl.log(rest / (n - k)))
            step = tl.where(tl.abs(step) < INF, step, plain)
    return total, b, step


@triton.jit
def advance(
    base, c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done, total, size, step, k, eps, odd,
    KIND: tl.constexpr,
):  # fmt: skip
    """One step of the search: test for arrival, tighten the bracket, Newton where it is trusted, else divide.

    A bracket end is a pair like the threshold itself, so that it keeps its digits when base moves.
    """
    lo = (lo_base - base) / eps + lo_c
    hi = (hi_base - base) / eps + hi_c
    if KIND == CAPPED_EXP:
        arrived = (size < k) & ((size == last) | (step == 0))
    elif KIND == CLAMP:
        arrived = tl.abs(total - k) <= 16 * TINY * k
    else:
        arrived = tl.abs(step) <= SMALL
    arrived = arrived | (hi - lo <= 4 * TINY)
    low = total >= k
    lo = tl.where(low, c, lo)
    lo_base = tl.where(low, base, lo_base)
    lo_c = tl.where(low, c, lo_c)
    f_lo = tl.where(low, total, f_lo)
    hi = tl.where(low, hi, c)
    hi_base = tl.where(low, hi_base, base)
    hi_c = tl.where(low, hi_c, c)
    f_hi = tl.where(low, f_hi, total)
    target = c + step
    if KIND == CAPPED_EXP:
        bound = (size < k) & (target < hi)
        hi = tl.where(bound, target, hi)
        hi_base = tl.where(bound, base, hi_base)
        hi_c = tl.where(bound, target, hi_c)
    # capped_exp steps onto a bound it just made; for the others either end was looked at, going there again is a circle
    slack = 4 * TINY * (1.0 + tl.abs(c)) * (1 if KIND == CAPPED_EXP else -1)
    inside = (target >= lo - slack) & (target <= hi + slack)
    trusted = inside & ((streak < STREAK) | (hi - lo <= NARROW))
    if KIND != CAPPED_EXP:
        # a leap across the bracket is worth less than its middle: from where gates are saturated Newton goes to the
        # other end and back for ever
        trusted = trusted & (tl.abs(step) <= 0.5 * (hi - lo))
    streak = tl.where(trusted, streak + 1, 0.0)
    last = tl.where(trusted & (size < k), size, -1.0)
    between = lo + (hi - lo) * tl.where(odd, (f_lo - k) / (f_lo - f_hi), 0.5)
    finish = tl.where(tl.abs(step) < 1, target, c)
    c = tl.where(done > 0, c, tl.where(arrived, finish, tl.where(trusted, target, between)))
    done = tl.where(arrived, 1.0, done)
    return c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done


@triton.jit
def swift_step(u, raw, b, last, k):
    """One step of the active set on u = e^c, for capped_exp: (next u, whether it may be trusted, whether it is exact).

    Raw is the sum of the unsaturated entries of E, b the number of the saturated ones, last that of the step before.
    """
    newton = u * tl.exp2(tl.minimum((raw + (b - k) * u) / raw, REACH) * LOG2E)
    new = tl.where(b < k, raw / (k - b), newton)
    good = (raw > UNDERFLOWN) & (new < 1e17) & (new > 1e-17)
    return new, good, good & (b < k) & (b == last)
