"""Launch the kernels: choose the kernel, its pointers, strides and launch shape."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import INTERPRET, aligned, as_rows, cdiv, device_guard, even_rows, launch, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

from . import shapes
from .kernels_team import team_backward_kernel, zeros_kernel
from .kernels_triton import backward_kernel, forward_kernel
from .kernels_wide import wide_forward_kernel
from .options import Needs, Options, Table

# gradients of x, gate, weight and bias, and that of x in a second dtype
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@functools.cache
def _shared_memory_of(index: int) -> int:
    return getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 49152)


def _shared_memory(x: Tensor) -> int:
    """Return the bytes of shared memory that a program may use."""
    return _shared_memory_of(x.device.index) if x.is_cuda else 232448


@functools.cache
def _has_e4m3_on(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def _has_e4m3(x: Tensor) -> bool:
    """Return whether the GPU rounds to e4m3 in one instruction."""
    return x.is_cuda and _has_e4m3_on(x.device.index)


def _rows(t: Tensor | None, n_cols: int) -> tuple[Tensor | None, int]:
    """Return t as (rows, n) with unit column stride, and its row stride; 0 for None."""
    if t is None:
        return None, 0
    if t.is_contiguous():
        return t, n_cols
    rows = as_rows(t)
    return rows, rows.stride(0) if rows.shape[0] > 1 else n_cols


def _even_rows(t: Tensor | None, n_cols: int) -> tuple[Tensor | None, int]:
    """Return `_rows` with every row aligned as in a contiguous tensor: the result then has the same bits."""
    if t is None:
        return None, 0
    if t.is_contiguous():
        return aligned(t), n_cols
    return _rows(even_rows(as_rows(t), 8), n_cols)


def _empty(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor like t, of `dtype` if given."""
    if t.is_contiguous():
        return torch.empty_like(t, dtype=dtype)
    return torch.empty(t.shape, dtype=dtype or t.dtype, device=t.device)


def _gate_constant(gate: Tensor | None, options: Options) -> int:
    """Return GATE of the kernels."""
    return 0 if gate is None else 1 + options.gate_first + 4 * options.sigmoid


def has_forward(x: Tensor, gate: Tensor | None, table: Table, options: Options) -> bool:
    """Return whether a kernel has these options for rows of this width: all do up to MAX_FORWARD_COLS."""
    return x.shape[-1] <= shapes.MAX_FORWARD_COLS or not (options.stable or _has_options(gate, table, options))


def _has_table(table: Table, options: Options) -> bool:
    """Return TABLE of the forward kernel: that of a layer norm adds an offset only with a table."""
    return table.entries > 1 or (options.has_mean and options.offset != 0.0)


def _has_options(gate: Tensor | None, table: Table, options: Options) -> bool:
    return gate is not None or options.twice or options.quantize > 0 or _has_table(table, options)


def forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, table: Table,
    options: Options, keep: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y, s = x + residual, e4m3 codes, their scales and the statistics; None for those that are not wanted.

    Statistics (1 to 3, ...) may be None unless `keep`.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = _empty(x, options.dtype) if options.keep_y else None
    x_rows, x_stride = _even_rows(x, n_cols)
    residual, r_stride = _even_rows(residual, n_cols)
    gate, z_stride = _even_rows(gate, n_cols)
    weight, bias = (v if v is None else aligned(v.contiguous()) for v in (weight, bias))
    s = codes = scales = stats = stored_codes = None
    itemsize = x.element_size()
    if residual is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
        itemsize = s.element_size()
    if options.quantize:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        scales_shape = (*x.shape[:-1], n_cols // 128 if options.quantize == 2 else 1)
        scales = torch.empty(scales_shape, dtype=torch.float32, device=x.device)
        stored_codes = codes.view(torch.float8_e4m3fn) if _has_e4m3(x) else codes
    vec = math.gcd(8, n_cols)
    one_program = shapes.in_one_program(n_cols, itemsize, options.has_mean)
    # the kernel for wide rows always stores statistics: their cost is small beside a wide row
    if keep or not one_program:
        n_stats = 1 + options.has_mean + options.stable
        stats = torch.empty((n_stats, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    tensors = (x_rows, residual, weight, bias, y, s, stats)
    numbers = (x_stride // vec, r_stride // vec, n_rows, float(options.eps), float(options.offset))
    with device_guard(x):
        if one_program:
            has_table = _has_table(table, options)
            tile = shapes.forward_tile(n_cols, itemsize, gate is not None, options.quantize > 0)
            early = shapes.forward_early(n_cols, itemsize, has_table, not _has_options(gate, table, options))
            launch(
                forward_kernel, (cdiv(n_rows, tile.rows), 1, 1), (*tensors, gate, stored_codes, scales),
                (*numbers, z_stride // vec, *table),
                (n_cols, vec, options.has_mean, options.stable, tile.rows, tile.cols, early, has_table, options.twice,
                 _gate_constant(gate, options), options.quantize),
                num_warps=tile.warps,
            )  # fmt: skip
        else:
            tile, registers = shapes.wide_tile(n_cols, itemsize, residual is not None)
            launch(
                wide_forward_kernel, (n_rows, 1, 1), tensors, numbers,
                (n_cols, vec, options.has_mean, tile.cols, tile.stages),
                num_warps=tile.warps, **({} if torch.version.hip else {"maxnreg": registers}),
            )  # fmt: skip
    return y, s, codes, scales, stats


def _teams_run(x: Tensor, size: int) -> bool:
    """Return whether the programs of a team run at the same time, as polling requires; NVIDIA only."""
    return not INTERPRET and torch.version.hip is None and 2 * size <= sm_count(x)


def has_backward(x: Tensor, dy: Tensor, gate: Tensor | None, table: Table, stable: bool) -> bool:
    """Return whether a program's or a team's registers hold a row of x and dy; else torch computes the gradients."""
    n_cols = x.shape[-1]
    if n_cols <= shapes.MAX_BACKWARD_COLS:
        return True
    itemsize = max(x.element_size(), dy.element_size())
    team = shapes.backward_team(n_cols, itemsize, 2, _shared_memory(x))
    return gate is None and not stable and table.entries == 1 and _teams_run(x, team.size)


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, table: Table, options: Options, x_dtype: torch.dtype, needs: Needs,
) -> Gradients:  # fmt: skip
    """Return dx, dz, dw and db in the dtypes of x, gate, weight and bias, and dx in `x_dtype`; None if not needed."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    in_team = n_cols > shapes.MAX_BACKWARD_COLS
    # a team computes dx in any case
    dx = _empty(x) if needs.x or in_team else None
    dx_copy = _empty(x, x_dtype) if needs.x and x_dtype != x.dtype and not in_team else None
    dz = _empty(gate) if needs.gate and gate is not None else None
    dw = _empty(weight) if needs.weight and weight is not None else None
    db = _empty(bias) if needs.bias and bias is not None else None
    weight, bias = (v if v is None else v.contiguous() for v in (weight, bias))
    sums = (dw is not None) + (db is not None)
    itemsize = max(t.element_size() for t in (x, dy, gate) if t is not None)
    # only a gate after the norm multiplies the bias
    bias = bias if gate is not None and not options.gate_first else None
    x_rows, x_stride = _rows(x, n_cols)
    dy_rows, dy_stride = _rows(dy, n_cols)
    ds, ds_stride = _rows(ds, n_cols)
    gate, z_stride = _rows(gate, n_cols)
    vec = math.gcd(8, x_stride, dy_stride, ds_stride, z_stride)
    strides = (x_stride // vec, dy_stride // vec, ds_stride // vec, n_rows)
    needed = (dw is not None, db is not None)
    n_read = 2 + (ds is not None) + (gate is not None)
    entries = table.entries
    if in_team:
        team = shapes.backward_team(n_cols, itemsize, n_read, _shared_memory(x))
        programs = team.teams(n_rows, sm_count(x))
    else:
        tile = shapes.backward_tile(
            n_cols, itemsize, n_read, _shared_memory(x), options.stable, max(sums, bias is not None),
            _gate_constant(gate, options), entries,
        )  # fmt: skip
        programs = min(max(1, tile.per_sm * sm_count(x) // entries), cdiv(n_rows // entries, tile.rows))
    partials = None
    if sums:
        partials = torch.empty((sums, entries, programs, n_cols), dtype=torch.float32, device=x.device)
    tensors = (dy_rows, ds, x_rows, weight, stats, dx, partials)
    with device_guard(x):
        if in_team:
            numbers = (*strides, float(options.offset))
            _launch_team(team, programs, tensors, numbers, (n_cols, vec, options.has_mean, *needed))
        else:
            launch(
                backward_kernel, (programs, 1, 1) if entries == 1 else (entries, programs, 1),
                (*tensors, gate, bias, dz, dx_copy),
                (*strides, float(options.eps), float(options.offset), z_stride // vec, *table),
                (n_cols, vec, options.has_mean, options.stable, *needed, tile.rows, tile.cols, tile.stages, entries > 1,
                 _gate_constant(gate, options)),
                num_warps=tile.warps,
            )  # fmt: skip
        if partials is not None:
            add_vector_partials(partials, dw, db, programs, entries)
    return dx if needs.x else None, dz, dw, db, dx_copy


def _launch_team(
    team: shapes.Team, teams: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], constants: tuple[Any, ...]
) -> None:
    n_words = 4 * teams * team.rows * team.size + 1
    # a kernel writes the mailbox's zeros: replay records it
    words = torch.empty(n_words, dtype=torch.int64, device=tensors[0].device)
    launch(zeros_kernel, (cdiv(n_words, 1024), 1, 1), (words,), (n_words,), (1024,), num_warps=4)
    shape = (team.cols, team.size, team.width(), team.rows, team.lag, team.stages, team.cooperative)
    launch(
        team_backward_kernel, (teams * team.size, 1, 1), (*tensors, words), numbers, (*constants, *shape),
        num_warps=team.warps, maxnreg=team.registers(), launch_cooperative_grid=team.cooperative,
    )  # fmt: skip
