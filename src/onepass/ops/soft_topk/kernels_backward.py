"""Triton backward of soft_topk: one formula for all kinds; one launch for whole rows, two for long rows."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, launch, next_power_of_2
from onepass.ops._shared.kernels_gates import gates_and_slopes, offsets
from onepass.ops._shared.kernels_rows import (
    HALF_PER_WARP,
    SIZES,
    Scores,
    load_gradient,
    load_option,
    load_scores,
    pair_sum,
    scratch,
    shape,
    stride,
    tile_cols,
    tile_rows,
    within,
)

# longest row that one program holds in registers
LONGEST = 16384


@triton.jit
def weigh(scores, gy_ptr, rows, cols, gy_row_stride, base, c, eps, KIND: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return φ' and gy·φ' of a tile, and the offsets, 0 where φ' is 0."""
    s = load_scores(scores, rows, cols, BLOCK_R)
    x = offsets(s, base, eps) - c
    _, w = gates_and_slopes(x, KIND)
    gw = tl.zeros_like(w)
    if gy_ptr is not None:
        gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, scores.n_rows, scores.n_cols, BLOCK_R)
        gw = tl.where(w > 0, gy * w, 0.0)
    return w, gw, tl.where(w > 0, x, 0.0)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    gy_ptr,  # (n_rows, n_cols) any float, unit column stride; None: 0
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    eps_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    solution_ptr,  # (n_rows, 2) fp32: base and c
    sums_ptr,  # (n_rows, 2) fp32: Σ gy·w and Σ gy·w·x, or None: to be computed from gy
    partial_ptr,  # (n_rows, n_splits, 4) fp32: Σ w, Σ gy·w, Σ w·x, Σ gy·w·x; nothing when a program holds whole rows
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    dk_ptr,  # (n_rows,) fp32
    deps_ptr,  # (n_rows,) fp32
    gy_row_stride,
    s_row_stride,
    eps_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    tiles,
    eps_value,
    KIND: tl.constexpr,
    NEED_S: tl.constexpr,
    NEED_EPS: tl.constexpr,
    SUMS_ONLY: tl.constexpr,
    N_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute ds = w·(gy - q)/eps with q = Σ gy·w / Σ w; long rows need a launch for the sums and one for the rest."""
    gy_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols)
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    split = tl.program_id(1)
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows)
    base = tl.load(solution_ptr + rows * 2, mask=in_rows, other=0.0)
    c = tl.load(solution_ptr + rows * 2 + 1, mask=in_rows, other=0.0)
    if N_SPLITS == 0:
        cols = tile_cols(0, BLOCK_R, BLOCK_C)
        w, gw, x = weigh(scores, gy_ptr, rows, cols, gy_row_stride, base, c, eps, KIND, BLOCK_R)
        sum_w, sum_gw = pair_sum(w, gw, BLOCK_R)
        if NEED_EPS:
            sum_wx, sum_gwx = pair_sum(w * x, gw * x, BLOCK_R)
    elif SUMS_ONLY:
        sum_w = 0.0
        sum_gw = 0.0
        sum_wx = 0.0
        sum_gwx = 0.0
        for tile in range(tiles):
            cols = (split * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
            w, gw, x = weigh(scores, gy_ptr, rows, cols, gy_row_stride, base, c, eps, KIND, BLOCK_R)
            a, b = pair_sum(w, gw, BLOCK_R)
            sum_w += a
            sum_gw += b
            if NEED_EPS:
                a, b = pair_sum(w * x, gw * x, BLOCK_R)
                sum_wx += a
                sum_gwx += b
        out = partial_ptr + (rows * n_splits + split) * 4
        tl.store(out, sum_w)
        tl.store(out + 1, sum_gw)
        tl.store(out + 2, sum_wx)
        tl.store(out + 3, sum_gwx)
    else:
        splits = tl.arange(0, N_SPLITS)
        partial = partial_ptr + (rows * n_splits + splits) * 4
        sum_w = tl.sum(tl.load(partial, mask=splits < n_splits, other=0.0), 0)
        sum_gw = tl.sum(tl.load(partial + 1, mask=splits < n_splits, other=0.0), 0)
        sum_wx = tl.sum(tl.load(partial + 2, mask=splits < n_splits, other=0.0), 0)
        sum_gwx = tl.sum(tl.load(partial + 3, mask=splits < n_splits, other=0.0), 0)
    if SUMS_ONLY == 0:
        if sums_ptr is not None:
            sum_gw = tl.load(sums_ptr + rows * 2, mask=in_rows, other=0.0)
            sum_gwx = tl.load(sums_ptr + rows * 2 + 1, mask=in_rows, other=0.0)
        q = tl.where(sum_w == 0, 0.0, sum_gw / sum_w)
        if split == 0:
            tl.store(dk_ptr + rows, q, mask=in_rows)
            if NEED_EPS:
                tl.store(deps_ptr + rows, (q * sum_wx - sum_gwx) / eps, mask=in_rows)
        if NEED_S:
            if N_SPLITS == 0:
                ds = (gw - q * w) * (1.0 / eps)
                inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
                tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
            else:
                for tile in range(tiles):
                    cols = (split * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
                    w, gw, x = weigh(scores, gy_ptr, rows, cols, gy_row_stride, base, c, eps, KIND, BLOCK_R)
                    ds = (gw - q * w) * (1.0 / eps)
                    out = ds_ptr + rows * n_cols + cols
                    tl.store(out, ds.to(ds_ptr.dtype.element_ty), mask=cols < n_cols)


def backward(
    gy: Tensor, scores: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None, solution: Tensor,
    k_value: float, eps_value: float, kind: int, need_s: bool, need_k: bool, need_eps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) in the dtype of the scores, or empty, and dk and deps (rows, 1) in fp32."""
    return of_rows(as_rows(gy), as_rows(scores), solution, eps, mask, eps_value, kind, need_s, need_eps)


def of_rows(
    gy: Tensor | None, s: Tensor, solution: Tensor, eps: Tensor | None, mask: Tensor | None, eps_value: float,
    kind: int, need_s: bool, need_eps: bool, ds: Tensor | None = None, sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return `backward` of rows with unit column stride; deps are empty if not needed.

    With `ds`, contiguous, the gradient is written there. `sums` (rows, 2) are Σ gy·w and Σ gy·w·x; gy is None then, and
    ds is the gradient of entries that have none of their own.
    """
    n_rows, n_cols = s.shape
    if ds is None:
        ds = torch.empty((n_rows, n_cols) if need_s else (0,), dtype=s.dtype, device=s.device)
    dk = scratch(s, n_rows, 1)
    deps = scratch(s, n_rows if need_eps else 0, 1)
    if not s.numel():
        return ds, dk.zero_(), deps.zero_()
    plan = shape(n_rows, n_cols, HALF_PER_WARP, LONGEST)
    whole_rows = plan.splits == 1
    partial = None if whole_rows else scratch(s, n_rows, plan.splits, 4)
    vec = math.gcd(16, n_cols, stride(gy), s.stride(0), stride(mask))
    strides = (stride(gy) // vec, s.stride(0) // vec, stride(eps), stride(mask) // vec)
    n_splits = 0 if whole_rows else next_power_of_2(plan.splits)
    for sums_only in (False,) if whole_rows else (True, False):
        launch(
            backward_kernel, (plan.programs, plan.splits, 1),
            (gy, s, eps, mask, solution, sums, partial, ds, dk, deps),
            (*strides, n_rows, n_cols // vec, plan.splits, plan.chunk // plan.block_c, eps_value),
            (kind, need_s, need_eps, sums_only, n_splits, plan.block_r,
             plan.block_c, vec), num_warps=plan.warps,
        )  # fmt: skip
    return ds, dk, deps
