"""Triton kernels of the causal choice: thresholds, then the choice; the gradient in two passes over the scores.

All work is per block. The number of tokens chosen before a block is a running sum, with a ceiling, over earlier blocks.
Every program computes it anew for its few blocks, so that no launch waits for a single program per row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, cdiv, launch, next_power_of_2

# the int32 key of -inf, and the largest int32
NOTHING = tl.constexpr(-2139095041)
LARGEST = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754943508222875e-38)

# longest memory in the registers of one program; longest block in one scan
MAX_MEMORY = 8192
MAX_BLOCK = 1024
PER_WARP = 512  # scores of a warp
FIRST = 2048  # fewest scores of a program that ranks in the first block
TILE = 1024  # tokens of a program
STEP = 512  # blocks per step of a running sum
INTS = [
    "s_row_stride", "mask_row_stride", "n_cols", "k", "numerator", "denominator", "block", "memory", "n_blocks",
    "n_first",
]  # fmt: skip


@triton.jit
def load_scores(s_ptr, mask_ptr, s_row, mask_row, cols, inside):
    """Load scores as fp32; return them, and which belong to real tokens."""
    s = tl.load(s_ptr + s_row + cols, mask=inside, other=0.0).to(tl.float32)
    if mask_ptr is not None:
        inside = inside & (tl.load(mask_ptr + mask_row + cols, mask=inside, other=0) != 0)
    return s, inside


@triton.jit
def ranked(s, real, numerator, denominator):
    """Return each row's score of rank ⌊count·share⌋ (0: largest) of its `count` real scores above -inf; else -inf."""
    count = tl.sum((real & (s > -float("inf"))).to(tl.int32), 1)
    rank = (count.to(tl.int64) * numerator // denominator).to(tl.int32)
    # integer keys in the order of the scores; NaN counts as +inf, -0 as 0
    bits = tl.where(s == 0.0, 0.0, tl.where(s != s, float("inf"), s)).to(tl.int32, bitcast=True)
    key = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOTHING)
    no_rank = rank >= count
    # bisection: more than `rank` keys are ≥ lo, at most `rank` are ≥ hi
    lo = tl.where(no_rank, NOTHING, tl.min(tl.where(key > NOTHING, key, LARGEST), 1))
    hi = tl.where(no_rank, NOTHING, tl.max(key, 1)) + 1
    while tl.max((lo + 1 < hi).to(tl.int32), 0) > 0:
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        n_reached = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        # with exactly rank + 1 a row is solved, and does not change any more
        hi = tl.where(n_reached <= rank, middle, tl.where(n_reached == rank + 1, middle + 1, hi))
        lo = tl.where(n_reached <= rank, lo, middle)
    ranked_key = tl.where(no_rank, NOTHING, tl.min(tl.where(key >= lo[:, None], key, LARGEST), 1))
    return (ranked_key ^ ((ranked_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def look_back_in_first(
    s_ptr, mask_ptr, threshold_ptr, s_row, mask_row, part, n_cols, numerator, denominator, block,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store thresholds of some tokens of the first block, each from the tokens before it.

    Return how many exceed it, and how many are real.
    """
    cols = tl.arange(0, BLOCK_C)
    token = part * BLOCK_R + tl.arange(0, BLOCK_R)
    length = tl.minimum(block, n_cols)
    s, real = load_scores(s_ptr, mask_ptr, s_row, mask_row, cols, cols < length)
    threshold = ranked(s[None, :], real[None, :] & (cols[None, :] < token[:, None]), numerator, denominator)
    tl.store(threshold_ptr + token, threshold, mask=token < block)
    block_s, block_real = load_scores(s_ptr, mask_ptr, s_row, mask_row, token, token < length)
    return tl.sum((block_real & (block_s > threshold)).to(tl.int32), 0), tl.sum(block_real.to(tl.int32), 0)


@triton.jit
def look_back(
    s_ptr, mask_ptr, threshold_ptr, s_row, mask_row, b, n_cols, numerator, denominator, block, memory,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store the threshold of a later block; return how many of its tokens exceed it, and how many are real."""
    start = b * block
    past = start - memory + tl.arange(0, BLOCK_M)
    inside = (past >= 0) & (past < start)
    s, real = load_scores(s_ptr, mask_ptr, s_row, mask_row, past, inside)
    threshold = ranked(s[None, :], real[None, :], numerator, denominator)
    tl.store(threshold_ptr + block - 1 + b + tl.arange(0, 1), threshold)
    cols = tl.arange(0, BLOCK_C)
    inside = (cols < block) & (start + cols < n_cols)
    block_s, block_real = load_scores(s_ptr, mask_ptr, s_row, mask_row, start + cols, inside)
    return tl.sum((block_real & (block_s > threshold)).to(tl.int32), 0), tl.sum(block_real.to(tl.int32), 0)


@triton.jit(do_not_specialize=INTS)
def threshold_kernel(
    s_ptr,  # (batch, n_cols) scores, any float dtype
    mask_ptr,  # (batch, n_cols) uint8 or None
    threshold_ptr,  # (batch, block + n_blocks - 1) fp32: of each token of the first block, then of each later block
    above_ptr,  # (batch, n_first + n_blocks - 1) int32: tokens above it in n_first parts of block 0, each later block
    real_ptr,  # same shape, int32: real tokens; None without a mask
    s_row_stride,
    mask_row_stride,
    n_cols,
    numerator,
    denominator,
    block,
    memory,
    n_blocks,
    n_first,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    programs = n_first + n_blocks - 1
    row = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    s_row = row * s_row_stride
    mask_row = row * mask_row_stride
    threshold_ptr += row * (block + n_blocks - 1)
    if part < n_first:
        n_above, n_real = look_back_in_first(
            s_ptr, mask_ptr, threshold_ptr, s_row, mask_row, part, n_cols, numerator, denominator, block, BLOCK_R,
            BLOCK_C,
        )  # fmt: skip
    else:
        n_above, n_real = look_back(
            s_ptr, mask_ptr, threshold_ptr, s_row, mask_row, part - n_first + 1, n_cols, numerator, denominator, block,
            memory, BLOCK_M, BLOCK_C,
        )  # fmt: skip
    tl.store(above_ptr + row * programs + part, n_above)
    if mask_ptr is not None:
        tl.store(real_ptr + row * programs + part, n_real)


@triton.jit
def budget(earlier, k, numerator, denominator, block):
    """Return the share of `earlier` real tokens and of a whole block, rounded up, and at most k."""
    tokens = earlier.to(tl.int64) + block
    return tl.minimum((tokens * numerator + denominator - 1) // denominator, k).to(tl.int32)


@triton.jit
def load_count(count_ptr, b, inside, n_first, in_first):
    """Load what threshold_kernel counted in blocks b; `in_first` is block 0's sum over its parts."""
    count = tl.load(count_ptr + n_first - 1 + b, mask=inside & (b > 0), other=0)
    return tl.where(b == 0, in_first, count)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def load_block(
    s_ptr, mask_ptr, threshold_ptr, row, b, s_row_stride, mask_row_stride, n_cols, block, n_blocks,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return for blocks b (N, 1): tokens, scores, thresholds, which tokens exist, and which of these are real."""
    cols = tl.arange(0, BLOCK_C)[None, :]
    token = b * block + cols
    inside = (b < n_blocks) & (cols < block) & (token < n_cols)
    s, real = load_scores(s_ptr, mask_ptr, row * s_row_stride, row * mask_row_stride, token, inside)
    place = tl.where(b == 0, cols, block - 1 + b)
    threshold = tl.load(threshold_ptr + row * (block + n_blocks - 1) + place, mask=inside, other=0.0)
    return token, s, threshold, inside, real


@triton.jit(do_not_specialize=[*INTS, "eps"])
def choose_kernel(
    s_ptr,  # (batch, n_cols) scores, any float dtype
    mask_ptr,  # (batch, n_cols) uint8 or None
    threshold_ptr,  # this, above_ptr and real_ptr: written by threshold_kernel
    above_ptr,
    real_ptr,
    index_ptr,  # (batch, k) int64: chosen columns in ascending order, then -1
    gate_ptr,  # (batch, k) of any float dtype: their gates, then 0
    start_ptr,  # (batch, n_blocks + 1) int32: how many are chosen before each block, and in all
    s_row_stride,
    mask_row_stride,
    n_cols,
    k,
    numerator,
    denominator,
    block,
    n_blocks,
    n_first,
    eps,
    N_FIRST: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    programs = (n_blocks + BLOCK_B - 1) // BLOCK_B
    row = (tl.program_id(0) // programs).to(tl.int64)
    begin = (tl.program_id(0) % programs) * BLOCK_B
    above_ptr += row * (n_first + n_blocks - 1)
    parts = tl.arange(0, N_FIRST)
    in_first = tl.sum(tl.load(above_ptr + parts, mask=parts < n_first, other=0), 0)
    real_in_first = block
    if mask_ptr is not None:
        real_ptr += row * (n_first + n_blocks - 1)
        real_in_first = tl.sum(tl.load(real_ptr + parts, mask=parts < n_first, other=0), 0)
    # taken(b) = min(taken(b - 1) + n_above(b), budget(b)), STEP blocks at a time, with `real_passed` tokens before them
    taken = 0
    real_passed = 0
    for start in range(0, begin, STEP):
        b = start + tl.arange(0, STEP)
        earlier_block = b < begin
        n_above = load_count(above_ptr, b, earlier_block, n_first, in_first)
        earlier = b * block
        if mask_ptr is not None:
            n_real = load_count(real_ptr, b, earlier_block, n_first, real_in_first)
            earlier = real_passed + tl.cumsum(n_real, 0) - n_real
            real_passed += tl.sum(n_real, 0)
        room = budget(earlier, k, numerator, denominator, block)
        slack = tl.where(earlier_block, room - tl.cumsum(n_above, 0), LARGEST)
        taken = tl.sum(n_above, 0) + tl.minimum(taken, tl.min(slack, 0))
    b = begin + tl.arange(0, BLOCK_B)
    inside = b < n_blocks
    n_above = load_count(above_ptr, b, inside, n_first, in_first)
    above_before = tl.cumsum(n_above, 0) - n_above
    earlier = b * block
    previous = earlier - block
    if mask_ptr is not None:
        n_real = load_count(real_ptr, b, inside, n_first, real_in_first)
        earlier = real_passed + tl.cumsum(n_real, 0) - n_real
        previous = earlier - load_count(real_ptr, b - 1, inside & (b > begin), n_first, real_in_first)
    slack = tl.where(b > begin, budget(previous, k, numerator, denominator, block) - above_before, LARGEST)
    in_before = above_before + tl.minimum(taken, tl.associative_scan(slack, 0, smaller))
    room = tl.minimum(budget(earlier, k, numerator, denominator, block) - in_before, n_above)
    tl.store(start_ptr + row * (n_blocks + 1) + b, in_before, mask=inside)
    token, s, threshold, _, real = load_block(
        s_ptr, mask_ptr, threshold_ptr, row, b[:, None], s_row_stride, mask_row_stride, n_cols, block, n_blocks, BLOCK_C
    )
    above = real & (s > threshold)
    rank = tl.cumsum(above.to(tl.int32), 1)
    chosen = above & (rank <= room[:, None])
    slot = row * k + in_before[:, None] + rank - 1
    tl.store(index_ptr + slot, token.to(tl.int64), mask=chosen)
    gate = tl.sigmoid((s - threshold) / eps)
    tl.store(gate_ptr + slot, gate.to(gate_ptr.dtype.element_ty), mask=chosen)
    if begin + BLOCK_B >= n_blocks:
        total = tl.sum(tl.where(b == n_blocks - 1, in_before + room, 0), 0)
        tl.store(start_ptr + row * (n_blocks + 1) + n_blocks, total)
        for start in range(total, k, STEP):
            place = start + tl.arange(0, STEP)
            tl.store(index_ptr + row * k + place, tl.full((STEP,), -1, tl.int64), mask=place < k)
            tl.store(gate_ptr + row * k + place, tl.zeros((STEP,), gate_ptr.dtype.element_ty), mask=place < k)


@triton.jit
def load_chosen(dgate_ptr, gate_ptr, slot, chosen, eps):
    """Return the gradient of a chosen token's score through its own gate; 0 for other tokens."""
    g = tl.load(gate_ptr + slot, mask=chosen, other=0.0).to(tl.float32)
    dg = tl.load(dgate_ptr + slot, mask=chosen, other=0.0).to(tl.float32)
    return tl.where(chosen, dg * g * (1.0 - g) / eps, 0.0)


@triton.jit(do_not_specialize=[*INTS, "eps"])
def sums_kernel(
    s_ptr,  # this to start_ptr: as choose_kernel takes and leaves them
    mask_ptr,
    threshold_ptr,
    gate_ptr,
    start_ptr,
    dgate_ptr,  # (batch, k) of any float dtype
    sums_ptr,  # (batch, 3, n_blocks) fp32, per block: Σ slope, Σ slope·score, Σ chosen scores' gradient by own gates
    s_row_stride,
    mask_row_stride,
    n_cols,
    k,
    block,
    n_blocks,
    eps,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    programs = (n_blocks + BLOCK_B - 1) // BLOCK_B
    row = (tl.program_id(0) // programs).to(tl.int64)
    b = (tl.program_id(0) % programs) * BLOCK_B + tl.arange(0, BLOCK_B)
    _, s, threshold, _, real = load_block(
        s_ptr, mask_ptr, threshold_ptr, row, b[:, None], s_row_stride, mask_row_stride, n_cols, block, n_blocks, BLOCK_C
    )
    gate = tl.sigmoid((s - threshold) / eps)
    slope = tl.where(real, gate * (1.0 - gate), 0.0)
    inside = b < n_blocks
    starts = start_ptr + row * (n_blocks + 1) + b
    start = tl.load(starts, mask=inside, other=0)
    end = tl.load(starts + 1, mask=inside, other=0)
    place = start[:, None] + tl.arange(0, BLOCK_C)[None, :]
    by_own_gate = load_chosen(dgate_ptr, gate_ptr, row * k + place, place < end[:, None], eps)
    sums_ptr += row * 3 * n_blocks + b
    tl.store(sums_ptr, tl.sum(slope, 1), mask=inside)
    tl.store(sums_ptr + n_blocks, tl.sum(tl.where(real, slope * s, 0.0), 1), mask=inside)
    tl.store(sums_ptr + 2 * n_blocks, tl.sum(by_own_gate, 1), mask=inside)


@triton.jit
def load_shares(sums_ptr, first, b, n_blocks, weight, weighted):
    """Return each block's share, and Σ slope and Σ slope·score up to the last of blocks b.

    The share is the gradient that a block's threshold passes back to each earlier score, per unit of that score's
    slope, with the sign reversed. `weight` and `weighted`: Σ slope and Σ slope·score before the first of b.
    """
    inside = b < n_blocks
    slope = tl.load(sums_ptr + b, mask=inside, other=0.0)
    slope_score = tl.load(sums_ptr + n_blocks + b, mask=inside, other=0.0)
    by_own_gates = tl.load(sums_ptr + 2 * n_blocks + b, mask=inside, other=0.0)
    # sums over the blocks before b, not running sums less b: non-finite values of b may affect later blocks only
    between = inside & (b > first)
    weight_before = weight + tl.cumsum(tl.load(sums_ptr + b - 1, mask=between, other=0.0), 0)
    mean = (weighted + tl.cumsum(tl.load(sums_ptr + n_blocks + b - 1, mask=between, other=0.0), 0)) / tl.maximum(
        weight_before, TINY
    )
    # the first block's thresholds pass no gradient
    follows = (b > 0) & (weight_before > 0) & (tl.abs(mean) < float("inf"))
    share = tl.where(follows, by_own_gates / tl.maximum(weight_before, TINY), 0.0)
    return share, weight + tl.sum(slope, 0), weighted + tl.sum(slope_score, 0)


@triton.jit(do_not_specialize=[*INTS, "eps"])
def gradient_kernel(
    s_ptr,  # this to sums_ptr: as sums_kernel takes and leaves them
    mask_ptr,
    threshold_ptr,
    gate_ptr,
    start_ptr,
    dgate_ptr,
    sums_ptr,
    ds_ptr,  # (batch, n_cols) of any float dtype
    s_row_stride,
    mask_row_stride,
    n_cols,
    k,
    block,
    n_blocks,
    eps,
    STEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    programs = (n_blocks + BLOCK_B - 1) // BLOCK_B
    row = (tl.program_id(0) // programs).to(tl.int64)
    begin = (tl.program_id(0) % programs) * BLOCK_B
    sums_ptr += row * 3 * n_blocks
    weight = 0.0
    weighted = 0.0
    for start in range(0, begin, STEP):
        b = start + tl.arange(0, STEP)
        weight += tl.sum(tl.load(sums_ptr + b, mask=b < begin, other=0.0), 0)
        weighted += tl.sum(tl.load(sums_ptr + n_blocks + b, mask=b < begin, other=0.0), 0)
    b = begin + tl.arange(0, BLOCK_B)
    share, weight, weighted = load_shares(sums_ptr, begin, b, n_blocks, weight, weighted)
    later_shares = tl.sum(share, 0) - tl.cumsum(share, 0)
    for start in range(begin + BLOCK_B, n_blocks, STEP):
        shares, weight, weighted = load_shares(sums_ptr, start, start + tl.arange(0, STEP), n_blocks, weight, weighted)
        later_shares += tl.sum(shares, 0)
    token, s, threshold, present, real = load_block(
        s_ptr, mask_ptr, threshold_ptr, row, b[:, None], s_row_stride, mask_row_stride, n_cols, block, n_blocks, BLOCK_C
    )
    gate = tl.sigmoid((s - threshold) / eps)
    slope = tl.where(real, gate * (1.0 - gate), 0.0)
    starts = start_ptr + row * (n_blocks + 1) + b
    inside = b < n_blocks
    first_place = tl.load(starts, mask=inside, other=0)
    room = tl.load(starts + 1, mask=inside, other=0) - first_place
    above = real & (s > threshold)
    rank = tl.cumsum(above.to(tl.int32), 1)
    chosen = above & (rank <= room[:, None])
    by_own_gate = load_chosen(dgate_ptr, gate_ptr, row * k + first_place[:, None] + rank - 1, chosen, eps)
    ds = by_own_gate - slope * later_shares[:, None]
    tl.store(ds_ptr + row * n_cols + token, ds.to(ds_ptr.dtype.element_ty), mask=present)


class Shape(NamedTuple):
    """Launch shapes, which depend on n, block and memory alone.

    In `threshold_kernel`: block_m scores, block_r tokens of the first block and `warps` warps per program; n_first
    programs share the first block. A row has n_blocks blocks. In the other kernels: block_b blocks per program,
    block_c columns per block, `step` blocks per step.
    """

    block_m: int
    block_r: int
    warps: int
    n_first: int
    n_blocks: int
    block_b: int
    block_c: int
    step: int


def fits(block: int, memory: int) -> bool:
    """Return whether the kernels take this block and memory."""
    return block <= MAX_BLOCK and memory <= MAX_MEMORY


def shape(n: int, block: int, memory: int) -> Shape:
    block_m, block_c, n_blocks = next_power_of_2(memory), next_power_of_2(block), cdiv(n, block)
    block_r = min(block_c, max(block_m, FIRST) // block_c)
    warps = min(16, max(1, max(block_m, block_r * block_c) // PER_WARP))
    block_b = min(TILE // block_c, next_power_of_2(n_blocks))
    return Shape(
        block_m, block_r, warps, cdiv(block, block_r), n_blocks, block_b, block_c,
        min(STEP, max(block_b, next_power_of_2(n_blocks))),
    )  # fmt: skip


def _rows(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """Return scores and mask as rows with unit column stride, and the mask's row stride."""
    rows = None if mask is None else as_rows(mask.view(torch.uint8))
    return as_rows(scores), rows, 0 if rows is None else rows.stride(0)


def forward(
    scores: Tensor, mask: Tensor | None, k: int, share: tuple[int, int], eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gates, indices, thresholds, and how many are chosen before each block; k ≤ n places, batch ≥ 1."""
    batch, n = scores.shape
    plan = shape(n, block, memory)
    device = scores.device
    indices = torch.empty((batch, k), dtype=torch.int64, device=device)
    gates = torch.empty((batch, k), dtype=scores.dtype, device=device)
    thresholds = torch.empty((batch, block + plan.n_blocks - 1), dtype=torch.float32, device=device)
    starts = torch.empty((batch, plan.n_blocks + 1), dtype=torch.int32, device=device)
    programs = plan.n_first + plan.n_blocks - 1
    n_above = torch.empty((batch, programs), dtype=torch.int32, device=device)
    n_real = None if mask is None else torch.empty_like(n_above)
    s, masks, mask_row = _rows(scores, mask)
    launch(
        threshold_kernel, (batch * programs, 1, 1), (s, masks, thresholds, n_above, n_real),
        (s.stride(0), mask_row, n, *share, block, memory, plan.n_blocks, plan.n_first),
        (plan.block_m, plan.block_r, plan.block_c), num_warps=plan.warps,
    )  # fmt: skip
    launch(
        choose_kernel, (batch * cdiv(plan.n_blocks, plan.block_b), 1, 1),
        (s, masks, thresholds, n_above, n_real, indices, gates, starts),
        (s.stride(0), mask_row, n, k, *share, block, plan.n_blocks, plan.n_first, eps),
        (next_power_of_2(plan.n_first), plan.step, plan.block_b, plan.block_c), num_warps=4,
    )  # fmt: skip
    return gates, indices, thresholds, starts


def backward(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, gates: Tensor, thresholds: Tensor, starts: Tensor,
    eps: float, block: int, ds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores from that of the gates; with `ds`, contiguous, it is written there."""
    batch, n = scores.shape
    # the backward tiles don't depend on the memory, so any valid value serves
    plan = shape(n, block, block)
    sums = torch.empty((batch, 3, plan.n_blocks), dtype=torch.float32, device=scores.device)
    ds = torch.empty((batch, n), dtype=scores.dtype, device=scores.device) if ds is None else ds
    s, masks, mask_row = _rows(scores, mask)
    grid = (batch * cdiv(plan.n_blocks, plan.block_b), 1, 1)
    inputs = (s, masks, thresholds, gates, starts, g_gates.contiguous())
    numbers = (s.stride(0), mask_row, n, gates.shape[1], block, plan.n_blocks, eps)
    launch(sums_kernel, grid, (*inputs, sums), numbers, (plan.block_b, plan.block_c), num_warps=4)
    launch(gradient_kernel, grid, (*inputs, sums, ds), numbers, (plan.step, plan.block_b, plan.block_c), num_warps=4)
    return ds
