"""Launch the kernels: choose the kernel, its pointers, strides and launch shape."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from onepass.core.launch import INTERPRET, aligned, as_rows, cdiv, device_guard, even_rows, launch, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

from . import shapes
from .kernels_team import team_backward_kernel, zeros_kernel
from .kernels_triton import backward_kernel, forward_kernel
from .kernels_wide import wide_forward_kernel

# TABLE, TWICE, GATE and QUANT of `forward_kernel`, TABLE and GATE of `backward_kernel`, for calls without such options
PLAIN_FORWARD, PLAIN_BACKWARD = (False, False, 0, 0), (False, 0)


@functools.cache
def _shared_memory_of(index: int) -> int:
    return getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 49152)


def shared_memory(x: Tensor) -> int:
    """Return the bytes of shared memory that a program may use."""
    return _shared_memory_of(x.device.index) if x.is_cuda else 232448


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
    whole = shapes.in_one_program(n_cols, itemsize, has_mean)
    stats = None
    # the kernel for wide rows always stores statistics: their cost is small beside a wide row
    if keep or not whole:
        stats = torch.empty((1 + has_mean + stable, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    tensors = (source, residual, weight, bias, y, s, stats)
    with device_guard(x):
        if whole:
            tile = shapes.forward_tile(n_cols, itemsize)
            grid = (cdiv(n_rows, tile.rows), 1, 1)
            shape = (tile.rows, tile.cols, shapes.forward_early(n_cols, itemsize), *PLAIN_FORWARD)
            launch(
                forward_kernel, grid, (*tensors, None, None, None), (*numbers, 0, 1, 1),
                (*constants, *shape), num_warps=tile.warps,
            )  # fmt: skip
        else:
            tile, registers = shapes.wide_tile(n_cols, itemsize, stable or residual is not None)
            launch(
                wide_forward_kernel, (n_rows, 1, 1), tensors, numbers, (*constants, tile.cols, tile.stages),
                num_warps=tile.warps, **({} if torch.version.hip else {"maxnreg": registers}),
            )  # fmt: skip
    return y, s, stats


def has_backward(x: Tensor, dy: Tensor, stable: bool) -> bool:
    """Return whether a program's or a team's registers hold a row of x and dy; else torch computes the gradients."""
    n_cols = x.shape[-1]
    if n_cols <= shapes.MAX_BACKWARD_COLS:
        return True
    itemsize = max(x.element_size(), dy.element_size())
    return _teams_run(x, shapes.backward_team(n_cols, itemsize, 2, shared_memory(x), stable).size)


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
        tile = shapes.backward_tile(n_cols, itemsize, tensors, shared_memory(x), stable, need_w + need_b)
        n_partials = min(tile.per_sm * sm_count(x), cdiv(n_rows, tile.rows))
    else:
        # a team computes dx in any case
        dx = empty(x) if dx is None else dx
        team = shapes.backward_team(n_cols, itemsize, tensors, shared_memory(x), stable)
        n_partials = team.teams(n_rows, sm_count(x))
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
            slots = 4 * n_partials * team.rows * (2 if stable else 1) * team.size
            # a kernel writes the mailbox's zeros: replay records it
            words = torch.empty(slots + 1, dtype=torch.int64, device=x.device)
            launch(zeros_kernel, (cdiv(slots + 1, 1024), 1, 1), (words,), (slots + 1,), (1024,), num_warps=4)
            shape = (team.cols, team.size, team.width(), team.rows, team.lag, team.stages, team.cooperative)
            launch(
                team_backward_kernel, (n_partials * team.size, 1, 1),
                (dy, ds, source, weight, stats, dx, partials, words), numbers, (*constants, *shape),
                num_warps=team.warps, maxnreg=team.registers(), launch_cooperative_grid=team.cooperative,
            )  # fmt: skip
        if partials is not None:
            add_vector_partials(partials, dw, db, n_partials, 1)
    return dx if need_x else None, dw, db
