"""Triton kernels of coor_descent and their launchers.

The whole state of a row is the threshold -a, kept as ref + off with ref near it. E = exp((s - ref)/eps) stays in
registers, so a step is one clipped sum, u ← Σ min(E, u)/k. New exponentials are needed only when eps changes or the
threshold leaves E's range. Backward is a recursion over T numbers per row, from the last step to the first; an element
needs one exponential per distinct eps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, cdiv, launch, next_power_of_2
from onepass.ops._shared.kernels_mailbox import in_registers, poll, publish, resident, team_sums, teams
from onepass.ops._shared.kernels_rows import (
    CROWDED,
    HALF_PER_WARP,
    INF,
    LOG2E,
    PER_WARP,
    SIZES,
    TILE,
    Scores,
    even,
    largest,
    load_gradient,
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

# E is accurate while the threshold lies within this many eps of ref
WINDOW = tl.constexpr(40.0)
# team: columns per program, warps per program, programs per multiprocessor
TEAM = (16384, 8, 2)
# longest row that one program holds in registers
FORWARD_MAX_COLS = 32768
# the same in backward: three numbers per element
BACKWARD_MAX_COLS = 16384


@triton.jit
def epsilon(t, first, log2_decay, last):
    """Return eps of step t, counted from 0: exactly `first` without decay, exactly `last` once reached."""
    return tl.maximum(first * tl.exp2(t * log2_decay), last)


@triton.jit
def count_and_top(s, BLOCK_R: tl.constexpr):
    """Return the number of valid entries of each row (NaN if one of them is NaN), and the largest."""
    counted = tl.where(s != s, s, tl.where(s > -INF, 1.0, 0.0))
    return row_sum(counted, BLOCK_R), row_max(s, BLOCK_R)


@triton.jit
def first_threshold(valid, top, k, eps):
    """Return (ref, off, top) of step 1; its threshold ref + off depends on the count alone, and ref ≤ top."""
    k = tl.where(k > 0, k, float("nan"))
    threshold = eps * tl.log(tl.maximum(valid, 1.0, propagate_nan=tl.PropagateNan.ALL) / k)
    top = tl.where((valid > 0) & (threshold == threshold), top, threshold)
    ref = tl.minimum(top, threshold, propagate_nan=tl.PropagateNan.ALL)
    return ref, threshold - ref, top


@triton.jit
def clipped_sum(e, u, TRACE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return Σ min(e, u) of each row and, with TRACE, the number of entries above u, which backward needs."""
    clipped = tl.minimum(e, u, propagate_nan=tl.PropagateNan.ALL)
    if TRACE:
        total, saturated = pair_sum(clipped, tl.where(e > u, 1.0, 0.0), BLOCK_R)
    else:
        total = row_sum(clipped, BLOCK_R)
        saturated = total
    return total, saturated


@triton.jit
def iterate(
    scores, k_ptr, y_ptr, trace_ptr, mailbox_ptr, rows, cols, k_stride, k_value, n_iters, n_changing, eps_first,
    eps_last, log2_decay, member, visit, phase, TEAM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Run all steps on rows in registers; one program or a team holds each row.

    While eps changes, each step computes E from the scores. Afterwards E alone stays in registers; when the threshold
    leaves its range, the scores are loaded again (from L2).
    """
    phase = tl.cast(phase, tl.int32)
    n_rows = scores.n_rows
    n_cols = scores.n_cols
    s = load_scores(scores, rows, cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows)
    valid, top = count_and_top(s, BLOCK_R)
    if TEAM > 0:
        slots = mailbox_ptr + (2 + visit % 2) * TEAM
        publish(slots + member, top, valid, visit)
        top, valid = poll(slots, visit, TEAM, WIDTH)
        top = tl.max(tl.where(tl.arange(0, WIDTH) < TEAM, top, -INF), 0)
        valid = tl.sum(valid, 0)
    eps = epsilon(0, eps_first, log2_decay, eps_last)
    ref, off, top = first_threshold(valid, top, k, eps)
    start = ref
    writes = (rows < n_rows) & (member == 0)
    if trace_ptr is not None:
        trace = trace_ptr + rows * (2 * n_iters)
        tl.store(trace, off, mask=writes)
        tl.store(trace + 2 * n_iters - 1, start, mask=writes)
    t = 1
    while t <= tl.minimum(n_changing, n_iters):
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        new_ref = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
        off = (ref - new_ref) + off
        ref = new_ref
        if t < n_iters:
            e = tl.exp2((s - ref) * (LOG2E / eps))
            total, saturated = clipped_sum(e, tl.exp2(off * (LOG2E / eps)), trace_ptr is not None, BLOCK_R)
            total, saturated, phase = team_sums(total, saturated, mailbox_ptr, member, phase, TEAM, WIDTH)
            off = eps * tl.log(tl.where(valid == 0, k, total) / k)
            if trace_ptr is not None:
                tl.store(trace + n_iters + t - 1, saturated, mask=writes)
                tl.store(trace + t, (ref - start) + off, mask=writes)
        t += 1
    e = tl.exp2((s - ref) * (LOG2E / eps))
    while t <= n_iters:
        new_ref = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
        leaves = ((tl.abs(off) > WINDOW * eps) & (new_ref != ref)).to(tl.int32)
        if largest(leaves, BLOCK_R) > 0:
            off = tl.where(leaves > 0, (ref - new_ref) + off, off)
            ref = tl.where(leaves > 0, new_ref, ref)
            s = load_scores(scores, rows, cols, BLOCK_R)
            e = tl.exp2((s - ref) * (LOG2E / eps))
        if t < n_iters:
            total, saturated = clipped_sum(e, tl.exp2(off * (LOG2E / eps)), trace_ptr is not None, BLOCK_R)
            total, saturated, phase = team_sums(total, saturated, mailbox_ptr, member, phase, TEAM, WIDTH)
            off = eps * tl.log(tl.where(valid == 0, k, total) / k)
            if trace_ptr is not None:
                tl.store(trace + n_iters + t - 1, saturated, mask=writes)
                tl.store(trace + t, (ref - start) + off, mask=writes)
        t += 1
    y = e * tl.exp2(-off * (LOG2E / eps))
    y = tl.where(y > 1.0, 1.0, y)
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    tl.store(y_ptr + rows * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=inside)
    return phase


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or None
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or None
    y_ptr,  # (n_rows, n_cols) like s, contiguous
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous, or None
    mailbox_ptr,  # (teams, 4, TEAM) int64 zeros: per member two slots for the sums of a step, two for a row's stats
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k_value,
    n_iters,
    n_changing,
    eps_first,
    eps_last,
    log2_decay,
    TEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """A program holds whole rows, TEAM programs hold a long one in chunks; all members take the same steps."""
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols * VEC)
    if TEAM == 0:
        iterate(
            scores, k_ptr, y_ptr, trace_ptr, None, tile_rows(BLOCK_R), tile_cols(0, BLOCK_R, BLOCK_C), k_stride,
            k_value, n_iters, n_changing, eps_first, eps_last, log2_decay, 0, 0, 0, 0, 1, BLOCK_R,
        )  # fmt: skip
    else:
        team = tl.program_id(0) // TEAM
        member = tl.program_id(0) % TEAM
        visit = 0
        phase = 0
        for row in range(team, n_rows, tl.num_programs(0) // TEAM):
            phase = iterate(
                scores, k_ptr, y_ptr, trace_ptr, mailbox_ptr + team * (4 * TEAM), tl.cast(row, tl.int64),
                member * BLOCK_C + tl.arange(0, BLOCK_C), k_stride, k_value, n_iters, n_changing, eps_first, eps_last,
                log2_decay, member, visit, phase, TEAM, WIDTH, 1,
            )  # fmt: skip
            visit += 1


@triton.jit
def last_gradient(z, gy, level, eps):
    """Return the gradient of s + a_T: gy·y/eps where the gate is not saturated, else 0."""
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
    tiles,
    n_iters,
    eps_first,
    eps_last,
    log2_decay,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows: sum `last_gradient` over one chunk per program, the only row reduction of backward."""
    gy_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols)
    rows = tile_rows(1)
    trace = trace_ptr + rows * (2 * n_iters)
    start = tl.load(trace + 2 * n_iters - 1)
    level = tl.load(trace + n_iters - 1)
    eps = epsilon(n_iters, eps_first, log2_decay, eps_last)
    da = 0.0
    for tile in range(tiles):
        cols = (tl.program_id(1) * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
        s = load_scores(scores, rows, cols, 1)
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
    N_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Run the scalar recursion from da_T down; an element adds up the weights of all steps that left it unsaturated.

    The last steps share one eps and one exponential per element; in units of it (d = da·e^((base - level)/eps)) the
    recursion itself needs none. Before step n_changing each step may have its own eps and exponential.
    """
    gy_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols)
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    cols = tile_cols(tl.program_id(1) * BLOCK_C, BLOCK_R, BLOCK_C)
    s = load_scores(scores, rows, cols, BLOCK_R)
    gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows)
    trace = trace_ptr + rows * (2 * n_iters)
    z = s - tl.load(trace + 2 * n_iters - 1, mask=in_rows, other=0.0)
    level = tl.load(trace + n_iters - 1, mask=in_rows, other=0.0)
    ds = last_gradient(z, gy, level, epsilon(n_iters, eps_first, log2_decay, eps_last))
    if N_SPLITS > 0:
        parts = tl.arange(0, N_SPLITS)
        da = tl.sum(tl.load(partial_ptr + rows * n_splits + parts, mask=parts < n_splits, other=0.0), 0)
    else:
        da = row_sum(ds, BLOCK_R)
    per_k = 1.0 / k
    dk = tl.zeros_like(level)
    t = n_iters - 1
    # prefetch the threshold and count of the next step during this one
    level_before = tl.load(trace + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    saturated = tl.load(trace + n_iters + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    if t >= n_changing:
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        weight = tl.zeros_like(z)
        base = level
        while (t >= n_changing) & (t > 0):
            next_level = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            if k_ptr is not None:
                dk += eps * da * tl.exp2((level - base) * scale)
            weight += tl.where(z <= level_before, da, 0.0)
            da *= saturated * per_k
            level = level_before
            leaves = tl.abs(level - base) > WINDOW * eps
            if largest(leaves.to(tl.int32), BLOCK_R) > 0:
                # the cap keeps 0·inf away: only saturated entries, of weight 0, have exponents above 80
                ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
                weight = tl.zeros_like(z)
                da = tl.where(da == 0, 0.0, da * tl.exp2((level - base) * scale))
                base = level
            level_before = next_level
            saturated = next_saturated
            t -= 1
        ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
        da = tl.where(da == 0, 0.0, da * tl.exp2((level - base) * scale))
    while t > 0:
        next_level = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        if k_ptr is not None:
            dk += eps * da
        da *= per_k
        ds -= tl.where(z <= level_before, da * tl.exp2((z - level) * scale), 0.0)
        da = tl.where(saturated == 0, 0.0, da * saturated * tl.exp2((level_before - level) * scale))
        level = level_before
        level_before = next_level
        saturated = next_saturated
        t -= 1
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
    if k_ptr is not None:
        dk += epsilon(0, eps_first, log2_decay, eps_last) * da
        if tl.program_id(1) == 0:
            tl.store(dk_ptr + rows, dk * per_k, mask=in_rows)


def schedule(n_iters: int, eps: float, eps_init: float, eps_decay: float) -> tuple[int, float, float, float]:
    """Return the first step, counted from 0, from which eps stays constant, then what `epsilon` takes."""
    changing = n_iters if eps_decay > 1 else 0
    if eps_decay < 1 and eps_init > eps:
        # one step later than in exact arithmetic, as the kernel's rounding may reach eps late
        changing = min(n_iters, math.ceil(math.log(eps / eps_init) / math.log(eps_decay)) + 1)
    return changing, max(eps_init, eps), eps, math.log2(eps_decay)


def holds(s: Tensor) -> bool:
    """Return whether rows like those of s (..., n) stay in registers; others are torch's, forward and backward."""
    return in_registers(s, FORWARD_MAX_COLS, TEAM)


def forward(
    scores: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float, want_trace: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gates of scores (..., n) and the trace (..., 2T), or (..., 0) if not wanted.

    Both are allocated in their shape: autograd forbids in-place changes of a view made inside a Function.
    """
    s = as_rows(scores)
    n_rows, n_cols = s.shape
    y = torch.empty(scores.shape, dtype=s.dtype, device=s.device)
    trace = scratch(s, *scores.shape[:-1], 2 * n_iters if want_trace else 0)
    if not y.numel():
        return y, trace.zero_()
    stored_trace = trace if want_trace else None
    s, k, _, mask = even(s, k, None, mask)
    plan = shape(n_rows, n_cols, PER_WARP * (2 if n_cols > CROWDED else 1), FORWARD_MAX_COLS)
    # wide rows get 128 registers per thread, so more run at once
    of_one = resident(plan.warps, 16 // plan.warps) if plan.block_c > CROWDED else {"num_warps": plan.warps}
    vec = math.gcd(16, n_cols)
    numbers = (s.stride(0) // vec, stride(k), stride(mask) // vec, n_rows, n_cols // vec, k_value, n_iters,
               *schedule(n_iters, eps, eps_init, eps_decay))  # fmt: skip
    alone = plan.programs, (0, 1, plan.block_r, plan.block_c), None, of_one
    programs, tile, slots, options = alone if plan.splits == 1 else teams(s, *TEAM)
    launch(forward_kernel, (programs, 1, 1), (s, k, mask, y, stored_trace, slots), numbers, (*tile, vec), **options)
    return y, trace


def backward(
    gy: Tensor, scores: Tensor, k: Tensor | None, mask: Tensor | None, trace: Tensor, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float, want_trace: bool, need_s: bool, need_k: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) in the dtype of the scores and dk (rows, 1) in fp32, unset for a number k."""
    gy, s = as_rows(gy), as_rows(scores)
    n_rows, n_cols = s.shape
    ds = torch.empty((n_rows, n_cols), dtype=s.dtype, device=s.device)
    dk = scratch(s, n_rows, 1)
    if not ds.numel():
        return ds, dk.zero_()
    changing, *epsilons = schedule(n_iters, eps, eps_init, eps_decay)
    plan = shape(n_rows, n_cols, HALF_PER_WARP, BACKWARD_MAX_COLS)
    partial = scratch(s, n_rows, plan.splits) if plan.splits > 1 else None
    vec = math.gcd(16, n_cols, gy.stride(0), s.stride(0), stride(mask))
    strides = (gy.stride(0) // vec, s.stride(0) // vec, stride(k), stride(mask) // vec)
    block_c, warps, col_programs = plan.block_c, plan.warps, 1
    if partial is not None:
        launch(
            gradient_sum_kernel, (n_rows, plan.splits, 1), (gy, s, mask, trace, partial),
            (*strides[:2], strides[3], n_rows, n_cols // vec, plan.chunk // TILE, n_iters, *epsilons),
            (TILE, vec), num_warps=4,
        )  # fmt: skip
        block_c, warps, col_programs = TILE, TILE // HALF_PER_WARP, cdiv(n_cols, TILE)
    n_splits = 0 if partial is None else next_power_of_2(plan.splits)
    launch(
        backward_kernel, (plan.programs, col_programs, 1), (gy, s, k, mask, trace, partial, ds, dk),
        (*strides, n_rows, n_cols // vec, plan.splits, k_value, n_iters, changing, *epsilons),
        (n_splits, plan.block_r, block_c, vec),
        **(resident(warps, 2) if warps == 16 else {"num_warps": warps}),
    )  # fmt: skip
    return ds, dk
