"""Triton kernels of soft_topk and their launchers.

Short rows make their passes in registers. A long row is shared by a team of programs that all run at once: each holds
a chunk in registers, and they exchange partial sums through memory. Where that can't be (rows beyond the registers of
the whole GPU, no cooperative launches), a row takes a bounded sequence of launches, and the host never looks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, device_guard, launch, next_power_of_2

from .kernels_common import (
    CAPPED_EXP,
    CLAMP,
    HALF_PER_WARP,
    INF,
    LOG2E,
    PER_WARP,
    SIZES,
    Shape,
    fetch,
    gates_and_slopes,
    largest,
    load_option,
    load_scores,
    offsets,
    pair_sum,
    post,
    resident,
    scratch,
    shape,
    stride,
    team_of,
    tile_cols,
    tile_rows,
    within,
)
from .kernels_search import (
    MAX_PASSES,
    REACH,
    SMALL,
    SWIFT_PASSES,
    TINY,
    UNDERFLOWN,
    WINDOW,
    advance,
    begin,
    first_look,
    load_pivot,
    newton,
    rebase,
    swift_step,
)

# launches of the search in long rows; each costs little once the row is solved
LONG_PASSES = 64
# longest row held in the registers of one program: the kinds without a shared exponential also hold the scores
LONGEST = (32768, 16384, 16384, 16384)
# beyond this a warp holds twice as much, so that several rows fit
CROWDED = 4096
# columns of a program of a team, its warps, programs per multiprocessor
TEAM = (8192, 8, 2)
N_STATE = tl.constexpr(12)


@triton.jit(do_not_specialize=SIZES)
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
    VEC: tl.constexpr,
):
    """Whole rows in registers.

    capped_exp keeps E = exp((s - base)/eps) there instead of the scores: its passes need no exponential, and the
    scores are read again (from L2) in the rare case that the threshold leaves E's range.
    """
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    rows = tile_rows(BLOCK_R)
    cols = tile_cols(0, BLOCK_R, BLOCK_C)
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows, HAS_EPS)
    s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R)
    pivot = load_pivot(s_ptr, rows, s_row_stride, n_rows)
    count, total, squares, endless, lo_base, hi_base = first_look(s, pivot, BLOCK_R)
    base, c, edge, done = begin(pivot, count, total, squares, endless, lo_base, hi_base, k, eps, KIND)
    n = count + endless
    # nearly every row is solved by steps that need no bracket
    swift = 1.0 - done
    i = 0
    if KIND == CAPPED_EXP:
        s = tl.exp2(offsets(s, base, eps) * LOG2E)
        # rows of all ones have their smallest score as base; any scale does, but inf would meet the zeros of the mask
        u = tl.exp2(tl.maximum(c * LOG2E, -100.0))
        last = tl.zeros_like(k) - 1.0
        while (i < SWIFT_PASSES) & (largest(swift, BLOCK_R) > 0):
            saturated = s > u
            raw, b = pair_sum(tl.where(saturated, 0.0, s), tl.where(saturated, 1.0, 0.0), BLOCK_R)
            new, good, exact = swift_step(u, raw, b, last, k)
            good = good & (swift > 0)
            u = tl.where(good, new, u)
            c = tl.where(good, tl.log(u), c)
            last = tl.where(b < k, b, -1.0)
            done = tl.where(good & exact, 1.0, done)
            swift = tl.where(good & (exact == 0), 1.0, 0.0)
            i += 1
    else:
        while (i < SWIFT_PASSES) & (largest(swift, BLOCK_R) > 0):
            base, c = rebase(base, c, done, eps)
            y, w = gates_and_slopes((s - base) * (1.0 / eps) - c, KIND)
            a, b = pair_sum(y, w, BLOCK_R)
            total, size, step = newton(a, b, c, k, n, KIND)
            good = (swift > 0) & (tl.abs(step) < REACH)
            c = tl.where(good, c + step, c)
            if KIND == CLAMP:
                exact = good & (tl.abs(total - k) <= 16 * TINY * k)
            else:
                exact = good & (tl.abs(step) <= SMALL)
            done = tl.where(exact, 1.0, done)
            swift = tl.where(good & (exact == 0), 1.0, 0.0)
            i += 1
    lo_c = -edge
    hi_c = -edge
    f_lo = n
    f_hi = endless
    last = tl.zeros_like(k) - 1.0
    streak = tl.zeros_like(k)
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
            i % 3 == 1, KIND,
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


@triton.jit(do_not_specialize=SIZES)
def team_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    eps_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    solution_ptr,  # (n_rows, 2) fp32: base and c
    words_ptr,  # (teams, 10, TEAM) int64, zero: twice four words of a first look, twice the two sums of a pass
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
    TEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows: forward_kernel for a team of programs, each with its chunk of the row; all take the same steps."""
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    team = tl.program_id(0) // TEAM
    member = tl.program_id(0) % TEAM
    words_ptr += team * (10 * TEAM)
    cols = member * BLOCK_C + tl.arange(0, BLOCK_C)
    visit = 0
    turn = 0
    for index in range(team, n_rows, tl.num_programs(0) // TEAM):
        row = tl.cast(index, tl.int64)
        k = load_option(k_ptr, k_stride, k_value, row, n_rows, HAS_K)
        eps = load_option(eps_ptr, eps_stride, eps_value, row, n_rows, HAS_EPS)
        s = load_scores(s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        pivot = load_pivot(s_ptr, row, s_row_stride, n_rows)
        count, total, squares, endless, lo_base, hi_base = first_look(s, pivot, 1)
        words = words_ptr + (visit % 2) * (4 * TEAM)
        post(words + member, count, endless, visit)
        post(words + TEAM + member, total, squares, visit)
        post(words + 2 * TEAM + member, lo_base, endless, visit)
        post(words + 3 * TEAM + member, hi_base, endless, visit)
        here = tl.arange(0, WIDTH) < TEAM
        counts, endlesses = fetch(words, visit, TEAM, WIDTH)
        totals, squareses = fetch(words + TEAM, visit, TEAM, WIDTH)
        los, _ = fetch(words + 2 * TEAM, visit, TEAM, WIDTH)
        his, _ = fetch(words + 3 * TEAM, visit, TEAM, WIDTH)
        visit += 1
        count = tl.sum(tl.where(here, counts, 0.0), 0)
        endless = tl.sum(tl.where(here, endlesses, 0.0), 0)
        total = tl.sum(tl.where(here, totals, 0.0), 0)
        squares = tl.sum(tl.where(here, squareses, 0.0), 0)
        lo_base = tl.min(los, 0)
        hi_base = tl.max(his, 0)
        base, c, edge, done = begin(pivot, count, total, squares, endless, lo_base, hi_base, k, eps, KIND)
        n = count + endless
        lo_c = -edge
        hi_c = -edge
        f_lo = n
        f_hi = endless
        last = tl.zeros_like(k) - 1.0
        streak = tl.zeros_like(k)
        if KIND == CAPPED_EXP:
            s = tl.exp2(offsets(s, base, eps) * LOG2E)
            u = tl.exp2(tl.maximum(c * LOG2E, -100.0))
        i = 0
        while (i < MAX_PASSES) & (done == 0):
            if KIND == CAPPED_EXP:
                if tl.abs(c) > WINDOW:
                    base, c = rebase(base, c, done, eps)
                    s = load_scores(
                        s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1
                    )
                    s = tl.exp2(offsets(s, base, eps) * LOG2E)
                    u = tl.exp2(c * LOG2E)
                saturated = s > u
                raw, b = pair_sum(tl.where(saturated, 0.0, s), tl.where(saturated, 1.0, 0.0), 1)
            else:
                base, c = rebase(base, c, done, eps)
                y, w = gates_and_slopes((s - base) * (1.0 / eps) - c, KIND)
                raw, b = pair_sum(y, w, 1)
            words = words_ptr + (8 + turn % 2) * TEAM
            post(words + member, raw, b, turn)
            raws, bs = fetch(words, turn, TEAM, WIDTH)
            turn += 1
            raw = tl.sum(tl.where(here, raws, 0.0), 0)
            b = tl.sum(tl.where(here, bs, 0.0), 0)
            a = raw
            if KIND == CAPPED_EXP:
                a = tl.where(raw > UNDERFLOWN, raw / u, 0.0)
            total, size, step = newton(a, b, c, k, n, KIND)
            target = tl.where(size < k, c + step, float("nan"))
            c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done = advance(
                base, c, lo_base, lo_c, hi_base, hi_c, f_lo, f_hi, last, streak, done, total, size, step, k, eps,
                i % 3 == 1, KIND,
            )  # fmt: skip
            if KIND == CAPPED_EXP:
                u = tl.where(c == target, raw / (k - b), tl.exp2(c * LOG2E))
            i += 1
        if KIND == CAPPED_EXP:
            y = s * (1.0 / u)
            y = tl.where(y > 1.0, 1.0, y)
        else:
            y, w = gates_and_slopes(offsets(s, base, eps) - c, KIND)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)
        if member == 0:
            tl.store(solution_ptr + row * 2, base)
            tl.store(solution_ptr + row * 2 + 1, c)


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
    pivot = load_pivot(s_ptr, rows, s_row_stride, n_rows)
    n = 0.0
    total = 0.0
    endless = 0.0
    squares = 0.0
    lo = INF
    hi = -INF
    for tile in range(0, chunk, BLOCK_C):
        cols = tl.program_id(1) * chunk + tile + tl.arange(0, BLOCK_C)
        s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        n1, total1, squares1, endless1, lo1, hi1 = first_look(s, pivot, 1)
        n += n1
        total += total1
        squares += squares1
        endless += endless1
        lo = tl.minimum(lo, lo1)
        hi = tl.maximum(hi, hi1)
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
        total = tl.sum(tl.load(partial + 1, mask=there, other=0.0), 0)
        endless = tl.sum(tl.load(partial + 2, mask=there, other=0.0), 0)
        lo_base = tl.min(tl.load(partial + 3, mask=there, other=float("inf")), 0)
        hi_base = tl.max(tl.load(partial + 4, mask=there, other=-float("inf")), 0)
        squares = tl.sum(tl.load(partial + 5, mask=there, other=0.0), 0)
        pivot = load_pivot(s_ptr, rows, s_row_stride, n_rows)
        base, c, edge, done = begin(pivot, count, total, squares, endless, lo_base, hi_base, k, eps, KIND)
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
            turn % 3 == 0, KIND,
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
    return shape(n_rows, n_cols, PER_WARP if n_cols > CROWDED else HALF_PER_WARP, LONGEST[kind])


def forward_options(plan: Shape, kind: int) -> dict[str, Any]:
    """Launch options of the forward pass: wide rows wait for each other less when several are there at once."""
    per_sm = {8192: 3, 16384: 2}.get(plan.block_c, 0)
    # the steps of clamp need more registers
    if per_sm == 0 or kind == CLAMP.value:
        return {"num_warps": plan.warps}
    return resident(plan.warps, per_sm)


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
    vec = math.gcd(16, n_cols, strides[0], strides[3])
    numbers = (strides[0] // vec, *strides[1:3], strides[3] // vec, n_rows, n_cols // vec, k_value, eps_value)
    with device_guard(s):
        if plan.splits == 1:
            launch(
                forward_kernel, (plan.programs, 1, 1), (s, k, eps, mask, y, solution), numbers,
                (*flags.values(), plan.block_r, plan.block_c, vec), **forward_options(plan, kind),
            )  # fmt: skip
            return y, solution
        team = team_of(s, *TEAM)
        if team is not None:
            words = torch.zeros(team.teams * 10 * team.size, dtype=torch.int64, device=s.device)
            launch(
                team_kernel, (team.teams * team.size, 1, 1), (s, k, eps, mask, y, solution, words), numbers,
                (*flags.values(), team.size, next_power_of_2(team.size), team.block_c, vec), **team.options,
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
