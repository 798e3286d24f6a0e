"""Order the survivors of a selection, and deliver their scores and gates."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .kernels_keys import (
    COUNTERS,
    EMPTY,
    EMPTY_HALF,
    LOW,
    is_nan,
    ordered,
    to_column,
    to_score,
    unpack_half,
)  # fmt: skip


class Results(NamedTuple):
    """Where a kernel takes values and gates from, and where its results go."""

    s_ptr: Any  # scores
    y_ptr: Any  # soft gates like s; None: the gates are 1
    index_ptr: Any  # int32 or int64: columns, then -1
    value_ptr: Any  # like s
    gate_ptr: Any  # like s, or None


@triton.jit
def deliver(to, index, at, wanted, nan, s_row, y_row, LARGEST: tl.constexpr, score=None):
    """Store columns, their scores and gates; -inf (of the smallest: inf) and 0 where the column is -1.

    Scores (of the smallest: negated) are loaded if they are None, and where they are 0 or NaN, which have many bits.
    """
    tl.store(to.index_ptr + at, index.to(to.index_ptr.dtype.element_ty), mask=wanted)
    found = wanted & (index >= 0)
    missing: tl.constexpr = -float("inf") if LARGEST else float("inf")
    if score is None:
        value = tl.load(to.s_ptr + s_row + index, mask=found, other=missing)
    else:
        value = tl.where(index >= 0, score if LARGEST else -score, missing).to(to.value_ptr.dtype.element_ty)
        again = found & ((score == 0.0) | (score != score))
        value = tl.where(again, tl.load(to.s_ptr + s_row + index, mask=again, other=missing), value)
    tl.store(to.value_ptr + at, value, mask=wanted)
    if to.gate_ptr is not None:
        if to.y_ptr is None:
            # the gates of a row with a NaN are NaN
            gate = tl.where(found, tl.where(nan, float("nan"), 1.0), 0.0)
        else:
            gate = tl.load(to.y_ptr + y_row + index, mask=found, other=0.0)
        tl.store(to.gate_ptr + at, gate.to(to.gate_ptr.dtype.element_ty), mask=wanted)


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def exchange(number, rank, BIT: tl.constexpr, HELD: tl.constexpr, LOG: tl.constexpr, DIMS: tl.constexpr):
    """Put the larger of two numbers whose ranks differ in one bit before the other."""
    axis: tl.constexpr = DIMS - 1 - (BIT + LOG - HELD if BIT < HELD else BIT - HELD)
    other = number ^ tl.xor_sum(number, axis, keep_dims=True)
    return tl.where((number < other) != (((rank >> BIT) & 1) == 1), other, number)


@triton.jit
def best_first(number, WARPS: tl.constexpr):
    """Return rows (R, n) of integers, largest first.

    A bitonic network whose low bits of the rank, which it exchanges most often, are those of a thread's own registers,
    the next ones those of a warp's threads. `tl.sort` begins with the threads, then the warps.
    """
    log: tl.constexpr = log2(number.shape[1])
    dims: tl.constexpr = log2(number.shape[0] * number.shape[1])
    held: tl.constexpr = log - log2(32 * WARPS)
    if held < 0:
        x = tl.sort(number, 1, descending=True)
    else:
        # numbers that lie side by side are in neighbouring threads
        place = tl.arange(0, number.shape[0] * number.shape[1]) & (number.shape[1] - 1)
        rank = tl.reshape((place >> (log - held)) | ((place << held) & (number.shape[1] - 1)), [2] * dims)
        x = tl.reshape(number, [2] * dims)
        for merge in tl.static_range(1, log + 1):
            # every other run is sorted the other way round: inverted there, all exchanges are alike
            x ^= -((rank >> merge) & 1).to(x.dtype)
            for i in tl.static_range(merge):
                x = exchange(x, rank, merge - 1 - i, held, log, dims)
            x ^= -((rank >> merge) & 1).to(x.dtype)
        x = tl.permute(tl.reshape(x, (number.shape[0], 1 << held, 32 * WARPS)), (0, 2, 1))
        x = tl.reshape(x, number.shape)
    return x


@triton.jit
def by_column(index):
    """Return columns (…, k) in ascending order, those that are -1 last."""
    index = tl.sort(tl.where(index < 0, 0x7FFFFFFF, index))
    return tl.where(index == 0x7FFFFFFF, -1, index)


@triton.jit(do_not_specialize=["s_row_stride", "n_rows", "n_cols", "k"])
def sort_kernel(
    packed_ptr,  # (n_rows, k) packed survivors: int64, or int32 in the order of columns, which are sorted
    state_ptr,  # (n_rows, COUNTERS) int32: the third says that survivors are not in the order of columns; or None
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    s_ptr,  # (n_rows, n_cols) scores
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) scores of the survivors, like s
    gate_ptr,  # (n_rows, k) gates of the survivors, like s, or None
    s_row_stride,
    n_rows,
    n_cols,
    k,
    SORTED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Order whole rows of survivors, best score first, or by column."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    wanted = (rows < n_rows) & (cols < k)
    at = rows * k + cols
    if packed_ptr.dtype.element_ty == tl.int32:
        number = best_first(tl.load(packed_ptr + at, mask=wanted, other=EMPTY_HALF), WARPS)
        score, index = unpack_half(number, s_ptr.dtype.element_ty)
        nan = tl.max(((score != score) & (index >= 0)).to(tl.int32), 1, keep_dims=True) > 0
    else:
        packed = tl.load(packed_ptr + at, mask=wanted, other=EMPTY)
        nan = tl.max(is_nan(packed).to(tl.int32), 1, keep_dims=True) > 0
        if SORTED:
            number = best_first(ordered(packed), WARPS)
            score, index = to_score((number >> 32).to(tl.int32), 0), to_column(number)
        else:
            low = (packed & LOW).to(tl.int32)
            disordered = tl.load(state_ptr + rows * COUNTERS + 2, mask=rows < n_rows, other=0)
            score = tl.where(disordered > 0, float("nan"), (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True))
            if tl.max(tl.max(disordered, 1), 0) > 0:
                low = best_first(low, WARPS)
            index = to_column(low.to(tl.int64))
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST, score)


@triton.jit(do_not_specialize=["packed_row_stride", "out_row_stride", "k"])
def run_kernel(
    packed_ptr,  # (n_rows, packed_row_stride) int64 survivors: packed, or in order of their scores
    state_ptr,  # (n_rows, COUNTERS) int32: how many of them; whether one is NaN is written here
    out_ptr,  # (n_rows, out_row_stride) int64: every BLOCK of a row in descending order
    packed_row_stride,
    out_row_stride,
    k,
    BY_SCORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort runs of packed survivors by score, or of k sorted ones by column."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    count = k
    if BY_SCORE:
        count = tl.load(state_ptr + row * COUNTERS)
    if begin < count:
        here = begin + tl.arange(0, BLOCK)
        packed = tl.load(packed_ptr + row * packed_row_stride + here, mask=here < count, other=EMPTY)
        if BY_SCORE:
            if tl.max(is_nan(packed).to(tl.int32), 0) > 0:
                tl.store(state_ptr + row * COUNTERS + 1, 1)
            packed = ordered(packed)
        else:
            packed = packed & LOW
        tl.store(out_ptr + row * out_row_stride + here, tl.sort(packed, 0, descending=True), mask=here < count)


@triton.jit(do_not_specialize=["s_row_stride", "n_cols", "packed_row_stride", "k", "run", "steps"])
def merge_kernel(
    packed_ptr,  # (n_rows, packed_row_stride) int64 survivors in sorted runs
    state_ptr,  # (n_rows, COUNTERS) int32: how many of them, whether one is NaN
    out_ptr,  # like packed: runs WAYS times as long; None in the last round with FETCH
    index_ptr,  # this and the next four as for sort_kernel, in the last round with FETCH
    s_ptr,
    y_ptr,
    value_ptr,
    gate_ptr,
    s_row_stride,
    n_cols,
    packed_row_stride,
    k,
    run,
    steps,
    BY_SCORE: tl.constexpr,
    FETCH: tl.constexpr,
    LARGEST: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge WAYS runs: a survivor's place is its place in its own run plus its rank in the others, by bisection."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    count = k
    if BY_SCORE:
        count = tl.load(state_ptr + row * COUNTERS)
    if begin < count:
        cols = begin + tl.arange(0, BLOCK)
        inside = cols < count
        packed_row = row * packed_row_stride
        mine = tl.load(packed_ptr + packed_row + cols, mask=inside, other=EMPTY)
        own = cols // run
        first = own // WAYS * WAYS
        other = first[:, None] + tl.arange(0, WAYS)[None, :]
        start = other * run
        # empty places are equal: those of earlier runs come first
        earlier = other < own[:, None]
        lo = tl.zeros((BLOCK, WAYS), tl.int32)
        hi = tl.where(other == own[:, None], 0, tl.minimum(tl.maximum(count - start, 0), run))
        for _ in range(steps):
            middle = (lo + hi) // 2
            open = (lo < hi) & inside[:, None]
            theirs = tl.load(packed_ptr + packed_row + start + middle, mask=open, other=EMPTY)
            before = (theirs > mine[:, None]) | (earlier & (theirs == mine[:, None]))
            lo = tl.where(open & before, middle + 1, lo)
            hi = tl.where(open & (before == 0), middle, hi)
        place = first * run + (cols - own * run) + tl.sum(lo, 1)
        if FETCH:
            wanted = inside & (place < k)
            at = row * k + place
            index = to_column(mine)
            nan = tl.load(state_ptr + row * COUNTERS + 1) > 0
            to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
            deliver(to, index, at, wanted, nan, row * s_row_stride, row * n_cols, LARGEST)
        else:
            tl.store(out_ptr + packed_row + place, mine, mask=inside)
