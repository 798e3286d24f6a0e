"""Launch the kernels: choose the kernel, its pointers, strides and launch shape."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import INTERPRET, aligned, as_rows, cdiv, device_guard, even_rows, launch, sm_count

from . import shapes
from .kernels_packed import packed_forward_kernel, zeros_kernel
from .kernels_team import team_backward_kernel, team_forward_kernel
from .kernels_triton import backward_kernel, finish_kernel, forward_kernel
from .kernels_wide import wide_apply_kernel, wide_forward_kernel, wide_sums_kernel

# TABLE, TWICE, GATE and QUANT of `forward_kernel`, TABLE and GATE of `backward_kernel`, for calls without such options
PLAIN_FORWARD, PLAIN_BACKWARD = (False, False, 0, 0), (False, 0)


@functools.cache
def _device_limits(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 49152), properties.L2_cache_size


def limits(x: Tensor) -> tuple[int, int]:
    """Return (shared memory that a program may use, size of L2) in bytes."""
    return _device_limits(x.device.index) if x.is_cuda else (232448, 1 << 16)


@functools.cache
def _has_dependent_launch(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


def dependent_launch(x: Tensor) -> bool:
    """Return whether a kernel may start before the previous one ends and wait for it inside (sm_90 on)."""
    return x.is_cuda and _has_dependent_launch(x.device.index)


def _teams_run(x: Tensor, size: int) -> bool:
    """Return whether the programs of a team run at the same time, as polling requires; NVIDIA only."""
    return not INTERPRET and torch.version.hip is None and 2 * size <= sm_count(x)


def rows_of(x: Tensor, n_cols: int) -> tuple[Tensor, int]:
    """Return x as (rows, n) with unit column stride, and its row stride."""
    if x.is_contiguous():
        return x, n_cols
    rows = as_rows(x)
    return rows, rows.stride(0) if rows.shape[0] > 1 else n_cols


def even_rows_of(x: Tensor, n_cols: int) -> tuple[Tensor, int]:
    """Return `rows_of` with every row aligned as in a contiguous tensor: the result then has the same bits."""
    if x.is_contiguous():
        return aligned(x), n_cols
    rows = even_rows(as_rows(x), 8)
    return rows, rows.stride(0) if rows.shape[0] > 1 else n_cols


def empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor like x, of `dtype` if given."""
    if x.is_contiguous():
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool, keep: bool = True, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y of `dtype` (None: that of x), s (None without residual) and statistics (1 to 3, ...).

    Statistics may be None unless `keep`.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = empty(x, dtype)
    s, r_stride, itemsize = None, 0, x.element_size()
    source, x_stride = even_rows_of(x, n_cols)
    weight, bias = (None if v is None else aligned(v) for v in (weight, bias))
    if residual is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
        residual, r_stride = even_rows_of(residual, n_cols)
        itemsize = s.element_size()
    vec = math.gcd(8, n_cols)
    numbers = (x_stride // vec, r_stride // vec, n_rows, float(eps), float(offset))
    constants = (n_cols, vec, has_mean, stable)
    plain = not has_mean and not stable and residual is None
    reread = shapes.reread(n_cols, itemsize, sm_count(x), limits(x)[1]) if plain else None
    packed = (
        None if stable or reread or y.element_size() != 2 else _packed(source, residual, weight, bias, itemsize, vec)
    )
    whole = n_cols <= shapes.MAX_FORWARD_COLS and (n_cols <= 16384 or itemsize == 2 or not _teams_run(x, 8))
    stats = None
    # kernels for wide rows always store statistics: their cost is small beside a wide row
    if keep or reread or packed is not None or not whole:
        stats = torch.empty((1 + has_mean + stable, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    tensors = (source, residual, weight, bias, y, s, stats)
    with device_guard(x):
        if reread is not None:
            tile, registers = reread
            launch(
                wide_forward_kernel, (n_rows, 1, 1), tensors, numbers, (*constants, tile.cols, tile.stages),
                num_warps=tile.warps, maxnreg=registers,
            )  # fmt: skip
            return y, s, stats
        if packed is not None:
            programs, waits = n_rows * packed.size, packed.size > 1 and dependent_launch(x)
            words = _words(x, programs) if packed.size > 1 else None
            strides, scalars = numbers[:3], numbers[3:]
            launch(
                packed_forward_kernel, (programs, 1, 1), (*tensors, words), (*strides, 0, *scalars),
                (n_cols, vec, has_mean, packed.cols(), packed.size, packed.width(), waits),
                num_warps=packed.warps, maxnreg=shapes.PACKED_REGISTERS, launch_pdl=waits,
            )  # fmt: skip
            return y, s, stats
        if whole:
            tile = shapes.forward_tile(n_cols, itemsize)
            grid = (cdiv(n_rows, tile.rows), 1, 1)
            shape = (tile.rows, tile.cols, shapes.forward_early(n_cols, itemsize), *PLAIN_FORWARD)
            launch(
                forward_kernel, grid, (*tensors, None, None, None), (*numbers, 0, 1, 1),
                (*constants, *shape), num_warps=tile.warps,
            )  # fmt: skip
            return y, s, stats
        team = shapes.forward_team(n_cols, itemsize, 1 if residual is None else 2, limits(x)[0])
        if _teams_run(x, team.size):
            words = _team_words(x, team, n_rows, 3 if stable else 1)
            _launch_team(team_forward_kernel, x, team, n_rows, (*tensors, words), numbers, constants)
        else:
            more = (shapes.WIDE_BYTES // itemsize, shapes.WIDE_STAGES)
            launch(
                wide_forward_kernel, (n_rows, 1, 1), tensors, numbers, (*constants, *more), num_warps=shapes.WIDE_WARPS
            )
    return y, s, stats


def _packed(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, itemsize: int, vec: int
) -> shapes.Packed | None:
    """Return the shape of `packed_forward_kernel`; None unless tensors have 16 bits and rows are even and wide."""
    if itemsize != 2 or x.shape[-1] <= shapes.MIN_PACKED_COLS or vec % 2 or torch.version.hip is not None:
        return None
    for tensor in (x, residual, weight, bias):
        if tensor is not None and tensor.element_size() != 2:
            return None
    packed = shapes.packed(x.shape[-1])
    return packed if packed is not None and (packed.size == 1 or _teams_run(x, packed.size)) else None


def _words(x: Tensor, n_words: int) -> Tensor:
    """Return a zeroed mailbox. A kernel writes the zeros: replay records it, and the next kernel can wait for it."""
    words = torch.empty(n_words, dtype=torch.int64, device=x.device)
    launch(zeros_kernel, (cdiv(n_words, 1024), 1, 1), (words,), (n_words,), (1024,), num_warps=4)
    return words


def _team_words(x: Tensor, team: shapes.Team, n_rows: int, kinds: int) -> Tensor:
    return _words(x, 4 * team.teams(n_rows, sm_count(x)) * team.rows * kinds * team.size + 1)


def _launch_team(
    kernel: Any, x: Tensor, team: shapes.Team, n_rows: int, tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...], constants: tuple[Any, ...],
) -> None:  # fmt: skip
    programs = team.teams(n_rows, sm_count(x)) * team.size
    shape = (team.cols, team.size, team.width(), team.rows, team.lag, team.stages, team.cooperative)
    launch(
        kernel, (programs, 1, 1), tensors, numbers, (*constants, *shape), num_warps=team.warps,
        maxnreg=team.registers(), launch_cooperative_grid=team.cooperative,
    )  # fmt: skip


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias_dtype: torch.dtype,
    eps: float, offset: float, has_mean: bool, stable: bool, need_x: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx in the dtype of x, dw in that of weight, db in `bias_dtype`; None for those not needed."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    dx = empty(x) if need_x else None
    dw = torch.empty_like(weight) if need_w and weight is not None else None
    db = torch.empty(n_cols, dtype=bias_dtype, device=x.device) if need_b else None
    source, x_stride = rows_of(x, n_cols)
    dy, dy_stride = rows_of(dy, n_cols)
    ds_stride = 0
    if ds is not None:
        ds, ds_stride = rows_of(ds, n_cols)
    itemsize = max(x.element_size(), dy.element_size())
    vec = math.gcd(8, x_stride, dy_stride, ds_stride)
    numbers = (x_stride // vec, dy_stride // vec, ds_stride // vec, n_rows, float(eps), float(offset))
    constants = (n_cols, vec, has_mean, stable, need_w, need_b)
    tensors = 2 if ds is None else 3
    team = tile = None
    if n_cols <= shapes.MAX_BACKWARD_COLS:
        tile = shapes.backward_tile(n_cols, itemsize, tensors, limits(x)[0], stable, need_w + need_b)
        n_partials = min(tile.per_sm * sm_count(x), cdiv(n_rows, tile.rows))
    else:
        team = shapes.backward_team(n_cols, itemsize, tensors, limits(x)[0], stable)
        if need_x and _teams_run(x, team.size):
            n_partials = team.teams(n_rows, sm_count(x))
        else:
            team = None
            group, n_partials = _wide_groups(x, n_rows, n_cols)
    partials = None
    if need_w or need_b:
        partials = torch.empty((need_w + need_b, n_partials, n_cols), dtype=torch.float32, device=x.device)
    with device_guard(x):
        if tile is not None:
            launch(
                backward_kernel, (n_partials, 1, 1),
                (dy, ds, source, weight, stats, dx, partials, None, None, None, None), (*numbers, 0, 1, 1),
                (*constants, tile.rows, tile.cols, tile.stages, *PLAIN_BACKWARD), num_warps=tile.warps,
            )  # fmt: skip
        elif team is not None:
            words = _team_words(x, team, n_rows, 2 if stable else 1)
            pointers = (dy, ds, source, weight, stats, dx, partials, words)
            _launch_team(team_backward_kernel, x, team, n_rows, pointers, numbers, constants)
        else:
            _wide_backward(dy, ds, source, weight, stats, dx, partials, numbers, constants, group, n_partials)
        if partials is not None:
            finish(partials, dw, db, n_partials, 1)
    return dx, dw, db


def finish(partials: Tensor, dw: Tensor | None, db: Tensor | None, n_partials: int, n_entries: int) -> None:
    """Add the partials of dw and db, which stand in this order in `partials` (1 or 2, ..., N)."""
    n_cols = partials.shape[-1]
    rows, cols = shapes.finish_tile(n_partials, n_cols)
    waits = dependent_launch(partials)
    launch(
        finish_kernel, (cdiv(n_cols, cols) * n_entries, len(partials), 1), (partials, dw, db), (n_partials, n_entries),
        (n_cols, rows, cols, waits), num_warps=4, **({"launch_pdl": True} if waits else {}),
    )  # fmt: skip


def _wide_groups(x: Tensor, n_rows: int, n_cols: int) -> tuple[int, int]:
    """Return (rows per group, row splits): x and dy of a group stay in L2 between the two passes over them."""
    rows = max(1, min(n_rows, int(limits(x)[1] * shapes.L2_SHARE) // (2 * n_cols * x.element_size())))
    splits = shapes.APPLY_PROGRAMS_PER_SM * sm_count(x) // cdiv(n_cols, shapes.APPLY_COLS)
    return rows, max(1, min(splits, rows))


def _wide_backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, dx: Tensor | None,
    partials: Tensor | None, numbers: tuple[Any, ...], constants: tuple[Any, ...], group: int, splits: int,
) -> None:  # fmt: skip
    x_stride, dy_stride, ds_stride, n_rows, eps, offset = numbers
    n_cols, vec, has_mean, stable, need_w, need_b = constants
    dw = partials[0] if need_w and partials is not None else None
    db = partials[-1] if need_b and partials is not None else None
    sums = torch.empty(3 * group, dtype=torch.float32, device=x.device)
    for first in range(0, n_rows, group):
        rows = min(group, n_rows - first)
        if dx is not None:
            launch(
                wide_sums_kernel, (rows, 1, 1), (dy, x, weight, stats, sums),
                (x_stride, dy_stride, n_rows, first, eps, offset),
                (n_cols, vec, has_mean, stable, shapes.SUMS_BYTES // x.element_size(), shapes.SUMS_STAGES),
                num_warps=shapes.SUMS_WARPS,
            )  # fmt: skip
        launch(
            wide_apply_kernel, (cdiv(n_cols, shapes.APPLY_COLS), splits, 1),
            (dy, ds, x, weight, stats, sums, dx, dw, db),
            (x_stride, dy_stride, ds_stride, n_rows, first, rows, offset),
            (n_cols, vec, has_mean, stable, shapes.APPLY_COLS, shapes.APPLY_STAGES), num_warps=shapes.APPLY_WARPS,
        )  # fmt: skip
