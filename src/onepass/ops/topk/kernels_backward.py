"""Triton backward of topk: from k gradients and a whole row of scores to the gradient of the scores.

Only the k selected entries have an upstream gradient, so Σ gy·w is a sum over k and no row of gy is stored. ds is
-q·w/eps everywhere; the k selected entries are then overwritten with their own gradient.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, next_power_of_2
from onepass.ops._shared.kernels_gates import gates_and_slopes, offsets
from onepass.ops._shared.kernels_rows import (
    PER_WARP,
    load_option,
    load_scores,
    pair_sum,
    row_sum,
    scratch,
    shape,
    stride,
    tile_cols,
    tile_rows,
    within,
)

# longest row that one program holds in registers
LONGEST = 32768
# selected entries that a program, and a warp, processes at a time
SELECTED = 1024
SELECTED_PER_WARP = 256
SIZES = (
    "gate_row_stride", "gate_col_stride", "value_row_stride", "value_col_stride", "s_row_stride", "eps_stride",
    "mask_row_stride", "n_rows", "n_cols", "k", "n_splits", "tiles",
)  # fmt: skip


@triton.jit
def load_selected(
    index_ptr, s_ptr, gate_ptr, rows, here, k, end, gate_row_stride, gate_col_stride, s_row_stride, n_rows, base, c,
    eps, KIND: tl.constexpr, HAS_GATES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return columns of some selected entries, which of them exist, their φ', gy·φ', and offsets (0 where φ' is 0)."""
    inside = within(rows, here, n_rows, end, BLOCK_R)
    index = tl.load(index_ptr + rows * k + here, mask=inside, other=-1)
    found = index >= 0
    w = tl.zeros_like(index).to(tl.float32)
    gw = w
    x = w
    if HAS_GATES:
        s = tl.load(s_ptr + rows * s_row_stride + index, mask=found, other=-float("inf")).to(tl.float32)
        g = tl.load(gate_ptr + rows * gate_row_stride + here * gate_col_stride, mask=found, other=0.0).to(tl.float32)
        x = offsets(s, base, eps) - c
        _, w = gates_and_slopes(x, KIND)
        gw = tl.where(w > 0, g * w, 0.0)
        x = tl.where(w > 0, x, 0.0)
    return index, found, w, gw, x


@triton.jit
def write_selected(
    index_ptr, s_ptr, gate_ptr, value_ptr, ds_ptr, rows, here, k, gate_row_stride, gate_col_stride, value_row_stride,
    value_col_stride, s_row_stride, n_rows, n_cols, base, c, eps, q,
    KIND: tl.constexpr, HAS_GATES: tl.constexpr, HAS_VALUES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write the whole gradient of some selected entries."""
    index, found, w, gw, _ = load_selected(
        index_ptr, s_ptr, gate_ptr, rows, here, k, k, gate_row_stride, gate_col_stride, s_row_stride, n_rows, base, c,
        eps, KIND, HAS_GATES, BLOCK_R,
    )  # fmt: skip
    ds = (gw - q * w) * (1.0 / eps)
    if HAS_VALUES:
        value = value_ptr + rows * value_row_stride + here * value_col_stride
        ds += tl.load(value, mask=found, other=0.0).to(tl.float32)
    tl.store(ds_ptr + rows * n_cols + index, ds.to(ds_ptr.dtype.element_ty), mask=found)


@triton.jit(do_not_specialize=SIZES)
def row_kernel(
    index_ptr,  # (n_rows, k) int64, contiguous: selected columns, distinct within a row, or -1
    gate_ptr,  # (n_rows, k) gradients of the gates, or nothing
    value_ptr,  # (n_rows, k) gradients of the values, or nothing
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    eps_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    solution_ptr,  # (n_rows, 2) fp32: base and c
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    deps_ptr,  # (n_rows,) fp32
    gate_row_stride,
    gate_col_stride,
    value_row_stride,
    value_col_stride,
    s_row_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k,
    eps_value,
    KIND: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEED_S: tl.constexpr,
    NEED_EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VEC: tl.constexpr,
):
    """Whole rows: sum over the selected entries, write the row, then overwrite the selected entries."""
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows, HAS_EPS)
    base = tl.load(solution_ptr + rows * 2, mask=in_rows, other=0.0)
    c = tl.load(solution_ptr + rows * 2 + 1, mask=in_rows, other=0.0)
    cols = tile_cols(0, BLOCK_R, BLOCK_C)
    w = tl.zeros_like(rows + cols).to(tl.float32)
    q = tl.zeros_like(base)
    if HAS_GATES:
        s = load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, BLOCK_R)
        sum_gw = tl.zeros_like(base)
        sum_gwx = tl.zeros_like(base)
        for first in range(0, k, BLOCK_K):
            here = tile_cols(first, BLOCK_R, BLOCK_K)
            _, _, _, gw, x = load_selected(
                index_ptr, s_ptr, gate_ptr, rows, here, k, k, gate_row_stride, gate_col_stride, s_row_stride, n_rows,
                base, c, eps, KIND, HAS_GATES, BLOCK_R,
            )  # fmt: skip
            if NEED_EPS:
                a, b = pair_sum(gw, gw * x, BLOCK_R)
                sum_gw += a
                sum_gwx += b
            else:
                sum_gw += row_sum(gw, BLOCK_R)
        x = offsets(s, base, eps) - c
        _, w = gates_and_slopes(x, KIND)
        if NEED_EPS:
            sum_w, sum_wx = pair_sum(w, tl.where(w > 0, w * x, 0.0), BLOCK_R)
        else:
            sum_w = row_sum(w, BLOCK_R)
        q = tl.where(sum_w == 0, 0.0, sum_gw / sum_w)
        if NEED_EPS:
            tl.store(deps_ptr + rows, (q * sum_wx - sum_gwx) / eps, mask=in_rows)
    if NEED_S:
        ds = -q * w * (1.0 / eps)
        inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
        tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
        # order the stores: those of the selected entries come after the row's
        tl.debug_barrier()
        for first in range(0, k, BLOCK_K):
            here = tile_cols(first, BLOCK_R, BLOCK_K)
            write_selected(
                index_ptr, s_ptr, gate_ptr, value_ptr, ds_ptr, rows, here, k, gate_row_stride, gate_col_stride,
                value_row_stride, value_col_stride, s_row_stride, n_rows, n_cols, base, c, eps, q, KIND, HAS_GATES,
                HAS_VALUES, BLOCK_R,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(
    index_ptr,  # as for row_kernel
    gate_ptr,
    s_ptr,
    eps_ptr,
    mask_ptr,
    solution_ptr,
    partial_ptr,  # (n_rows, n_splits, 4) fp32: Σ w, Σ w·x of a chunk; Σ gy·w, Σ gy·w·x of a part of the selected
    gate_row_stride,
    gate_col_stride,
    s_row_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k,
    tiles,
    eps_value,
    KIND: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEED_EPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows, first launch: each program sums one chunk, and an equal share of the selected entries."""
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    row = tile_rows(1)
    split = tl.program_id(1)
    n_splits = tl.num_programs(1)
    eps = load_option(eps_ptr, eps_stride, eps_value, row, n_rows, HAS_EPS)
    base = tl.load(solution_ptr + row * 2)
    c = tl.load(solution_ptr + row * 2 + 1)
    sum_w = 0.0
    sum_wx = 0.0
    for tile in range(tiles):
        cols = (split * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
        s = load_scores(s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
        x = offsets(s, base, eps) - c
        _, w = gates_and_slopes(x, KIND)
        sum_w += tl.sum(w, 0)
        if NEED_EPS:
            sum_wx += tl.sum(tl.where(w > 0, w * x, 0.0), 0)
    sum_gw = 0.0
    sum_gwx = 0.0
    part = tl.cdiv(k, n_splits)
    end = tl.minimum((split + 1) * part, k)
    for first in range(split * part, end, BLOCK_K):
        here = first + tl.arange(0, BLOCK_K)
        _, _, _, gw, x = load_selected(
            index_ptr, s_ptr, gate_ptr, row, here, k, end, gate_row_stride, gate_col_stride, s_row_stride, n_rows, base,
            c, eps, KIND, True, 1,
        )  # fmt: skip
        sum_gw += tl.sum(gw, 0)
        if NEED_EPS:
            sum_gwx += tl.sum(gw * x, 0)
    out = partial_ptr + (row * n_splits + split) * 4
    tl.store(out, sum_w)
    tl.store(out + 1, sum_wx)
    tl.store(out + 2, sum_gw)
    tl.store(out + 3, sum_gwx)


@triton.jit(do_not_specialize=SIZES)
def rest_kernel(
    s_ptr,  # as for row_kernel
    eps_ptr,
    mask_ptr,
    solution_ptr,
    partial_ptr,  # from sums_kernel
    ds_ptr,
    deps_ptr,
    q_ptr,  # (n_rows,) fp32: Σ gy·w / Σ w, which selected_kernel reads
    s_row_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    tiles,
    eps_value,
    KIND: tl.constexpr,
    HAS_EPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NEED_S: tl.constexpr,
    NEED_EPS: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows, second launch: write the gradient of entries that were not selected."""
    s_row_stride *= VEC
    mask_row_stride *= VEC
    n_cols *= VEC
    row = tile_rows(1)
    split = tl.program_id(1)
    eps = load_option(eps_ptr, eps_stride, eps_value, row, n_rows, HAS_EPS)
    base = tl.load(solution_ptr + row * 2)
    c = tl.load(solution_ptr + row * 2 + 1)
    here = tl.arange(0, N_SPLITS)
    partial = partial_ptr + (row * n_splits + here) * 4
    sum_w = tl.sum(tl.load(partial, mask=here < n_splits, other=0.0), 0)
    sum_gw = tl.sum(tl.load(partial + 2, mask=here < n_splits, other=0.0), 0)
    q = tl.where(sum_w == 0, 0.0, sum_gw / sum_w)
    if split == 0:
        tl.store(q_ptr + row, q)
        if NEED_EPS:
            sum_wx = tl.sum(tl.load(partial + 1, mask=here < n_splits, other=0.0), 0)
            sum_gwx = tl.sum(tl.load(partial + 3, mask=here < n_splits, other=0.0), 0)
            tl.store(deps_ptr + row, (q * sum_wx - sum_gwx) / eps)
    if NEED_S:
        for tile in range(tiles):
            cols = (split * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
            s = load_scores(s_ptr, mask_ptr, row, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK, 1)
            _, w = gates_and_slopes(offsets(s, base, eps) - c, KIND)
            ds = -q * w * (1.0 / eps)
            tl.store(ds_ptr + row * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=cols < n_cols)


@triton.jit(do_not_specialize=SIZES)
def selected_kernel(
    index_ptr,  # as for row_kernel
    gate_ptr,
    value_ptr,
    s_ptr,
    eps_ptr,
    solution_ptr,
    q_ptr,  # from rest_kernel
    ds_ptr,
    gate_row_stride,
    gate_col_stride,
    value_row_stride,
    value_col_stride,
    s_row_stride,
    eps_stride,
    n_rows,
    n_cols,
    k,
    eps_value,
    KIND: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    HAS_EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Long rows, third launch: overwrite the gradient of the selected entries."""
    row = tile_rows(1)
    here = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    eps = load_option(eps_ptr, eps_stride, eps_value, row, n_rows, HAS_EPS)
    base = 0.0
    c = 0.0
    q = 0.0
    if HAS_GATES:
        base = tl.load(solution_ptr + row * 2)
        c = tl.load(solution_ptr + row * 2 + 1)
        q = tl.load(q_ptr + row)
    write_selected(
        index_ptr, s_ptr, gate_ptr, value_ptr, ds_ptr, row, here, k, gate_row_stride, gate_col_stride,
        value_row_stride, value_col_stride, s_row_stride, n_rows, n_cols, base, c, eps, q, KIND, HAS_GATES, HAS_VALUES,
        1,
    )  # fmt: skip


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def backward(
    gates: Tensor | None, values: Tensor | None, indices: Tensor, s: Tensor, solution: Tensor, eps: Tensor | None,
    mask: Tensor | None, eps_value: float, kind: int, need_s: bool, need_eps: bool, shape_of_s: tuple[int, ...],
    ds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds in `shape_of_s`, the original shape of the scores, and deps (rows, 1); each is empty if not needed.

    A given ds, contiguous, is written to.

    gates and values are upstream gradients (rows, k) with any strides, or None. indices (rows, k) are contiguous,
    s (rows, n) has unit column stride.
    """
    n_rows, n_cols = s.shape
    k = indices.shape[1]
    if ds is None:
        ds = torch.empty(shape_of_s if need_s else (0,), dtype=s.dtype, device=s.device)
    deps = scratch(s, n_rows if need_eps else 0, 1)
    if gates is None:
        deps.zero_()
    if not s.numel():
        return ds, deps
    plan = shape(n_rows, n_cols, PER_WARP, LONGEST)
    vec = math.gcd(16, n_cols, s.stride(0), stride(mask))
    g_strides, row_strides = (*_strides(gates), *_strides(values)), (s.stride(0) // vec, stride(eps))
    sizes = (n_rows, n_cols // vec)
    has_gates, has_values, has_eps, has_mask = (x is not None for x in (gates, values, eps, mask))
    with device_guard(s):
        if plan.splits == 1:
            block_k = max(16, min(SELECTED, SELECTED_PER_WARP * plan.warps // plan.block_r, next_power_of_2(k)))
            launch(
                row_kernel, (plan.programs, 1, 1), (indices, gates, values, s, eps, mask, solution, ds, deps),
                (*g_strides, *row_strides, stride(mask) // vec, *sizes, k, eps_value),
                (kind, has_gates, has_values, has_eps, has_mask, need_s, need_eps, plan.block_r, plan.block_c, block_k,
                 vec), num_warps=plan.warps,
            )  # fmt: skip
            return ds, deps
        grid = (n_rows, plan.splits, 1)
        q = scratch(s, n_rows)
        if has_gates:
            partial = scratch(s, n_rows, plan.splits, 4)
            launch(
                sums_kernel, grid, (indices, gates, s, eps, mask, solution, partial),
                (*g_strides[:2], *row_strides, stride(mask) // vec, *sizes, k, plan.chunk // plan.block_c, eps_value),
                (kind, has_eps, has_mask, need_eps, plan.block_c, SELECTED, vec), num_warps=plan.warps,
            )  # fmt: skip
            launch(
                rest_kernel, grid, (s, eps, mask, solution, partial, ds, deps, q),
                (*row_strides, stride(mask) // vec, *sizes, plan.splits, plan.chunk // plan.block_c, eps_value),
                (kind, has_eps, has_mask, need_s, need_eps, next_power_of_2(plan.splits), plan.block_c, vec),
                num_warps=plan.warps,
            )  # fmt: skip
        elif need_s:
            ds.zero_()
        if need_s:
            launch(
                selected_kernel, (n_rows, cdiv(k, SELECTED), 1),
                (indices, gates, values, s, eps, solution, q, ds),
                (*g_strides, s.stride(0), stride(eps), n_rows, n_cols, k, eps_value),
                (kind, has_gates, has_values, has_eps, SELECTED), num_warps=4,
            )  # fmt: skip
    return ds, deps
