"""Triton kernels of coor_descent and their launchers.

A row's whole state is the threshold -a, kept as ref + off with ref near it. With E = exp((s - ref)/eps) in registers a
step is one clipped sum, u ← Σ min(E, u)/k: no exponential until eps changes or the threshold leaves E's range.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, cdiv, device_guard, launch, next_power_of_2

from .kernels_common import (
    HALF_PER_WARP,
    INF,
    LOG2E,
    PER_WARP,
    SIZES,
    TILE,
    fetch,
    largest,
    load_gradient,
    load_option,
    load_scores,
    pair_sum,
    post,
    resident,
    row_max,
    row_sum,
    scratch,
    shape,
    stride,
    team_of,
    tile_cols,
    tile_rows,
    within,
)

# exponents of E stay trustworthy this many eps around its ref
WINDOW = tl.constexpr(40.0)
# columns of a program of a team, its warps, programs per multiprocessor
TEAM = (16384, 8, 2)
# longest row that one program holds in registers
FORWARD_MAX_COLS = 32768
# backward holds three numbers per element
BACKWARD_MAX_COLS = 16384


@triton.jit
def epsilon(t, first, log2_decay, last):
    """Eps of step t, counted from 0; an exact `first` without decay, an exact `last` once there."""
    return tl.maximum(first * tl.exp2(t * log2_decay), last)


@triton.jit
def count_and_top(s, BLOCK_R: tl.constexpr):
    """How many entries may be chosen (NaN when one of them is), and the largest of them."""
    ones = tl.where(s != s, s, tl.where(s > -INF, 1.0, 0.0))
    return row_sum(ones, BLOCK_R), row_max(s, BLOCK_R)


@triton.jit
def first_threshold(valid, top, k, eps):
    """(ref, off, top): a_1 does not depend on the scores; ref stays at or below the largest of them."""
    k = tl.where(k > 0, k, float("nan"))
    threshold = eps * tl.log(tl.maximum(valid, 1.0, propagate_nan=tl.PropagateNan.ALL) / k)
    top = tl.where((valid > 0) & (threshold == threshold), top, threshold)
    ref = tl.minimum(top, threshold, propagate_nan=tl.PropagateNan.ALL)
    return ref, threshold - ref, top


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous, or nothing
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k_value,
    n_iters,
    eps_first,
    eps_last,
    log2_decay,
    HAS_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TRACE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Whole rows in registers: E alone; the scores are read again (from L2) when E has to be made anew."""
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    rows = tile_rows(BLOCK_R)
    cols = tile_cols(0, BLOCK_R, BLOCK_C)
    s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    eps = epsilon(0, eps_first, log2_decay, eps_last)
    valid, top = count_and_top(s, BLOCK_R)
    ref, off, top = first_threshold(valid, top, k, eps)
    start = ref
    trace = trace_ptr + rows * (2 * n_iters)
    if TRACE:
        tl.store(trace, off, mask=rows < n_rows)
        tl.store(trace + 2 * n_iters - 1, start, mask=rows < n_rows)
    e = tl.exp2((s - ref) * (LOG2E / eps))
    for t in range(1, n_iters + 1):
        fresh = epsilon(t, eps_first, log2_decay, eps_last)
        moved = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
        leaves = tl.where(fresh != eps, 1, ((tl.abs(off) > WINDOW * eps) & (moved != ref)).to(tl.int32))
        eps = fresh
        if largest(leaves, BLOCK_R) > 0:
            off = tl.where(leaves > 0, (ref - moved) + off, off)
            ref = tl.where(leaves > 0, moved, ref)
            s = load_scores(
                s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R
            )
            e = tl.exp2((s - ref) * (LOG2E / eps))
        if t < n_iters:
            u = tl.exp2(off * (LOG2E / eps))
            clipped = tl.minimum(e, u, propagate_nan=tl.PropagateNan.ALL)
            if TRACE:
                total, saturated = pair_sum(clipped, tl.where(e > u, 1.0, 0.0), BLOCK_R)
                tl.store(trace + n_iters + t - 1, saturated, mask=rows < n_rows)
            else:
                total = row_sum(clipped, BLOCK_R)
            off = eps * tl.log(tl.where(valid == 0, k, total) / k)
            if TRACE:
                tl.store(trace + t, (ref - start) + off, mask=rows < n_rows)
    y = e * tl.exp2(-off * (LOG2E / eps))
    y = tl.where(y > 1.0, 1.0, y)
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def team_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous, or nothing
    words_ptr,  # (teams, 4, TEAM) int64, zero: twice a first look, twice the sums of a step
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k_value,
    n_iters,
    eps_first,
    eps_last,
    log2_decay,
    HAS_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TRACE: tl.constexpr,
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
    words_ptr += team * (4 * TEAM)
    cols = member * BLOCK_C + tl.arange(0, BLOCK_C)
    here = tl.arange(0, WIDTH) < TEAM
    visit = 0
    turn = 0
    for index in range(team, n_rows, tl.num_programs(0) // TEAM):
        row = tl.cast(index, tl.int64)
        k = load_option(k_ptr, k_stride, k_value, row, n_rows, HAS_K)
        s = load_scores(s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        valid, top = count_and_top(s, 1)
        words = words_ptr + (visit % 2) * TEAM
        post(words + member, top, valid, visit)
        tops, valids = fetch(words, visit, TEAM, WIDTH)
        visit += 1
        valid = tl.sum(tl.where(here, valids, 0.0), 0)
        eps = epsilon(0, eps_first, log2_decay, eps_last)
        ref, off, top = first_threshold(valid, tl.max(tops, 0), k, eps)
        start = ref
        trace = trace_ptr + row * (2 * n_iters)
        if TRACE:
            if member == 0:
                tl.store(trace, off)
                tl.store(trace + 2 * n_iters - 1, start)
        e = tl.exp2((s - ref) * (LOG2E / eps))
        for t in range(1, n_iters + 1):
            fresh = epsilon(t, eps_first, log2_decay, eps_last)
            moved = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
            leaves = (fresh != eps) | ((tl.abs(off) > WINDOW * eps) & (moved != ref))
            eps = fresh
            if leaves:
                off = (ref - moved) + off
                ref = moved
                s = load_scores(s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
                e = tl.exp2((s - ref) * (LOG2E / eps))
            if t < n_iters:
                u = tl.exp2(off * (LOG2E / eps))
                clipped = tl.minimum(e, u, propagate_nan=tl.PropagateNan.ALL)
                total, saturated = pair_sum(clipped, tl.where(e > u, 1.0, 0.0), 1)
                words = words_ptr + (2 + turn % 2) * TEAM
                post(words + member, total, saturated, turn)
                totals, saturateds = fetch(words, turn, TEAM, WIDTH)
                turn += 1
                total = tl.sum(tl.where(here, totals, 0.0), 0)
                off = eps * tl.log(tl.where(valid == 0, k, total) / k)
                if TRACE:
                    if member == 0:
                        tl.store(trace + n_iters + t - 1, tl.sum(tl.where(here, saturateds, 0.0), 0))
                        tl.store(trace + t, (ref - start) + off)
        y = e * tl.exp2(-off * (LOG2E / eps))
        y = tl.where(y > 1.0, 1.0, y)
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def ends_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    partial_ptr,  # (n_rows, n_splits, 2) fp32: valid entries, largest score
    s_row_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    chunk,
    HAS_MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Long rows, first look: one chunk of one row per program."""
    rows = tile_rows(1)
    valid = 0.0
    top = -INF
    for tile in range(0, chunk, BLOCK_C):
        cols = tl.program_id(1) * chunk + tile + tl.arange(0, BLOCK_C)
        s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        count, highest = count_and_top(s, 1)
        valid += count
        top = tl.maximum(top, highest)
    out = partial_ptr + (rows * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(out, valid)
    tl.store(out + 1, top)


@triton.jit
def step_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    y_ptr,  # (n_rows, n_cols) like s, contiguous; written by the last step
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous, or nothing
    state_ptr,  # (2, n_rows, 5) fp32: ref, off, start, top, valid entries; read from one half, written to the other
    partial_ptr,  # (2, n_rows, n_splits, 2) fp32: Σ min(E, u) and saturated entries, likewise
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    chunk,
    k_value,
    t,
    n_iters,
    eps_before,
    eps,
    HAS_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TRACE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Long rows, step t: every program finishes the last step from all partial sums, then adds its own to the next."""
    split = tl.program_id(1)
    n_splits = tl.num_programs(1)
    rows = tile_rows(1)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    read, write = (t - 1) % 2, t % 2
    here = tl.arange(0, N_SPLITS)
    partial = partial_ptr + ((read * n_rows + rows) * n_splits + here) * 2
    first = tl.load(partial, mask=here < n_splits, other=0.0)
    second = tl.load(partial + 1, mask=here < n_splits, other=-INF if FIRST else 0.0)
    trace = trace_ptr + rows * (2 * n_iters)
    if FIRST:
        valid, top = tl.sum(first, 0), tl.max(second, 0)
        ref, off, top = first_threshold(valid, top, k, eps_before)
        start = ref
        if TRACE and split == 0:
            tl.store(trace + 2 * n_iters - 1, start)
    else:
        state = state_ptr + (read * n_rows + rows) * 5
        ref = tl.load(state)
        start = tl.load(state + 2)
        top = tl.load(state + 3)
        valid = tl.load(state + 4)
        total, saturated = tl.sum(first, 0), tl.sum(second, 0)
        off = eps_before * tl.log(tl.where(valid == 0, k, total) / k)
        if TRACE and split == 0:
            tl.store(trace + n_iters + t - 2, saturated)
    if TRACE and split == 0:
        tl.store(trace + t - 1, (ref - start) + off)
    moved = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
    off = (ref - moved) + off
    ref = moved
    u = tl.exp2(off * (LOG2E / eps))
    if LAST:
        scale = tl.exp2(-off * (LOG2E / eps))
        for tile in range(0, chunk, BLOCK_C):
            cols = split * chunk + tile + tl.arange(0, BLOCK_C)
            s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
            y = tl.exp2((s - ref) * (LOG2E / eps)) * scale
            y = tl.where(y > 1.0, 1.0, y)
            out = y_ptr + rows * n_cols + cols
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)
    else:
        total = 0.0
        saturated = 0.0
        for tile in range(0, chunk, BLOCK_C):
            cols = split * chunk + tile + tl.arange(0, BLOCK_C)
            s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
            e = tl.exp2((s - ref) * (LOG2E / eps))
            clipped = tl.minimum(e, u, propagate_nan=tl.PropagateNan.ALL)
            a, b = pair_sum(clipped, tl.where(e > u, 1.0, 0.0), 1)
            total += a
            saturated += b
        out = partial_ptr + ((write * n_rows + rows) * n_splits + split) * 2
        tl.store(out, total)
        tl.store(out + 1, saturated)
        if split == 0:
            state = state_ptr + (write * n_rows + rows) * 5
            tl.store(state, ref)
            tl.store(state + 1, off)
            tl.store(state + 2, start)
            tl.store(state + 3, top)
            tl.store(state + 4, valid)


@triton.jit
def last_gradient(z, gy, level, eps):
    """What reaches s + a_T: the gradient of the unsaturated gates."""
    x = (z - level) * (LOG2E / eps)
    y = tl.exp2(x)
    return tl.where((x <= 0) & (y > 0), gy * y, 0.0) * (1.0 / eps)


@triton.jit(do_not_specialize=SIZES)
def gradient_sum_kernel(
    gy_ptr,  # (n_rows, n_cols) any float, unit column stride
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous
    partial_ptr,  # (n_rows, n_splits) fp32
    gy_row_stride,
    s_row_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    chunk,
    n_iters,
    eps_first,
    eps_last,
    log2_decay,
    HAS_MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows: the one row reduction of backward, one chunk per program."""
    gy_row_stride *= VEC
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    rows = tile_rows(1)
    trace = trace_ptr + rows * (2 * n_iters)
    start = tl.load(trace + 2 * n_iters - 1)
    level = tl.load(trace + n_iters - 1)
    eps = epsilon(n_iters, eps_first, log2_decay, eps_last)
    da = 0.0
    for tile in range(0, chunk, BLOCK_C):
        cols = tl.program_id(1) * chunk + tile + tl.arange(0, BLOCK_C)
        s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, 1)
        da += tl.sum(last_gradient(s - start, gy, level, eps), 0)
    tl.store(partial_ptr + rows * tl.num_programs(1) + tl.program_id(1), da)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    gy_ptr,  # (n_rows, n_cols) any float, unit column stride
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous
    partial_ptr,  # (n_rows, n_splits) fp32, or nothing when a program holds whole rows
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    dk_ptr,  # (n_rows,) fp32
    gy_row_stride,
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    k_value,
    n_iters,
    n_changing,
    eps_first,
    eps_last,
    log2_decay,
    HAS_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """From da_T down the scalar recursion; an element collects the weight of every step it took part in.

    The last steps share one eps, so also one exponential per element, and in units of it (d = da·e^((base - here)/eps))
    the recursion needs none. Before step n_changing eps may change every time.
    """
    gy_row_stride *= VEC
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    cols = tile_cols(tl.program_id(1) * BLOCK_C, BLOCK_R, BLOCK_C)
    s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R)
    gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows, HAS_K)
    trace = trace_ptr + rows * (2 * n_iters)
    z = s - tl.load(trace + 2 * n_iters - 1, mask=in_rows, other=0.0)
    here = tl.load(trace + n_iters - 1, mask=in_rows, other=0.0)
    ds = last_gradient(z, gy, here, epsilon(n_iters, eps_first, log2_decay, eps_last))
    if N_SPLITS > 0:
        parts = tl.arange(0, N_SPLITS)
        da = tl.sum(tl.load(partial_ptr + rows * n_splits + parts, mask=parts < n_splits, other=0.0), 0)
    else:
        da = row_sum(ds, BLOCK_R)
    per_k = 1.0 / k
    dk = tl.zeros_like(here)
    t = n_iters - 1
    # the next step's numbers are on their way while this one is done
    before = tl.load(trace + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    saturated = tl.load(trace + n_iters + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    if t >= n_changing:
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        weight = tl.zeros_like(z)
        base = here
        while (t >= n_changing) & (t > 0):
            next_before = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            if HAS_K:
                dk += eps * da * tl.exp2((here - base) * scale)
            weight += tl.where(z <= before, da, 0.0)
            da *= saturated * per_k
            here = before
            leaves = tl.abs(here - base) > WINDOW * eps
            if largest(leaves.to(tl.int32), BLOCK_R) > 0:
                # above 80 lie only entries that were saturated, whose weight is zero
                ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
                weight = tl.zeros_like(z)
                da = tl.where(da == 0, 0.0, da * tl.exp2((here - base) * scale))
                base = here
            before = next_before
            saturated = next_saturated
            t -= 1
        ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
        da = tl.where(da == 0, 0.0, da * tl.exp2((here - base) * scale))
    while t > 0:
        next_before = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        if HAS_K:
            dk += eps * da
        da *= per_k
        ds -= tl.where(z <= before, da * tl.exp2((z - here) * scale), 0.0)
        da = tl.where(saturated == 0, 0.0, da * saturated * tl.exp2((before - here) * scale))
        here = before
        before = next_before
        saturated = next_saturated
        t -= 1
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
    if HAS_K:
        dk += epsilon(0, eps_first, log2_decay, eps_last) * da
        if tl.program_id(1) == 0:
            tl.store(dk_ptr + rows, dk * per_k, mask=in_rows)


def _eps_arguments(eps: float, eps_init: float, eps_decay: float) -> tuple[float, float, float]:
    return max(eps_init, eps), eps, math.log2(eps_decay)


def _n_changing(n_iters: int, eps: float, eps_init: float, eps_decay: float) -> int:
    """Number of the step, counted from 0, from which on eps is the same for all."""
    if eps_decay >= 1 or eps_init <= eps:
        return n_iters if eps_decay > 1 else 0
    # one more than exact arithmetic says: the kernel's own rounding may be late
    return min(n_iters, math.ceil(math.log(eps / eps_init) / math.log(eps_decay)) + 1)


def forward(
    s: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float, want_trace: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S (rows, n) with unit column stride → gates (rows, n), trace (rows, 2T) or (rows, 0)."""
    n_rows, n_cols = s.shape
    y = torch.empty((n_rows, n_cols), dtype=s.dtype, device=s.device)
    trace = scratch(s, n_rows, 2 * n_iters if want_trace else 0)
    if not y.numel():
        return y, trace.zero_()
    plan = shape(n_rows, n_cols, PER_WARP, FORWARD_MAX_COLS)
    schedule = _eps_arguments(eps, eps_init, eps_decay)
    flags = {"HAS_K": k is not None, "HAS_MASK": mask is not None, "TRACE": want_trace}
    vec = math.gcd(16, n_cols, s.stride(0), stride(mask))
    numbers = (s.stride(0) // vec, stride(k), stride(mask) // vec, n_rows, n_cols // vec, k_value, n_iters, *schedule)
    with device_guard(s):
        if plan.splits == 1:
            launch(
                forward_kernel, (plan.programs, 1, 1), (s, k, mask, y, trace), numbers,
                (*flags.values(), plan.block_r, plan.block_c, vec), num_warps=plan.warps,
            )  # fmt: skip
            return y, trace
        team = team_of(s, *TEAM)
        if team is not None:
            words = torch.zeros(team.teams * 4 * team.size, dtype=torch.int64, device=s.device)
            launch(
                team_kernel, (team.teams * team.size, 1, 1), (s, k, mask, y, trace, words), numbers,
                (*flags.values(), team.size, next_power_of_2(team.size), team.block_c, vec), **team.options,
            )  # fmt: skip
            return y, trace
        grid = (n_rows, plan.splits)
        state, partial = scratch(s, 2, n_rows, 5), scratch(s, 2, n_rows, plan.splits, 2)
        ends_kernel[grid](
            s, mask, partial, s.stride(0), stride(mask), n_rows, n_cols, plan.chunk,
            HAS_MASK=mask is not None, BLOCK_C=plan.block_c, num_warps=plan.warps, **OPTIONS,
        )  # fmt: skip
        epsilons = [max(schedule[0] * eps_decay**t, eps) for t in range(n_iters + 1)]
        for t in range(1, n_iters + 1):
            step_kernel[grid](
                s, k, mask, y, trace, state, partial, s.stride(0), stride(k), stride(mask), n_rows, n_cols,
                plan.chunk, k_value, t, n_iters, epsilons[t - 1], epsilons[t], **flags,
                FIRST=t == 1, LAST=t == n_iters, N_SPLITS=next_power_of_2(plan.splits), BLOCK_C=plan.block_c,
                num_warps=plan.warps, **OPTIONS,
            )  # fmt: skip
    return y, trace


def backward(
    gy: Tensor, s: Tensor, trace: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gy and s (rows, n) with unit column stride → ds (rows, n) like s, dk (rows, 1) fp32 (unset for a number k)."""
    n_rows, n_cols = s.shape
    ds = torch.empty((n_rows, n_cols), dtype=s.dtype, device=s.device)
    dk = scratch(s, n_rows, 1)
    if not ds.numel():
        return ds, dk.zero_()
    schedule = _eps_arguments(eps, eps_init, eps_decay)
    plan = shape(n_rows, n_cols, HALF_PER_WARP, BACKWARD_MAX_COLS)
    partial = scratch(s, n_rows, plan.splits) if plan.splits > 1 else None
    vec = math.gcd(16, n_cols, gy.stride(0), s.stride(0), stride(mask))
    strides = (gy.stride(0) // vec, s.stride(0) // vec, stride(k), stride(mask) // vec)
    block_c, warps, col_programs = plan.block_c, plan.warps, 1
    with device_guard(s):
        if partial is not None:
            launch(
                gradient_sum_kernel, (n_rows, plan.splits, 1), (gy, s, mask, trace, partial),
                (*strides[:2], strides[3], n_rows, n_cols // vec, plan.chunk, n_iters, *schedule),
                (mask is not None, TILE, vec), num_warps=4,
            )  # fmt: skip
            block_c, warps, col_programs = TILE, TILE // HALF_PER_WARP, cdiv(n_cols, TILE)
        n_splits = 0 if partial is None else next_power_of_2(plan.splits)
        launch(
            backward_kernel, (plan.programs, col_programs, 1), (gy, s, k, mask, trace, partial, ds, dk),
            (*strides, n_rows, n_cols // vec, plan.splits, k_value, n_iters,
             _n_changing(n_iters, eps, eps_init, eps_decay), *schedule),
            (k is not None, mask is not None, n_splits, plan.block_r, block_c, vec),
            **(resident(warps, 2) if warps == 16 else {"num_warps": warps}),
        )  # fmt: skip
    return ds, dk
