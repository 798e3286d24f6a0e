"""Launch the kernels of the options: tables of weights, gates, other roundings and 8-bit results."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from onepass.core.launch import aligned, cdiv, device_guard, launch, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

from . import shapes_options
from .kernels_triton import backward_kernel, forward_kernel
from .launch import empty, even_rows_of, rows_of, shared_memory


@functools.cache
def _has_e4m3_on(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def _has_e4m3(x: Tensor) -> bool:
    """Return whether the GPU rounds to e4m3 in one instruction."""
    return x.is_cuda and _has_e4m3_on(x.device.index)


def forward(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    table: tuple[int, int], eps: float, offset: float, has_mean: bool, stable: bool, twice: bool, gate_first: bool,
    quant: int, dtype: torch.dtype, keep_y: bool, keep: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y of `dtype`, s, e4m3 codes, their scales and the statistics; None for those that are not wanted.

    weight and bias are contiguous; `table` is (repeat, entries): row i takes entry (i // repeat) % entries of them.
    """
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    y = empty(x, dtype) if keep_y else None
    s, r_stride, z_stride, itemsize = None, 0, 0, x.element_size()
    source, x_stride = even_rows_of(x, n_cols)
    weight, bias = (None if v is None else aligned(v) for v in (weight, bias))
    if residual is not None:
        s = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
        residual, r_stride = even_rows_of(residual, n_cols)
        itemsize = s.element_size()
    if gate is not None:
        gate, z_stride = even_rows_of(gate, n_cols)
    codes = scales = stats = None
    if quant:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        shape = (*x.shape[:-1], n_cols // 128 if quant == 2 else 1)
        scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    if keep:
        stats = torch.empty((1 + has_mean + stable, *x.shape[:-1]), dtype=torch.float32, device=x.device)
    stored = codes if codes is None or not _has_e4m3(x) else codes.view(torch.float8_e4m3fn)
    vec = math.gcd(8, n_cols)
    repeat, entries = table
    # the kernel of a layer norm adds an offset only with a table
    has_table = entries > 1 or (has_mean and offset != 0.0)
    tile = shapes_options.forward_tile(n_cols, itemsize, gate is not None, quant > 0)
    with device_guard(x):
        launch(
            forward_kernel, (cdiv(n_rows, tile.rows), 1, 1),
            (source, residual, weight, bias, y, s, stats, gate, stored, scales),
            (x_stride // vec, r_stride // vec, n_rows, float(eps), float(offset), z_stride // vec, repeat, entries),
            (n_cols, vec, has_mean, stable, tile.rows, tile.cols, shapes_options.forward_early(n_cols, has_table),
             has_table, twice, 0 if gate is None else 1 + gate_first, quant),
            num_warps=tile.warps,
        )  # fmt: skip
    return y, s, codes, scales, stats


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, table: tuple[int, int], eps: float, offset: float, has_mean: bool, stable: bool,
    gate_first: bool, x_dtype: torch.dtype, need_x: bool, need_z: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx, dz, dw and db in the dtypes of x, gate, weight and bias, and dx in `x_dtype`; None if not needed."""
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    dx = empty(x) if need_x else None
    copy = empty(x, x_dtype) if need_x and x_dtype != x.dtype else None
    dz = empty(gate) if need_z and gate is not None else None
    dw = torch.empty_like(weight) if need_w and weight is not None else None
    db = torch.empty_like(bias) if need_b and bias is not None else None
    source, x_stride = rows_of(x, n_cols)
    dy, dy_stride = rows_of(dy, n_cols)
    ds_stride = z_stride = 0
    # only a gate after the norm multiplies the bias
    bias = bias if gate is not None and not gate_first else None
    if ds is not None:
        ds, ds_stride = rows_of(ds, n_cols)
    if gate is not None:
        gate, z_stride = rows_of(gate, n_cols)
    vec = math.gcd(8, x_stride, dy_stride, ds_stride, z_stride)
    repeat, entries = table
    tensors = 2 + (ds is not None) + (gate is not None)
    itemsize = max(t.element_size() for t in (x, dy, gate) if t is not None)
    tile = shapes_options.backward_tile(
        n_cols, itemsize, tensors, shared_memory(x), stable, max(need_w + need_b, bias is not None), gate_first,
        entries, gate is not None,
    )  # fmt: skip
    wanted = tile.per_sm * sm_count(x) if entries == 1 else max(1, tile.per_sm * sm_count(x) // entries)
    programs = min(wanted, cdiv(n_rows // entries, tile.rows))
    partials = None
    if need_w or need_b:
        shape = (need_w + need_b, entries, programs, n_cols)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    with device_guard(x):
        launch(
            backward_kernel, (programs, 1, 1) if entries == 1 else (entries, programs, 1),
            (dy, ds, source, weight, stats, dx, partials, gate, bias, dz, copy),
            (x_stride // vec, dy_stride // vec, ds_stride // vec, n_rows, float(eps), float(offset), z_stride // vec,
             repeat, entries),
            (n_cols, vec, has_mean, stable, need_w, need_b, tile.rows, tile.cols, tile.stages, entries > 1,
             0 if gate is None else 1 + gate_first),
            num_warps=tile.warps,
        )  # fmt: skip
        if partials is not None:
            add_vector_partials(partials, dw, db, programs, entries)
    return dx, dz, dw, db, copy
