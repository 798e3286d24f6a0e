"""Triton kernels of coor_descent and their launchers.

The whole state of a row is the threshold -a, kept as ref + off with ref near it. E = exp((s - ref)/eps) stays in
registers, so a step is one clipped sum, u ← Σ min(E, u)/k. New exponentials are needed only when eps changes or the
threshold leaves E's range.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import device_guard, launch
from onepass.ops._shared.kernels_mailbox import in_registers, poll, publish, resident, team_of, team_sums
from onepass.ops._shared.kernels_rows import (
    CROWDED,
    INF,
    LOG2E,
    PER_WARP,
    SIZES,
    Scores,
    Shape,
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

# E is accurate while the threshold lies within this many eps of ref
WINDOW = tl.constexpr(40.0)
# team: columns per program, warps per program, programs per multiprocessor
TEAM = (16384, 8, 2)
# longest row that one program holds in registers
FORWARD_MAX_COLS = 32768


@triton.jit
def epsilon(t, first, log2_decay, last):
    """Return eps of step t, counted from 0: exactly `first` without decay, exactly `last` once reached."""
    return tl.maximum(first * tl.exp2(t * log2_decay), last)


@triton.jit
def count_and_top(s, BLOCK_R: tl.constexpr):
    """Return the number of valid entries of each row (NaN if one of them is NaN), and the largest."""
    ones = tl.where(s != s, s, tl.where(s > -INF, 1.0, 0.0))
    return row_sum(ones, BLOCK_R), row_max(s, BLOCK_R)


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
        moved = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
        off = (ref - moved) + off
        ref = moved
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
        moved = tl.minimum(top, ref + off, propagate_nan=tl.PropagateNan.ALL)
        leaves = ((tl.abs(off) > WINDOW * eps) & (moved != ref)).to(tl.int32)
        if largest(leaves, BLOCK_R) > 0:
            off = tl.where(leaves > 0, (ref - moved) + off, off)
            ref = tl.where(leaves > 0, moved, ref)
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


def eps_arguments(eps: float, eps_init: float, eps_decay: float) -> tuple[float, float, float]:
    return max(eps_init, eps), eps, math.log2(eps_decay)


def n_changing_of(n_iters: int, eps: float, eps_init: float, eps_decay: float) -> int:
    """Return the first step, counted from 0, from which eps stays constant."""
    if eps_decay >= 1 or eps_init <= eps:
        return n_iters if eps_decay > 1 else 0
    # one step later than in exact arithmetic, as the kernel's rounding may reach eps late
    return min(n_iters, math.ceil(math.log(eps / eps_init) / math.log(eps_decay)) + 1)


def holds(s: Tensor) -> bool:
    """Return whether rows like those of s (..., n) stay in registers; others are torch's, forward and backward."""
    return in_registers(s, FORWARD_MAX_COLS, TEAM)


def forward_shape(n_rows: int, n_cols: int) -> Shape:
    """Return the launch shape of the forward pass."""
    return shape(n_rows, n_cols, PER_WARP * (2 if n_cols > CROWDED else 1), FORWARD_MAX_COLS)


def forward_options(plan: Shape) -> dict[str, Any]:
    """Return the launch options of the forward pass: wide rows get 128 registers per thread, so more run at once."""
    return resident(plan.warps, 16 // plan.warps) if plan.block_c > CROWDED else {"num_warps": plan.warps}


def forward(
    s: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float, want_trace: bool, shape_of_s: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gates of s (rows, n), unit column stride, and the trace (..., 2T), or (..., 0) if not wanted.

    Both are allocated in `shape_of_s`, the original shape of the scores: autograd forbids in-place changes of a view
    made inside a Function.
    """
    n_rows, n_cols = s.shape
    y = torch.empty(shape_of_s, dtype=s.dtype, device=s.device)
    trace = scratch(s, *shape_of_s[:-1], 2 * n_iters if want_trace else 0)
    if not y.numel():
        return y, trace.zero_()
    notes = trace if want_trace else None
    s, k, _, mask = even(s, k, None, mask)
    plan = forward_shape(n_rows, n_cols)
    schedule = eps_arguments(eps, eps_init, eps_decay)
    vec = math.gcd(16, n_cols)
    numbers = (s.stride(0) // vec, stride(k), stride(mask) // vec, n_rows, n_cols // vec, k_value, n_iters,
               n_changing_of(n_iters, eps, eps_init, eps_decay), *schedule)  # fmt: skip
    with device_guard(s):
        if plan.splits == 1:
            launch(
                forward_kernel, (plan.programs, 1, 1), (s, k, mask, y, notes, None), numbers,
                (0, 1, plan.block_r, plan.block_c, vec), **forward_options(plan),
            )  # fmt: skip
            return y, trace
        team = team_of(s, *TEAM)
        slots = torch.zeros(team.teams * 4 * team.size, dtype=torch.int64, device=s.device)
        launch(
            forward_kernel, (team.teams * team.size, 1, 1), (s, k, mask, y, notes, slots), numbers,
            (team.size, team.width, 1, team.block_c, vec), **team.options,
        )  # fmt: skip
    return y, trace
