"""Triton kernels of topk's selection: find the k-th largest score of a row, collect the k survivors, sort them.

Scores become int32 keys in the same order (NaN above +inf, -0 equal to 0), so a threshold is an integer and ties are
exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from onepass.core.launch import cdiv, device_guard, launch, next_power_of_2, sm_count

# key of -inf: only larger keys are chosen
NOTHING = tl.constexpr(-2139095041)
LARGEST = tl.constexpr(2147483647)
# key of every NaN, whatever its sign and payload: above +inf even in the leading digits that 16-bit dtypes compare
NAN = tl.constexpr(2143289344)
# padding among packed survivors (key and column in one int64): below all of them
PAD = tl.constexpr(-9200000000000000000)
LOW = tl.constexpr(4294967295)

# longest row that one program holds in registers, and elements per warp
MAX_COLS = 32768
PER_WARP = 1024
# elements per warp in a scan
PER_SCAN = 256
# longer rows: elements in registers at a time, fewest per program, most programs per row and per multiprocessor
TILE = 4096
CHUNK = 8192
MAX_SPLITS = 256
PER_SM = 4
# registers per thread with which PER_SM programs of 8 warps fit; elements that collect_kernel scans at a time
RESIDENT = 64
COLLECTED = 2048
# most survivors of a row that one program sorts; elements per warp of that sort with many rows, and with few
MAX_SORTED = 4096
SORT_PER_WARP = 512
SORT_PER_WARP_OF_FEW = 64
# more survivors: length of a sorted run, runs merged at a time, elements per program of a merge
RUN = 1024
WAYS = 4
MERGED = 256
# up to this many matching keys of a tile are counted one by one
FEW = tl.constexpr(64)
# 8-bit digits that distinguish two scores, 4 by default: 16-bit dtypes leave the low digits of a key constant
DIGITS = {torch.bfloat16: 2, torch.float16: 3}
INTS = ["s_row_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits", "tiles", "k"]


@triton.jit
def to_key(s):
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    return tl.where(s != s, NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def load_keys(s_ptr, mask_ptr, s_offset, mask_offset, inside, HAS_MASK: tl.constexpr):
    """Return the keys of scores, NOTHING where masked or outside."""
    s = tl.load(s_ptr + s_offset, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_MASK:
        allowed = tl.load(mask_ptr + mask_offset, mask=inside, other=0)
        s = tl.where(allowed != 0, s, -float("inf"))
    return to_key(s)


@triton.jit
def put(out_ptr, at, key, cols, chosen):
    """Store survivors, key and column packed in one int64 that sorts by score, then by lowest column."""
    tl.store(out_ptr + at, (key.to(tl.int64) << 32) | (0x7FFFFFFF - cols.to(tl.int64)), mask=chosen)


@triton.jit(do_not_specialize=INTS)
def select_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    out_ptr,  # (n_rows, k) int64: packed survivors
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
    mask_row_stride,
    n_rows,
    n_cols,
    k,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    present = rows < n_rows
    key = load_keys(
        s_ptr, mask_ptr, rows * s_row_stride + cols, rows * mask_row_stride + cols, present & (cols < n_cols), HAS_MASK
    )
    valid = tl.sum((key > NOTHING).to(tl.int32), 1)
    few = valid <= k
    # at least k keys are ≥ lo, fewer than k are ≥ hi
    lo = tl.where(few, NOTHING, tl.min(tl.where(key > NOTHING, key, LARGEST), 1))
    hi = tl.where(few, NOTHING, tl.max(key, 1)) + 1
    while tl.max((lo + 1 < hi).to(tl.int32), 0) > 0:
        middle = (lo & hi) + ((lo ^ hi) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        # exactly k: this row is solved, so set hi = lo + 1
        hi = tl.where(count < k, middle, tl.where(count == k, middle + 1, hi))
        lo = tl.where(count < k, lo, middle)
    room = (k - tl.sum((key > lo[:, None]).to(tl.int32), 1))[:, None]
    kept = tl.where(few, valid, k)[:, None]
    above_before = tl.zeros((BLOCK_R, 1), tl.int32)
    level_before = tl.zeros((BLOCK_R, 1), tl.int32)
    # load the keys again, from the cache: registers can't hold them beside the scan
    for start in range(0, BLOCK_C, BLOCK_T):
        here = (start + tl.arange(0, BLOCK_T))[None, :]
        near = load_keys(
            s_ptr, mask_ptr, rows * s_row_stride + here, rows * mask_row_stride + here, present & (here < n_cols),
            HAS_MASK,
        )  # fmt: skip
        above = near > lo[:, None]
        level = (near == lo[:, None]) & (near > NOTHING)
        # one scan for both counts, 16 bits each
        ones = (above.to(tl.int32) << 16) | level.to(tl.int32)
        total = tl.sum(ones, 1)
        if tl.max(total, 0) > 0:
            both = tl.cumsum(ones, 1)
            n_level = level_before + (both & 0xFFFF)
            chosen = above | (level & (n_level <= room))
            slot = above_before + (both >> 16) + tl.minimum(n_level, room) - 1
            put(out_ptr, rows * k + slot, near, here, chosen)
        above_before += (total >> 16)[:, None]
        level_before += (total & 0xFFFF)[:, None]
        empty = present & (here >= kept) & (here < k)
        tl.store(out_ptr + rows * k + here, tl.full((BLOCK_R, BLOCK_T), PAD, tl.int64), mask=empty)


@triton.jit
def fetch(index, at, wanted, s_ptr, y_ptr, value_ptr, gate_ptr, s_row, y_row, HARD: tl.constexpr):
    """Store scores and gates of chosen columns; -inf and 0 where the index is -1."""
    found = wanted & (index >= 0)
    score = tl.load(s_ptr + s_row + index, mask=found, other=-float("inf"))
    gate = tl.load(y_ptr + y_row + index, mask=found, other=0.0)
    if HARD:
        # 1, or NaN for a NaN gate
        gate = tl.where(found, 1.0 + (gate - gate), 0.0)
    tl.store(value_ptr + at, score, mask=wanted)
    tl.store(gate_ptr + at, gate.to(gate_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def to_column(packed):
    """Return the column of a survivor, -1 for padding."""
    return tl.where((packed >> 32) <= NOTHING, -1, 0x7FFFFFFF - (packed & LOW))


@triton.jit(do_not_specialize=["s_row_stride", "n_rows", "n_cols", "k"])
def sort_kernel(
    packed_ptr,  # (n_rows, k) int64 survivors
    out_ptr,  # (n_rows, k) int64 columns, best score first, then -1
    s_ptr,  # (n_rows, n_cols) scores; this and the next three, of one dtype, are used with FETCH only
    y_ptr,  # (n_rows, n_cols) soft gates
    value_ptr,  # (n_rows, k) scores of the survivors
    gate_ptr,  # (n_rows, k) gates of the survivors
    s_row_stride,
    n_rows,
    n_cols,
    k,
    FETCH: tl.constexpr,
    HARD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    wanted = (rows < n_rows) & (cols < k)
    at = rows * k + cols
    packed = tl.load(packed_ptr + at, mask=wanted, other=PAD)
    packed = tl.sort(packed, 1, descending=True)
    index = to_column(packed)
    tl.store(out_ptr + at, index, mask=wanted)
    if FETCH:
        fetch(index, at, wanted, s_ptr, y_ptr, value_ptr, gate_ptr, rows * s_row_stride, rows * n_cols, HARD)


@triton.jit(do_not_specialize=["k"])
def run_kernel(
    packed_ptr,  # (n_rows, k) int64 survivors
    out_ptr,  # (n_rows, k) int64: every BLOCK of a row in descending order
    k,
    BLOCK: tl.constexpr,
):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * k + cols
    packed = tl.load(packed_ptr + at, mask=cols < k, other=PAD)
    tl.store(out_ptr + at, tl.sort(packed, 0, descending=True), mask=cols < k)


@triton.jit(do_not_specialize=["s_row_stride", "n_cols", "k", "run", "steps"])
def merge_kernel(
    packed_ptr,  # (n_rows, k) int64 survivors in sorted runs
    out_ptr,  # (n_rows, k) int64: runs WAYS times as long; in the last round columns, best score first, then -1
    s_ptr,  # as for sort_kernel
    y_ptr,
    value_ptr,
    gate_ptr,
    s_row_stride,
    n_cols,
    k,
    run,
    steps,
    LAST: tl.constexpr,
    FETCH: tl.constexpr,
    HARD: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge WAYS runs: a survivor's place is its place in its own run plus its rank in the others, by bisection."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < k
    mine = tl.load(packed_ptr + row * k + cols, mask=inside, other=PAD)
    own = cols // run
    first = own // WAYS * WAYS
    other = first[:, None] + tl.arange(0, WAYS)[None, :]
    start = other * run
    # padding is equal to padding: that of earlier runs comes first
    earlier = other < own[:, None]
    lo = tl.zeros((BLOCK, WAYS), tl.int32)
    hi = tl.where(other == own[:, None], 0, tl.minimum(tl.maximum(k - start, 0), run))
    for _ in range(steps):
        middle = (lo + hi) // 2
        open = (lo < hi) & inside[:, None]
        theirs = tl.load(packed_ptr + row * k + start + middle, mask=open, other=PAD)
        before = (theirs > mine[:, None]) | (earlier & (theirs == mine[:, None]))
        lo = tl.where(open & before, middle + 1, lo)
        hi = tl.where(open & (before == 0), middle, hi)
    place = row * k + first * run + (cols - own * run) + tl.sum(lo, 1)
    if LAST:
        index = to_column(mine)
        tl.store(out_ptr + place, index, mask=inside)
        if FETCH:
            fetch(index, place, inside, s_ptr, y_ptr, value_ptr, gate_ptr, row * s_row_stride, row * n_cols, HARD)
    else:
        tl.store(out_ptr + place, mine, mask=inside)


@triton.jit
def next_digit(totals_ptr, state_ptr, row, n_rows, k, PASS: tl.constexpr):
    """Return the first PASS digits of the k-th largest key, how many keys that begin so are wanted, the last digit."""
    digit = tl.arange(0, 256)
    if PASS == 1:
        prefix = -128
        wanted = k
    else:
        state = state_ptr + ((PASS - 1) * n_rows + row) * 2
        prefix = tl.load(state) * 256
        wanted = tl.load(state + 1)
    count = tl.load(totals_ptr + ((PASS - 1) * n_rows + row) * 256 + digit)
    from_top = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    found = tl.sum((from_top >= wanted).to(tl.int32), 0) - 1
    beyond = tl.sum(tl.where(digit > found, count, 0), 0)
    return prefix + found, wanted - beyond, found


@triton.jit(do_not_specialize=INTS)
def count_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    totals_ptr,  # (N_PASSES, n_rows, 256) int32, zero at first: keys per digit, of those that begin like the k-th
    state_ptr,  # (N_PASSES, n_rows, 2) int32: the digits so far, how many keys are still wanted
    ranks_ptr,  # (n_rows, n_splits, 257) int32, by the last pass: keys of a chunk at or above each last digit
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    tiles,
    k,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PASS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    digits = tl.arange(0, 256)
    shift: tl.constexpr = 24 - 8 * PASS
    prefix = 0
    if PASS > 0:
        prefix, wanted, _ = next_digit(totals_ptr, state_ptr, row, n_rows, k, PASS)
        if split == 0:
            state = state_ptr + (PASS * n_rows + row) * 2
            tl.store(state, prefix)
            tl.store(state + 1, wanted)
    counts = tl.zeros((256,), tl.int32)
    above = 0
    for tile in range(split * tiles, (split + 1) * tiles):
        cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = cols < n_cols
        key = load_keys(s_ptr, mask_ptr, row * s_row_stride + cols, row * mask_row_stride + cols, inside, HAS_MASK)
        if PASS == 0:
            counts += tl.histogram((key >> 24) + 128, 256, mask=inside)
        else:
            lead = key >> (shift + 8)
            same = inside & (lead == prefix)
            if LAST:
                above += tl.sum((inside & (lead > prefix)).to(tl.int32), 0)
            n_same = tl.sum(same.to(tl.int32), 0)
            digit = (key >> shift) & 255
            if (n_same > FEW) | (LAST & (n_same > 0)):
                counts += tl.histogram(digit, 256, mask=same)
            elif n_same > 0:
                # a few atomics cost less than a histogram of the tile
                tl.atomic_add(totals_ptr + (PASS * n_rows + row) * 256 + digit, 1, mask=same, sem="relaxed")
    # sums of integers are the same in any order
    tl.atomic_add(totals_ptr + (PASS * n_rows + row) * 256 + digits, counts, mask=counts > 0, sem="relaxed")
    if LAST:
        ranks = ranks_ptr + (row * n_splits + split) * 257
        tl.store(ranks + digits, above + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts)
        tl.store(ranks + 256, above)


@triton.jit(do_not_specialize=INTS)
def collect_kernel(
    s_ptr,  # (n_rows, n_cols) scores, any float dtype
    mask_ptr,  # (n_rows, n_cols) uint8 or None
    totals_ptr,  # this and the next two as count_kernel left them
    state_ptr,
    ranks_ptr,
    out_ptr,  # (n_rows, k) int64: packed survivors; padding at first
    s_row_stride,  # in UNITs, like n_cols: multiples of 16 elements allow loads of 16 bytes
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    tiles,
    k,
    UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    N_PASSES: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n_cols = n_cols * UNIT
    s_row_stride = s_row_stride * UNIT
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    shift: tl.constexpr = 32 - 8 * N_PASSES
    threshold, room, digit = next_digit(totals_ptr, state_ptr, row, n_rows, k, N_PASSES)
    here = tl.arange(0, N_SPLITS)
    ranks = ranks_ptr + (row * n_splits + here) * 257 + digit
    least = tl.sum(tl.load(ranks, mask=here < split, other=0), 0)
    above_before = tl.sum(tl.load(ranks + 1, mask=here < split, other=0), 0)
    level_before = least - above_before
    for tile in range(split * tiles, (split + 1) * tiles):
        cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = cols < n_cols
        key = load_keys(s_ptr, mask_ptr, row * s_row_stride + cols, row * mask_row_stride + cols, inside, HAS_MASK)
        above = inside & ((key >> shift) > threshold)
        level = inside & ((key >> shift) == threshold)
        ones = (above.to(tl.int32) << 16) | level.to(tl.int32)
        total = tl.sum(ones, 0)
        if total > 0:
            both = tl.cumsum(ones, 0)
            n_level = level_before + (both & 0xFFFF)
            # -inf takes a slot and is not stored: the slot keeps its padding
            chosen = (above | (level & (n_level <= room))) & (key > NOTHING)
            slot = above_before + (both >> 16) + tl.minimum(n_level, room) - 1
            put(out_ptr, row * k + slot, key, cols, chosen)
        above_before += total >> 16
        level_before += total & 0xFFFF


class Plan(NamedTuple):
    """A launch shape: rows, columns and warps per program; programs per row (1: whole rows) and tiles of each."""

    block_r: int
    block_c: int
    warps: int
    splits: int
    tiles: int


def plan(n_rows: int, n_cols: int, sms: int) -> Plan:
    """Return the launch shape. The selection doesn't depend on it, so it may depend on rows, columns and the GPU."""
    if n_cols <= MAX_COLS:
        block_c = next_power_of_2(n_cols)
        return Plan(max(1, min(32, 512 // block_c)), block_c, max(1, block_c // PER_WARP), 1, 1)
    splits = min(MAX_SPLITS, max(1, cdiv(PER_SM * sms, n_rows)))
    tiles = cdiv(max(CHUNK, cdiv(n_cols, splits)), TILE)
    return Plan(1, TILE, 8, cdiv(n_cols, tiles * TILE), tiles)


def sort_shape(n_rows: int, k: int, sms: int) -> tuple[int, int, int]:
    """Return (rows per program, columns, warps) of the sort of k survivors."""
    block_k = next_power_of_2(k)
    per_warp = SORT_PER_WARP if n_rows > PER_SM * sms else SORT_PER_WARP_OF_FEW
    return max(1, min(32, 256 // block_k)), block_k, max(1, min(32, block_k // per_warp))


def _collect(s: Tensor, mask: Tensor | None, k: int) -> Tensor:
    """Return the k survivors of each row, packed and not yet sorted."""
    n_rows, n_cols = s.shape
    shape = plan(n_rows, n_cols, sm_count(s))
    has_mask = mask is not None
    unit = 16 if n_cols % 16 == 0 and s.stride(0) % 16 == 0 else 1
    sizes = (s.stride(0) // unit, mask.stride(0) if mask is not None else 0, n_rows, n_cols // unit)
    if shape.splits == 1:
        out = torch.empty((n_rows, k), dtype=torch.int64, device=s.device)
        scan = min(shape.block_c, PER_SCAN * shape.warps, TILE)
        launch(
            select_kernel, (cdiv(n_rows, shape.block_r), 1, 1), (s, mask, out), (*sizes, k),
            (unit, has_mask, shape.block_r, shape.block_c, scan), num_warps=shape.warps,
        )  # fmt: skip
        return out
    out = torch.full((n_rows, k), PAD.value, dtype=torch.int64, device=s.device)
    digits = DIGITS.get(s.dtype, 4)
    totals = torch.zeros((digits, n_rows, 256), dtype=torch.int32, device=s.device)
    state = torch.empty((digits, n_rows, 2), dtype=torch.int32, device=s.device)
    ranks = torch.empty((n_rows, shape.splits, 257), dtype=torch.int32, device=s.device)
    grid = (n_rows, shape.splits, 1)
    numbers = (*sizes, shape.splits, shape.tiles, k)
    collected = min(COLLECTED, shape.block_c)
    options = {"num_warps": shape.warps, **({} if torch.version.hip is not None else {"maxnreg": RESIDENT})}
    for digit in range(digits):
        launch(
            count_kernel, grid, (s, mask, totals, state, ranks), numbers,
            (unit, has_mask, digit, digit == digits - 1, shape.block_c), **options,
        )  # fmt: skip
    launch(
        collect_kernel, grid, (s, mask, totals, state, ranks, out),
        (*sizes, shape.splits, shape.tiles * (shape.block_c // collected), k),
        (unit, has_mask, digits, next_power_of_2(shape.splits), collected), **options,
    )  # fmt: skip
    return out


class Found(NamedTuple):
    """Columns (…, k) int64 of the k largest, best first, then -1; with soft gates also their scores and gates."""

    indices: Tensor
    values: Tensor
    gates: Tensor


def select(
    s: Tensor, mask: Tensor | None, k: int, soft: Tensor | None = None, hard: bool = True,
    lead: tuple[int, ...] | None = None,
) -> Found:  # fmt: skip
    """Select the k largest of each row of s (rows, n), unit column stride; results are (*lead, k), default (rows, k).

    soft (rows, n), contiguous, adds values and gates to the result; hard replaces these gates by 1.
    """
    n_rows, n_cols = s.shape
    lead = (n_rows,) if lead is None else lead
    if k > n_cols:
        # select n, then pad
        found = select(s, mask, n_cols, soft, hard, lead)
        more = (0, k - n_cols)
        indices = pad(found.indices, more, value=-1)
        if soft is None:
            return Found(indices, indices, indices)
        return Found(indices, pad(found.values, more, value=-math.inf), pad(found.gates, more))
    indices = torch.empty((*lead, k), dtype=torch.int64, device=s.device)
    values = indices if soft is None else torch.empty((*lead, k), dtype=s.dtype, device=s.device)
    gates = indices if soft is None else torch.empty((*lead, k), dtype=s.dtype, device=s.device)
    if not indices.numel():
        return Found(indices, values, gates)
    wanted = soft is not None, hard
    with device_guard(s):
        out = _collect(s, mask, k)
        if k <= MAX_SORTED:
            block_r, block_k, warps = sort_shape(n_rows, k, sm_count(s))
            launch(
                sort_kernel, (cdiv(n_rows, block_r), 1, 1), (out, indices, s, soft, values, gates),
                (s.stride(0), n_rows, n_cols, k), (*wanted, block_r, block_k), num_warps=warps,
            )  # fmt: skip
            return Found(indices, values, gates)
        runs = torch.empty_like(out)
        launch(run_kernel, (n_rows, cdiv(k, RUN), 1), (out, runs), (k,), (RUN,), num_warps=16)
        run = RUN
        while run < k:
            last = run * WAYS >= k
            launch(
                merge_kernel, (n_rows, cdiv(k, MERGED), 1),
                (runs, indices if last else out, s, soft, values, gates),
                (s.stride(0), n_cols, k, run, run.bit_length()), (last, *wanted, WAYS, MERGED), num_warps=4,
            )  # fmt: skip
            runs, out, run = out, runs, run * WAYS
    return Found(indices, values, gates)
