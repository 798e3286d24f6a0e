"""Triton kernels of soft_topk and their launchers.

Every kind is solved by the same search for one threshold (base, c), y = φ((s - base)/eps - c): a pass over the row
gives two sums, `advance` turns them into the next threshold. Short rows make their passes in registers; long ones as a
bounded sequence of launches, in which the programs of a row share partial sums and the host never looks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, device_guard, next_power_of_2

from .kernels_common import (
    CAPPED_EXP,
    CLAMP,
    HALF_PER_WARP,
    INF,
    LAPLACE,
    LOG2E,
    SEPARATE,
    SIGMOID,
    Shape,
    gates_and_slopes,
    largest,
    load_option,
    load_scores,
    offsets,
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

MAX_PASSES = tl.constexpr(64)
# launches of the search in long rows; each costs little once the row is solved
LONG_PASSES = 40
# longest row held in registers: the kinds without a shared exponential also hold the scores
LONGEST = (32768, 16384, 16384, 16384)
# beyond this the scores of a row need all registers
CROWDED = 8192
N_STATE = tl.constexpr(12)


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
def combine_ends(n0, sum0, endless0, lo0, hi0, n1, sum1, endless1, lo1, hi1):
    return n0 + n1, sum0 + sum1, endless0 + endless1, tl.minimum(lo0, lo1), tl.maximum(hi0, hi1)


@triton.jit
def ends(s, BLOCK_R: tl.constexpr):
    """Of each row: finite entries (NaN if one is NaN), their sum, +inf entries, smallest and largest finite entry."""
    finite = tl.abs(s) < INF
    n = tl.where(s != s, s, tl.where(finite, 1.0, 0.0))
    total = tl.where(finite, s, 0.0)
    endless = tl.where(s == INF, 1.0, 0.0)
    lo = tl.where(finite, s, INF)
    hi = tl.where(finite, s, -INF)
    if SEPARATE:
        n, total, endless = row_sum(n, BLOCK_R), row_sum(total, BLOCK_R), row_sum(endless, BLOCK_R)
        lo, hi = -row_max(-lo, BLOCK_R), row_max(hi, BLOCK_R)
    elif BLOCK_R > 1:
        n, total, endless, lo, hi = tl.reduce((n, total, endless, lo, hi), 1, combine_ends, keep_dims=True)
    else:
        n, total, endless, lo, hi = tl.reduce((n, total, endless, lo, hi), 0, combine_ends)
    return n, total, endless, lo, hi


@triton.jit
def begin(count, mean, variance, endless, lo, hi, k, eps, KIND: tl.constexpr):
    """Bracket and first guess of the search, or the answer where it has a closed form."""
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
    streak = tl.where(trusted, streak + 1, 0.0)
    last = tl.where(trusted & (size < k), size, -1.0)
    between = lo + (hi - lo) * tl.where(odd, (f_lo - k) / (f_lo - f_hi), 0.5)
    finish = tl.where(tl.abs(step) < 1, target, c)
    c = tl.where(done > 0, c, tl.where(arrived, finish, tl.where(trusted, target, between)))
    done = tl.where(arrived, 1.0, done)
    return c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done


@triton.jit
def forward_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    eps_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    solution_ptr,  # (n_rows, 2) fp32: base and c
    s_row_stride,
    k_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k_value,
    eps_value,
    KIND: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Whole rows in registers.

    capped_exp keeps E = exp((s - base)/eps) there instead of the scores: its passes need no exponential, and the
    scores are read again (from L2) in the rare case that the threshold leaves E's range.
    """
    rows = tile_rows(BLOCK_R)
    cols = tile_cols(0, BLOCK_R, BLOCK_C)
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows, HAS_EPS)
    s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R)
    count, total, endless, lo_base, hi_base = ends(s, BLOCK_R)
    mean = total / count
    centred = tl.where(tl.abs(s) < INF, s - mean, 0.0)
    base, c, edge, done = begin(
        count, mean, row_sum(centred * centred, BLOCK_R) / count, endless, lo_base, hi_base, k, eps, KIND
    )
    n = count + endless
    lo_c = -edge
    hi_c = -edge
    f_lo = n
    f_hi = endless
    last = tl.zeros_like(k) - 1.0
    streak = tl.zeros_like(k)
    if KIND == CAPPED_EXP:
        s = tl.exp2(offsets(s, base, eps) * LOG2E)
        # rows of all ones have their smallest score as base; any scale does, but inf would meet the zeros of the mask
        u = tl.exp2(tl.maximum(c * LOG2E, -100.0))
    i = 0
    left = largest(1.0 - done, BLOCK_R)
    while (i < MAX_PASSES) & (left > 0):
        if KIND == CAPPED_EXP:
            leaves = tl.where((done == 0) & (tl.abs(c) > WINDOW), 1, 0)
            if largest(leaves, BLOCK_R) > 0:
                moved, rest = rebase(base, c, done, eps)
                base = tl.where(leaves > 0, moved, base)
                c = tl.where(leaves > 0, rest, c)
                s = load_scores(
                    s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R
                )
                s = tl.exp2(offsets(s, base, eps) * LOG2E)
                u = tl.where(leaves > 0, tl.exp2(c * LOG2E), u)
            saturated = s > u
            raw, b = pair_sum(tl.where(saturated, 0.0, s), tl.where(saturated, 1.0, 0.0), BLOCK_R)
            a = tl.where(raw > UNDERFLOWN, raw / u, 0.0)
        else:
            base, c = rebase(base, c, done, eps)
            y, w = gates_and_slopes((s - base) * (1.0 / eps) - c, KIND)
            a, b = pair_sum(y, w, BLOCK_R)
        total, size, step = newton(a, b, c, k, n, KIND)
        target = tl.where((done == 0) & (size < k), c + step, float("nan"))
        free = done == 0
        c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done = advance(
            base, c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done, total, size, step, k, eps,
            i % 2 == 1, KIND,
        )  # fmt: skip
        if KIND == CAPPED_EXP:
            # e^c, but a Newton step never went through the logarithm: rows sum to k to the last digits
            u = tl.where(free, tl.where(c == target, raw / (k - b), tl.exp2(c * LOG2E)), u)
        i += 1
        left = largest(1.0 - done, BLOCK_R)
    if KIND == CAPPED_EXP:
        y = s * (1.0 / u)
        y = tl.where(y > 1.0, 1.0, y)
    else:
        y, w = gates_and_slopes(offsets(s, base, eps) - c, KIND)
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(solution_ptr + rows * 2, base, mask=rows < n_rows)
    tl.store(solution_ptr + rows * 2 + 1, c, mask=rows < n_rows)


@triton.jit
def ends_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    partial_ptr,  # (n_rows, n_splits, 6) fp32: finite entries, sum, +inf entries, smallest, largest, Σ squares
    s_row_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    chunk,
    HAS_MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Long rows, first look: one chunk of one row per program; sums are of s - (the row's first score)."""
    rows = tile_rows(1)
    pivot = tl.load(s_ptr + rows * s_row_stride).to(tl.float32)
    pivot = tl.where(tl.abs(pivot) < INF, pivot, 0.0)
    n = 0.0
    total = 0.0
    endless = 0.0
    squares = 0.0
    lo = INF
    hi = -INF
    for tile in range(0, chunk, BLOCK_C):
        cols = tl.program_id(1) * chunk + tile + tl.arange(0, BLOCK_C)
        s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        n1, _, endless1, lo1, hi1 = ends(s, 1)
        moved = tl.where(tl.abs(s) < INF, s - pivot, 0.0)
        total1, squares1 = pair_sum(moved, moved * moved, 1)
        n, total, endless, lo, hi = combine_ends(n, total, endless, lo, hi, n1, total1, endless1, lo1, hi1)
        squares += squares1
    out = partial_ptr + (rows * tl.num_programs(1) + tl.program_id(1)) * 6
    tl.store(out, n)
    tl.store(out + 1, total)
    tl.store(out + 2, endless)
    tl.store(out + 3, lo)
    tl.store(out + 4, hi)
    tl.store(out + 5, squares)


@triton.jit
def pass_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    eps_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous; written by the last pass
    solution_ptr,  # (n_rows, 2) fp32: base and c; written by the last pass
    ends_ptr,  # (n_rows, n_splits, 6) fp32: from ends_kernel
    state_ptr,  # (2, n_rows, N_STATE) fp32; read from one half, written to the other
    partial_ptr,  # (2, n_rows, n_splits, 2) fp32: the two sums of a pass, likewise
    s_row_stride,
    k_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    chunk,
    k_value,
    eps_value,
    turn,
    KIND: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Long rows, one pass: every program of a row takes the same step from all partial sums, then adds its own."""
    split = tl.program_id(1)
    n_splits = tl.num_programs(1)
    rows = tile_rows(1)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows, HAS_EPS)
    here = tl.arange(0, N_SPLITS)
    there = here < n_splits
    read, write = turn % 2, (turn + 1) % 2
    if FIRST:
        partial = ends_ptr + (rows * n_splits + here) * 6
        count = tl.sum(tl.load(partial, mask=there, other=0.0), 0)
        shift = tl.sum(tl.load(partial + 1, mask=there, other=0.0), 0) / count
        endless = tl.sum(tl.load(partial + 2, mask=there, other=0.0), 0)
        lo_base = tl.min(tl.load(partial + 3, mask=there, other=float("inf")), 0)
        hi_base = tl.max(tl.load(partial + 4, mask=there, other=-float("inf")), 0)
        squares = tl.sum(tl.load(partial + 5, mask=there, other=0.0), 0) / count
        pivot = tl.load(s_ptr + rows * s_row_stride).to(tl.float32)
        mean = shift + tl.where(tl.abs(pivot) < INF, pivot, 0.0)
        variance = tl.maximum(squares - shift * shift, 0.0)
        base, c, edge, done = begin(count, mean, variance, endless, lo_base, hi_base, k, eps, KIND)
        n = count + endless
        lo_c = -edge
        hi_c = -edge
        f_lo = n
        f_hi = endless
        last = -1.0
        streak = 0.0
    else:
        state = state_ptr + (read * n_rows + rows) * N_STATE
        base = tl.load(state)
        c = tl.load(state + 1)
        lo_base = tl.load(state + 2)
        lo_c = tl.load(state + 3)
        hi_base = tl.load(state + 4)
        hi_c = tl.load(state + 5)
        f_lo = tl.load(state + 6)
        f_hi = tl.load(state + 7)
        last = tl.load(state + 8)
        streak = tl.load(state + 9)
        done = tl.load(state + 10)
        n = tl.load(state + 11)
        partial = partial_ptr + ((read * n_rows + rows) * n_splits + here) * 2
        a = tl.sum(tl.load(partial, mask=there, other=0.0), 0)
        b = tl.sum(tl.load(partial + 1, mask=there, other=0.0), 0)
        total, size, step = newton(a, b, c, k, n, KIND)
        c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done = advance(
            base, c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done, total, size, step, k, eps,
            turn % 2 == 0, KIND,
        )  # fmt: skip
    base, c = rebase(base, c, done, eps)
    if LAST:
        for tile in range(0, chunk, BLOCK_C):
            cols = split * chunk + tile + tl.arange(0, BLOCK_C)
            s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
            y, w = gates_and_slopes(offsets(s, base, eps) - c, KIND)
            out = y_ptr + rows * n_cols + cols
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)
        if split == 0:
            tl.store(solution_ptr + rows * 2, base)
            tl.store(solution_ptr + rows * 2 + 1, c)
    else:
        if split == 0:
            state = state_ptr + (write * n_rows + rows) * N_STATE
            tl.store(state, base)
            tl.store(state + 1, c)
            tl.store(state + 2, lo_base)
            tl.store(state + 3, lo_c)
            tl.store(state + 4, hi_base)
            tl.store(state + 5, hi_c)
            tl.store(state + 6, f_lo)
            tl.store(state + 7, f_hi)
            tl.store(state + 8, last)
            tl.store(state + 9, streak)
            tl.store(state + 10, done)
            tl.store(state + 11, n)
        # a solved row reads its (stale) sums no more
        if done == 0:
            a = 0.0
            b = 0.0
            for tile in range(0, chunk, BLOCK_C):
                cols = split * chunk + tile + tl.arange(0, BLOCK_C)
                s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
                x = (s - base) * (1.0 / eps) - c
                y, w = gates_and_slopes(x, KIND)
                if KIND == CAPPED_EXP:
                    y, w = w, tl.where(x > 0, 1.0, 0.0)
                a1, b1 = pair_sum(y, w, 1)
                a += a1
                b += b1
            if KIND == CAPPED_EXP:
                a = tl.where(a > UNDERFLOWN, a, 0.0)
            out = partial_ptr + ((write * n_rows + rows) * n_splits + split) * 2
            tl.store(out, a)
            tl.store(out + 1, b)


def forward_shape(n_rows: int, n_cols: int, kind: int) -> Shape:
    """The launch of the forward pass."""
    crowded = n_cols > CROWDED and kind != CAPPED_EXP.value
    return shape(n_rows, n_cols, HALF_PER_WARP * (2 if crowded else 1), LONGEST[kind])


def forward(
    s: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None, k_value: float, eps_value: float, kind: int
) -> tuple[Tensor, Tensor]:
    """S (rows, n) with unit column stride → gates (rows, n), solution (rows, 2)."""
    n_rows, n_cols = s.shape
    y = torch.empty((n_rows, n_cols), dtype=s.dtype, device=s.device)
    solution = scratch(s, n_rows, 2)
    if not y.numel():
        return y, solution.zero_()
    plan = forward_shape(n_rows, n_cols, kind)
    flags = {"KIND": kind, "HAS_K": k is not None, "HAS_EPS": eps is not None, "HAS_MASK": mask is not None}
    strides = (s.stride(0), stride(k), stride(eps), stride(mask))
    with device_guard(s):
        if plan.splits == 1:
            forward_kernel[(plan.programs,)](
                s, k, eps, mask, y, solution, *strides, n_rows, n_cols, k_value, eps_value, **flags,
                BLOCK_R=plan.block_r, BLOCK_C=plan.block_c, num_warps=plan.warps, **OPTIONS,
            )  # fmt: skip
            return y, solution
        grid = (n_rows, plan.splits)
        first_look = scratch(s, n_rows, plan.splits, 6)
        state = scratch(s, 2, n_rows, N_STATE.value)
        partial = scratch(s, 2, n_rows, plan.splits, 2)
        ends_kernel[grid](
            s, mask, first_look, s.stride(0), stride(mask), n_rows, n_cols, plan.chunk, HAS_MASK=mask is not None,
            BLOCK_C=plan.block_c, num_warps=plan.warps, **OPTIONS,
        )  # fmt: skip
        for turn in range(LONG_PASSES + 1):
            pass_kernel[grid](
                s, k, eps, mask, y, solution, first_look, state, partial, *strides, n_rows, n_cols, plan.chunk,
                k_value, eps_value, turn, **flags, FIRST=turn == 0, LAST=turn == LONG_PASSES,
                N_SPLITS=next_power_of_2(plan.splits), BLOCK_C=plan.block_c, num_warps=plan.warps, **OPTIONS,
            )  # fmt: skip
    return y, solution
