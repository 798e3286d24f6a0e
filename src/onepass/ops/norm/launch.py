"""From tensors to kernels: pointers, strides and launch shapes."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from onepass.core.launch import OPTIONS, as_rows, cdiv, device_guard, next_power_of_2, sm_count

from . import shapes
from .kernels_triton import backward_kernel, finish_kernel, forward_kernel
from .kernels_wide import wide_apply_kernel, wide_forward_kernel, wide_sums_kernel


@functools.cache
def _device_limits(index: int) -> tuple[int, int]:
    """(shared memory a program may use, size of L2) in bytes."""
    properties = torch.cuda.get_device_properties(index)
    return getattr(properties, "shared_memory_per_block_optin", 49152), properties.L2_cache_size


def _limits(x: Tensor) -> tuple[int, int]:
    return _device_limits(x.device.index) if x.is_cuda else (232448, 1 << 16)


def _rows(x: Tensor, n_cols: int) -> tuple[Tensor, int]:
    """A tensor whose memory the kernels may walk, and its row stride."""
    if x.is_contiguous():
        return x, n_cols
    rows = as_rows(x)
    return rows, rows.stride(0) if rows.shape[0] > 1 else n_cols


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """X (..., n) → y, s (None without residual) and the statistics (1 to 3, rows)."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    s, r_stride, itemsize = None, 0, x.element_size()
    source, x_stride = _rows(x, n_cols)
    if residual is not None:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        s = torch.empty(x.shape, dtype=dtype, device=x.device)
        residual, r_stride = _rows(residual, n_cols)
        itemsize = dtype.itemsize
    stats = torch.empty((1 + has_mean + stable, n_rows), dtype=torch.float32, device=x.device)
    vec = math.gcd(8, x_stride, r_stride)
    args = (
        source, residual, weight, bias, y, s, stats, x_stride // vec, r_stride // vec, n_rows, eps, offset,
        n_cols, vec, has_mean, stable,
    )  # fmt: skip
    with device_guard(x):
        if n_cols <= shapes.MAX_FORWARD_COLS:
            tile = shapes.forward_tile(n_cols, itemsize)
            forward_kernel[(cdiv(n_rows, tile.rows),)](*args, tile.rows, tile.cols, num_warps=tile.warps, **OPTIONS)
        else:
            wide_forward_kernel[(n_rows,)](
                *args, shapes.WIDE_BYTES // itemsize, shapes.WIDE_STAGES, num_warps=shapes.WIDE_WARPS, **OPTIONS
            )
    return y, s, stats


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, bias_dtype: torch.dtype,
    eps: float, offset: float, has_mean: bool, stable: bool, need_x: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Dx in x's dtype, dw in weight's, db in `bias_dtype`; what is not needed is None."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    dw = torch.empty_like(weight) if need_w and weight is not None else None
    db = torch.empty(n_cols, dtype=bias_dtype, device=x.device) if need_b else None
    source, x_stride = _rows(x, n_cols)
    dy, dy_stride = _rows(dy, n_cols)
    ds_stride = 0
    if ds is not None:
        ds, ds_stride = _rows(ds, n_cols)
    vec = math.gcd(8, x_stride, dy_stride, ds_stride)
    shared, l2 = _limits(x)
    wide = n_cols > shapes.MAX_BACKWARD_COLS
    if wide:
        groups, n_partials = _wide_groups(x, n_rows, n_cols, l2)
    else:
        tensors = 2 if ds is None else 3
        tile = shapes.backward_tile(n_cols, max(x.element_size(), dy.element_size()), tensors, shared, stable)
        n_partials = min(sm_count(x), cdiv(n_rows, tile.rows))
    partials = dw_part = db_part = None
    if need_w or need_b:
        partials = torch.empty((need_w + need_b, n_partials, n_cols), dtype=torch.float32, device=x.device)
        dw_part = partials[0] if need_w else None
        db_part = partials[-1] if need_b else None
    strides = (x_stride // vec, dy_stride // vec, ds_stride // vec)
    with device_guard(x):
        if wide:
            _wide_backward(
                dy, ds, source, weight, stats, dx, dw_part, db_part, strides, n_rows, eps, offset, n_cols, vec,
                has_mean, stable, groups, n_partials,
            )  # fmt: skip
        else:
            backward_kernel[(n_partials,)](
                dy, ds, source, weight, stats, dx, dw_part, db_part, *strides, n_rows, eps, offset, n_cols, vec,
                has_mean, stable, tile.rows, tile.cols, tile.stages, num_warps=tile.warps, **OPTIONS,
            )  # fmt: skip
        if partials is not None:
            # 32 columns are a full 128-byte line, and enough programs even for a narrow row
            finish_kernel[(cdiv(n_cols, 32), partials.shape[0])](
                partials, dw, db, n_partials, n_cols, min(256, next_power_of_2(n_partials)), 32, num_warps=4, **OPTIONS
            )
    return dx, dw, db


def _wide_groups(x: Tensor, n_rows: int, n_cols: int, l2: int) -> tuple[int, int]:
    """(rows per group, row splits): a group's x and dy stay in L2 between the two passes over them."""
    rows = max(1, min(n_rows, int(l2 * shapes.L2_SHARE) // (2 * n_cols * x.element_size())))
    splits = shapes.APPLY_PROGRAMS_PER_SM * sm_count(x) // cdiv(n_cols, shapes.APPLY_COLS)
    return rows, max(1, min(splits, rows))


def _wide_backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor | None, stats: Tensor, dx: Tensor | None,
    dw: Tensor | None, db: Tensor | None, strides: tuple[int, int, int], n_rows: int, eps: float, offset: float,
    n_cols: int, vec: int, has_mean: bool, stable: bool, group: int, splits: int,
) -> None:  # fmt: skip
    x_stride, dy_stride, ds_stride = strides
    sums = torch.empty(3 * group, dtype=torch.float32, device=x.device)
    for first in range(0, n_rows, group):
        rows = min(group, n_rows - first)
        if dx is not None:
            wide_sums_kernel[(rows,)](
                dy, x, weight, stats, sums, x_stride, dy_stride, n_rows, first, eps, offset, n_cols, vec,
                has_mean, stable, shapes.SUMS_BYTES // x.element_size(), shapes.SUMS_STAGES,
                num_warps=shapes.SUMS_WARPS, **OPTIONS,
            )  # fmt: skip
        wide_apply_kernel[(cdiv(n_cols, shapes.APPLY_COLS), splits)](
            dy, ds, x, weight, stats, sums, dx, dw, db, x_stride, dy_stride, ds_stride, n_rows, first, rows, offset,
            n_cols, vec, has_mean, stable, shapes.APPLY_COLS, shapes.APPLY_STAGES, num_warps=shapes.APPLY_WARPS,
            **OPTIONS,
        )  # fmt: skip
