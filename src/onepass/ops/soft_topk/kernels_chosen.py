"""Triton backward of soft_topk where only the chosen entries of a row have an upstream gradient, as in topk.

No row of gy is stored or read: Σ gy·w is a sum over the chosen entries, the whole row gets -q·w/eps, and the chosen
entries are then overwritten by their own gradient. For rows that a program holds it is one launch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2
from onepass.ops._shared.kernels_gates import gates_and_slopes, offsets
from onepass.ops._shared.kernels_rows import (
    CROWDED,
    HALF_PER_WARP,
    Scores,
    load_option,
    pair_sum,
    scratch,
    shape,
    stride,
    tile_cols,
    tile_rows,
    within,
)

from . import kernels_backward
from .kernels_backward import weigh as weigh_row

# longest row that one program holds in registers
LONGEST = 32768
# chosen entries of a program at a time, and of a warp
BLOCK = 1024
CHOSEN_PER_WARP = 256
SIZES = ("g_row_stride", "g_col_stride", "s_row_stride", "eps_stride", "mask_row_stride", "n_rows", "n_cols", "k")


class Chosen(NamedTuple):
    """The chosen entries of rows as functions of the kernels take them."""

    index_ptr: Any  # (n_rows, k) int32 or int64, contiguous: columns, distinct within a row, or -1
    g_ptr: Any  # (n_rows, k) gradients, any float
    s_ptr: Any  # (n_rows, n_cols) any float, unit column stride
    g_row_stride: Any
    g_col_stride: Any
    s_row_stride: Any
    n_rows: Any
    k: Any


@triton.jit
def solved(solution_ptr, eps_ptr, eps_stride, eps_value, rows, n_rows):
    """Return base, c and eps of each row."""
    base = tl.load(solution_ptr + rows * 2, mask=rows < n_rows, other=0.0)
    c = tl.load(solution_ptr + rows * 2 + 1, mask=rows < n_rows, other=0.0)
    return base, c, load_option(eps_ptr, eps_stride, eps_value, rows, n_rows)


@triton.jit
def weigh(chosen, rows, places, base, c, eps, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return columns of chosen entries, which of them exist, φ', gy·φ', and offsets (0 where φ' is 0)."""
    inside = within(rows, places, chosen.n_rows, chosen.k, BLOCK_R)
    index = tl.load(chosen.index_ptr + rows * chosen.k + places, mask=inside, other=-1)
    present = index >= 0
    s = tl.load(chosen.s_ptr + rows * chosen.s_row_stride + index, mask=present, other=-float("inf")).to(tl.float32)
    g = chosen.g_ptr + rows * chosen.g_row_stride + places * chosen.g_col_stride
    g = tl.load(g, mask=present, other=0.0).to(tl.float32)
    x = offsets(s, base, eps) - c
    _, w = gates_and_slopes(x, KIND)
    return index, present, w, tl.where(w > 0, g * w, 0.0), tl.where(w > 0, x, 0.0)


@triton.jit
def sums(chosen, rows, base, c, eps, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return Σ gy·w and Σ gy·w·x of each row."""
    sum_gw, sum_gwx = tl.zeros_like(base), tl.zeros_like(base)
    for first in range(0, chosen.k, BLOCK_K):
        _, _, _, gw, x = weigh(chosen, rows, tile_cols(first, BLOCK_R, BLOCK_K), base, c, eps, KIND, BLOCK_R)
        a, b = pair_sum(gw, gw * x, BLOCK_R)
        sum_gw += a
        sum_gwx += b
    return sum_gw, sum_gwx


@triton.jit
def overwrite(chosen, rows, places, ds_ptr, n_cols, base, c, eps, q, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Overwrite the gradient of a tile of chosen entries."""
    index, present, w, gw, _ = weigh(chosen, rows, places, base, c, eps, KIND, BLOCK_R)
    ds = (gw - q * w) * (1.0 / eps)
    tl.store(ds_ptr + rows * n_cols + index, ds.to(ds_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=SIZES)
def row_kernel(
    index_ptr,  # as in Chosen
    g_ptr,
    s_ptr,
    eps_ptr,  # (n_rows,) any float, or None
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or None
    solution_ptr,  # (n_rows, 2) fp32: base and c
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    deps_ptr,  # (n_rows,) fp32
    g_row_stride,
    g_col_stride,
    s_row_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    k,
    eps_value,
    KIND: tl.constexpr,
    NEED_S: tl.constexpr,
    NEED_EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VEC: tl.constexpr,
):
    """Whole rows: the sums, the row, then its chosen entries."""
    s_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride, mask_row_stride * VEC, n_rows, n_cols)
    chosen = Chosen(index_ptr, g_ptr, s_ptr, g_row_stride, g_col_stride, s_row_stride, n_rows, k)
    rows = tile_rows(BLOCK_R)
    base, c, eps = solved(solution_ptr, eps_ptr, eps_stride, eps_value, rows, n_rows)
    cols = tile_cols(0, BLOCK_R, BLOCK_C)
    w, _, x = weigh_row(scores, None, rows, cols, 0, base, c, eps, KIND, BLOCK_R)
    sum_w, sum_wx = pair_sum(w, w * x, BLOCK_R)
    sum_gw, sum_gwx = sums(chosen, rows, base, c, eps, KIND, BLOCK_R, BLOCK_K)
    q = tl.where(sum_w == 0, 0.0, sum_gw / sum_w)
    if NEED_EPS:
        tl.store(deps_ptr + rows, (q * sum_wx - sum_gwx) / eps, mask=rows < n_rows)
    if NEED_S:
        ds = -q * w * (1.0 / eps)
        inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
        tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
        # the stores of the chosen entries come after the row's
        tl.debug_barrier()
        for first in range(0, k, BLOCK_K):
            places = tile_cols(first, BLOCK_R, BLOCK_K)
            overwrite(chosen, rows, places, ds_ptr, n_cols, base, c, eps, q, KIND, BLOCK_R)


@triton.jit(do_not_specialize=SIZES)
def chosen_kernel(
    index_ptr,  # as for row_kernel
    g_ptr,
    s_ptr,
    eps_ptr,
    solution_ptr,
    sums_ptr,  # (n_rows, 2) fp32: Σ gy·w, Σ gy·w·x; None in the last launch
    q_ptr,  # (n_rows,) fp32: Σ gy·w / Σ w; None in the first launch, like ds_ptr
    ds_ptr,
    g_row_stride,
    g_col_stride,
    s_row_stride,
    eps_stride,
    n_rows,
    n_cols,
    k,
    eps_value,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Long rows: the first launch makes the sums over their chosen entries, the last one overwrites these."""
    chosen = Chosen(index_ptr, g_ptr, s_ptr, g_row_stride, g_col_stride, s_row_stride, n_rows, k)
    rows = tile_rows(BLOCK_R)
    if sums_ptr is not None:
        base, c, eps = solved(solution_ptr, eps_ptr, eps_stride, eps_value, rows, n_rows)
        sum_gw, sum_gwx = sums(chosen, rows, base, c, eps, KIND, BLOCK_R, BLOCK_K)
        tl.store(sums_ptr + rows * 2, sum_gw, mask=rows < n_rows)
        tl.store(sums_ptr + rows * 2 + 1, sum_gwx, mask=rows < n_rows)
    else:
        places = tile_cols(tl.program_id(1) * BLOCK_K, BLOCK_R, BLOCK_K)
        base, c, eps = solved(solution_ptr, eps_ptr, eps_stride, eps_value, rows, n_rows)
        q = tl.load(q_ptr + rows, mask=rows < n_rows, other=0.0)
        overwrite(chosen, rows, places, ds_ptr, n_cols, base, c, eps, q, KIND, BLOCK_R)


def backward(
    g: Tensor, indices: Tensor, s: Tensor, solution: Tensor, eps: Tensor | None, mask: Tensor | None, eps_value: float,
    kind: int, need_s: bool, need_eps: bool, ds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) in the dtype of s, or empty, and deps (rows, 1) in fp32, empty if not needed.

    g (rows, k) has any strides, indices (rows, k) are contiguous, s (rows, n) has unit column stride. With `ds`,
    contiguous, the gradient is written there.
    """
    (n_rows, n_cols), k = s.shape, indices.shape[1]
    if ds is None:
        ds = torch.empty((n_rows, n_cols) if need_s else (0,), dtype=s.dtype, device=s.device)
    if not s.numel():
        return ds, scratch(s, n_rows if need_eps else 0, 1).zero_()
    plan = shape(n_rows, n_cols, HALF_PER_WARP * (2 if n_cols > CROWDED else 1), LONGEST)
    if plan.splits == 1:
        deps = scratch(s, n_rows if need_eps else 0, 1)
        vec = math.gcd(16, n_cols, s.stride(0), stride(mask))
        block_k = max(16, min(BLOCK, CHOSEN_PER_WARP * plan.warps // plan.block_r, next_power_of_2(k)))
        row_strides = (s.stride(0) // vec, stride(eps), stride(mask) // vec)
        launch(
            row_kernel, (plan.programs, 1, 1), (indices, g, s, eps, mask, solution, ds, deps),
            (*g.stride(), *row_strides, n_rows, n_cols // vec, k, eps_value),
            (kind, need_s, need_eps, plan.block_r, plan.block_c, block_k, vec),
            num_warps=plan.warps,
        )  # fmt: skip
        return ds, deps
    # the tile depends on k alone: a row's bits are the same in every batch
    block_k = min(BLOCK, max(8, next_power_of_2(k)))
    block_r, warps = max(1, CHOSEN_PER_WARP // 2 // block_k), max(1, block_k // CHOSEN_PER_WARP)
    programs, inputs = cdiv(n_rows, block_r), (indices, g, s, eps, solution)
    numbers = (*g.stride(), s.stride(0), stride(eps), n_rows, n_cols, k, eps_value)
    chosen_sums = scratch(s, n_rows, 2)
    launch(
        chosen_kernel, (programs, 1, 1), (*inputs, chosen_sums, None, None), numbers, (kind, block_r, block_k),
        num_warps=warps,
    )  # fmt: skip
    ds, q, deps = kernels_backward.of_rows(
        None, s, solution, eps, mask, eps_value, kind, need_s, need_eps, ds, chosen_sums
    )
    if need_s:
        launch(
            chosen_kernel, (programs, cdiv(k, block_k), 1), (*inputs, None, q, ds), numbers, (kind, block_r, block_k),
            num_warps=warps,
        )  # fmt: skip
    return ds, deps
