"""Launch the selection: find each row's survivors, put them in order, fetch scores and gates; and backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.launch import cdiv, launch, sm_count

from . import plan
from .kernels_pivot import choose_kernel, pass_kernel, pivot_kernel, wide_kernel
from .kernels_sort import COUNTERS, add_kernel, merge_kernel, run_kernel, sort_kernel
from .kernels_whole import narrow_kernel, whole_kernel

# chosen entries that a program of `add_kernel` takes
BLOCK = 1024


def add(ds: Tensor, indices: Tensor, gradient: Tensor) -> None:
    """Add the gradient (rows, k) of chosen entries to ds (rows, n); ds and indices (rows, k) are contiguous."""
    n_rows, k = indices.shape
    if not n_rows:
        return
    launch(
        add_kernel, (cdiv(n_rows * k, BLOCK), 1, 1), (indices, gradient, ds),
        (*gradient.stride(), n_rows, ds.shape[1], k), (BLOCK,), num_warps=4,
    )  # fmt: skip


class Rows(NamedTuple):
    """What to select from: scores (rows, n) of unit column stride; the others are None or belong to these rows."""

    s: Tensor
    mask: Tensor | None  # (rows, n) uint8
    start: Tensor | None  # (rows,) int32 or int64
    lengths: Tensor | None  # (rows,) int32 or int64
    largest: bool


class _Survivors(NamedTuple):
    """Packed survivors (rows, width), and the rows' counters, or None where they are in the order of columns."""

    packed: Tensor
    state: Tensor | None


def _layout(rows: Rows) -> tuple[tuple[int, ...], int, tuple[Any, ...]]:
    """Return what every kernel of a selection takes: strides of the rows, columns in units, constants."""
    s, *per_row, _ = rows
    unit = 1 if s.data_ptr() % 16 else math.gcd(16, s.shape[1], s.stride(0))
    strides = s.stride(0) // unit, *(0 if t is None else t.stride(0) for t in per_row)
    options = unit, rows.largest, plan.CONSTANT_BITS.get(s.dtype, 0)
    return strides, s.shape[1] // unit, options


def _limit(registers: int | None) -> dict[str, int]:
    """Return the launch option that bounds a thread's registers; AMD's compiler has none."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}


def _in_one_launch(
    rows: Rows, k: int, shape: plan.Narrow | plan.Wide | plan.Whole, results: tuple[Tensor | None, ...], is_sorted: bool
) -> _Survivors | None:
    """Select, order and fetch by one kernel; or return k packed survivors of each row, which are too many to order."""
    strides, n_cols, options = _layout(rows)
    s, n_rows = rows.s, len(rows.s)
    if isinstance(shape, plan.Narrow):
        launch(
            narrow_kernel, (cdiv(n_rows, shape.block_r), 1, 1), (*rows[:4], *results),
            (*strides, n_rows, n_cols, k), (*options, is_sorted, *shape), num_warps=plan.NARROW_WARPS,
        )  # fmt: skip
        return None
    if isinstance(shape, plan.Whole):
        many = is_sorted and k > plan.SORTED_BY_WHOLE
        number = torch.int32 if s.element_size() == 2 else torch.int64
        packed = torch.empty((n_rows, k), dtype=number, device=s.device) if many else None
        vector = min(plan.VECTOR // s.element_size(), shape.block_c)
        if s.stride(0) % vector and (s.shape[1] + vector - 1 > shape.block_c or rows.mask is not None):
            # no room for the scores between a boundary and the row
            vector = options[0]
        launch(
            whole_kernel, (cdiv(n_rows, shape.block_r), 1, 1), (*rows[:4], packed, *results),
            (*strides, n_rows, n_cols, k), (*options, is_sorted, *shape[:3], vector), num_warps=shape.warps,
            **_limit(shape.registers),
        )  # fmt: skip
        return None if packed is None else _Survivors(packed, None)
    groups = torch.empty((n_rows, shape.groups), dtype=torch.int32, device=s.device)
    candidates = torch.empty((n_rows, shape.room), dtype=torch.int64, device=s.device)
    launch(
        wide_kernel, (n_rows, 1, 1), (*rows[:4], groups, candidates, *results),
        (*strides, n_cols, k), (*options, is_sorted, *shape[:5]), num_warps=shape.warps,
    )  # fmt: skip
    return None


def _survivors(rows: Rows, k: int, shape: plan.Pivot) -> _Survivors:
    """Return k packed survivors of each row, or more from which a sort takes the best."""
    s, n_rows = rows.s, len(rows.s)
    strides, units, options = _layout(rows)
    state = torch.empty((n_rows, COUNTERS.value), dtype=torch.int32, device=s.device)
    pivots = torch.empty(n_rows, dtype=torch.float32, device=s.device)
    chooses = k <= plan.MAX_SORTED
    candidates = torch.empty((n_rows, shape.capacity), dtype=torch.int64, device=s.device)
    pointers, numbers = (*rows[:4], pivots, state), (*strides, units, k, shape.capacity)
    in_order = shape.splits == 1
    launch(
        pivot_kernel, (n_rows, 1, 1), pointers, numbers,
        (*options, int(not in_order), plan.SIGMAS, shape.groups, shape.group), num_warps=shape.sample_warps,
    )  # fmt: skip
    launch(
        pass_kernel, (n_rows, shape.splits, 1), (*pointers, candidates), (*numbers, shape.tiles),
        (*options[:-1], in_order, plan.TILE, shape.vector, shape.parts, shape.tile_stages), num_warps=plan.TILE_WARPS,
    )  # fmt: skip
    out = torch.empty((n_rows, k), dtype=torch.int64, device=s.device) if chooses else candidates
    launch(
        choose_kernel, (n_rows, 1, 1), (*pointers, candidates, out), (*numbers, out.stride(0)),
        (*options, chooses, shape.capacity if chooses else 1, plan.ALONE), num_warps=shape.choose_warps,
        **_limit(shape.choose_registers),
    )  # fmt: skip
    return _Survivors(out, state)


def _merged(
    survivors: _Survivors, by_score: bool, k: int, spare: Tensor, results: tuple[Tensor | None, ...] | None,
    numbers: tuple[int, int], largest: bool,
) -> Tensor:  # fmt: skip
    """Sort rows of any length in runs, then merge these; with `results` the last merge fetches scores and gates."""
    packed, state = survivors
    n_rows, width = packed.shape
    count = width if by_score else k
    launch(
        run_kernel, (n_rows, cdiv(count, plan.RUN), 1), (packed, state, spare), (packed.stride(0), spare.stride(0), k),
        (by_score, plan.RUN), num_warps=16,
    )  # fmt: skip
    packed, spare, run = spare, packed, plan.RUN
    no_results: tuple[Tensor | None, ...] = (None,) * 5
    done = False
    while not done:
        done = run * plan.WAYS >= count
        fetches = done and results is not None
        launch(
            merge_kernel, (n_rows, cdiv(count, plan.MERGED), 1),
            (packed, state, None if fetches else spare, *(results if fetches and results is not None else no_results)),
            (*numbers, packed.stride(0), k, run, run.bit_length()),
            (by_score, fetches, largest, plan.WAYS, plan.MERGED), num_warps=4,
        )  # fmt: skip
        packed, spare, run = spare, packed, run * plan.WAYS
    return packed


def select(
    rows: Rows, k: int, is_sorted: bool, soft: Tensor | None, index_dtype: torch.dtype, lead: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, gates and indices (*lead, k) of the k ≤ n largest of each row; index -1 where fewer exist.

    is_sorted: best first, else ascending indices. Gates are 1, or those of soft (rows, n), contiguous.
    """
    s = rows.s
    n_rows, n_cols = s.shape
    size = (*lead, k)
    values = torch.empty(size, dtype=s.dtype, device=s.device)
    gates, indices = torch.empty_like(values), torch.empty(size, dtype=index_dtype, device=s.device)
    selected = values, gates, indices
    if not values.numel():
        return selected
    results = indices, s, soft, values, gates
    shape = plan.of_selection(n_rows, n_cols, k, s.element_size(), sm_count(s))
    survivors: _Survivors | None
    if isinstance(shape, plan.Pivot):
        survivors = _survivors(rows, k, shape)
    else:
        survivors = _in_one_launch(rows, k, shape, (indices, soft, values, gates), is_sorted)
    if survivors is None:
        return selected
    if k <= plan.MAX_SORTED or isinstance(shape, plan.Whole):
        block_r, block_k, warps, registers = plan.of_sort(n_rows, k, survivors.packed.element_size(), sm_count(s))
        constants = is_sorted, rows.largest, block_r, block_k, warps
        launch(
            sort_kernel, (cdiv(n_rows, block_r), 1, 1), (survivors.packed, survivors.state, *results),
            (s.stride(0), n_rows, n_cols, k), constants, num_warps=warps, **_limit(registers),
        )  # fmt: skip
        return selected
    spare = torch.empty_like(survivors.packed)
    numbers = s.stride(0), n_cols
    if not is_sorted:
        # take the k best by score first, then sort these by column
        best = _merged(survivors, True, k, spare, None, numbers, rows.largest)
        spare = survivors.packed if best is spare else spare
        survivors = _Survivors(best, survivors.state)
    _merged(survivors, is_sorted, k, spare, results, numbers, rows.largest)
    return selected
