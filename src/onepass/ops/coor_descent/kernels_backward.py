"""Triton backward of coor_descent: a recursion over T numbers per row, from the last step to the first.

An element needs one exponential per distinct eps.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, next_power_of_2
from onepass.ops._shared.kernels_mailbox import resident
from onepass.ops._shared.kernels_rows import (
    HALF_PER_WARP,
    LOG2E,
    SIZES,
    TILE,
    Scores,
    largest,
    load_gradient,
    load_option,
    load_scores,
    row_sum,
    scratch,
    shape,
    stride,
    tile_cols,
    tile_rows,
    within,
)

from .kernels_triton import WINDOW, eps_arguments, epsilon, n_changing_of

# longest row that one program holds in registers, three numbers per element
LONGEST = 16384


@triton.jit
def last_gradient(z, gy, level, eps):
    """Return the gradient of s + a_T: gy·y/eps where the gate is not saturated, else 0."""
    x = (z - level) * (LOG2E / eps)
    y = tl.exp2(x)
    return tl.where((x <= 0) & (y > 0), gy * y, 0.0) * (1.0 / eps)


@triton.jit(do_not_specialize=SIZES)
def gradient_sum_kernel(
    gy_ptr,  # (n_rows, n_cols) any float, unit column stride
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous
    partial_ptr,  # (n_rows, n_splits) fp32
    gy_row_stride,
    s_row_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    tiles,
    n_iters,
    eps_first,
    eps_last,
    log2_decay,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Long rows: sum `last_gradient` over one chunk per program, the only row reduction of backward."""
    gy_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols)
    rows = tile_rows(1)
    trace = trace_ptr + rows * (2 * n_iters)
    start = tl.load(trace + 2 * n_iters - 1)
    level = tl.load(trace + n_iters - 1)
    eps = epsilon(n_iters, eps_first, log2_decay, eps_last)
    da = 0.0
    for tile in range(tiles):
        cols = (tl.program_id(1) * tiles + tile) * BLOCK_C + tl.arange(0, BLOCK_C)
        s = load_scores(scores, rows, cols, 1)
        gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, 1)
        da += tl.sum(last_gradient(s - start, gy, level, eps), 0)
    tl.store(partial_ptr + rows * tl.num_programs(1) + tl.program_id(1), da)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    gy_ptr,  # (n_rows, n_cols) any float, unit column stride
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    k_ptr,  # (n_rows,) any float, or nothing
    mask_ptr,  # (n_rows, n_cols) uint8, unit column stride, or nothing
    trace_ptr,  # (n_rows, 2 * n_iters) fp32, contiguous
    partial_ptr,  # (n_rows, n_splits) fp32, or nothing when a program holds whole rows
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    dk_ptr,  # (n_rows,) fp32
    gy_row_stride,
    s_row_stride,
    k_stride,
    mask_row_stride,
    n_rows,
    n_cols,
    n_splits,
    k_value,
    n_iters,
    n_changing,
    eps_first,
    eps_last,
    log2_decay,
    N_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    VEC: tl.constexpr,
):
    """Run the scalar recursion from da_T down; an element adds up the weights of all steps that left it unsaturated.

    The last steps share one eps and one exponential per element; in units of it (d = da·e^((base - here)/eps)) the
    recursion itself needs none. Before step n_changing each step may have its own eps and exponential.
    """
    gy_row_stride *= VEC
    n_cols *= VEC
    scores = Scores(s_ptr, mask_ptr, s_row_stride * VEC, mask_row_stride * VEC, n_rows, n_cols)
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    cols = tile_cols(tl.program_id(1) * BLOCK_C, BLOCK_R, BLOCK_C)
    s = load_scores(scores, rows, cols, BLOCK_R)
    gy = load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, BLOCK_R)
    k = load_option(k_ptr, k_stride, k_value, rows, n_rows)
    trace = trace_ptr + rows * (2 * n_iters)
    z = s - tl.load(trace + 2 * n_iters - 1, mask=in_rows, other=0.0)
    here = tl.load(trace + n_iters - 1, mask=in_rows, other=0.0)
    ds = last_gradient(z, gy, here, epsilon(n_iters, eps_first, log2_decay, eps_last))
    if N_SPLITS > 0:
        parts = tl.arange(0, N_SPLITS)
        da = tl.sum(tl.load(partial_ptr + rows * n_splits + parts, mask=parts < n_splits, other=0.0), 0)
    else:
        da = row_sum(ds, BLOCK_R)
    per_k = 1.0 / k
    dk = tl.zeros_like(here)
    t = n_iters - 1
    # prefetch the threshold and count of the next step during this one
    before = tl.load(trace + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    saturated = tl.load(trace + n_iters + tl.maximum(t - 1, 0), mask=in_rows, other=0.0)
    if t >= n_changing:
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        weight = tl.zeros_like(z)
        base = here
        while (t >= n_changing) & (t > 0):
            next_before = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
            if k_ptr is not None:
                dk += eps * da * tl.exp2((here - base) * scale)
            weight += tl.where(z <= before, da, 0.0)
            da *= saturated * per_k
            here = before
            leaves = tl.abs(here - base) > WINDOW * eps
            if largest(leaves.to(tl.int32), BLOCK_R) > 0:
                # the cap keeps 0·inf away: only saturated entries, of weight 0, have exponents above 80
                ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
                weight = tl.zeros_like(z)
                da = tl.where(da == 0, 0.0, da * tl.exp2((here - base) * scale))
                base = here
            before = next_before
            saturated = next_saturated
            t -= 1
        ds -= per_k * weight * tl.exp2(tl.minimum((z - base) * scale, 80.0))
        da = tl.where(da == 0, 0.0, da * tl.exp2((here - base) * scale))
    while t > 0:
        next_before = tl.load(trace + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        next_saturated = tl.load(trace + n_iters + tl.maximum(t - 2, 0), mask=in_rows, other=0.0)
        eps = epsilon(t, eps_first, log2_decay, eps_last)
        scale = LOG2E / eps
        if k_ptr is not None:
            dk += eps * da
        da *= per_k
        ds -= tl.where(z <= before, da * tl.exp2((z - here) * scale), 0.0)
        da = tl.where(saturated == 0, 0.0, da * saturated * tl.exp2((before - here) * scale))
        here = before
        before = next_before
        saturated = next_saturated
        t -= 1
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    tl.store(ds_ptr + rows * n_cols + cols, ds.to(ds_ptr.dtype.element_ty), mask=inside)
    if k_ptr is not None:
        dk += epsilon(0, eps_first, log2_decay, eps_last) * da
        if tl.program_id(1) == 0:
            tl.store(dk_ptr + rows, dk * per_k, mask=in_rows)


def backward(
    gy: Tensor, s: Tensor, trace: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) in the dtype of s and dk (rows, 1) in fp32, unset for a number k.

    gy and s are (rows, n) with unit column stride.
    """
    n_rows, n_cols = s.shape
    ds = torch.empty((n_rows, n_cols), dtype=s.dtype, device=s.device)
    dk = scratch(s, n_rows, 1)
    if not ds.numel():
        return ds, dk.zero_()
    schedule = eps_arguments(eps, eps_init, eps_decay)
    plan = shape(n_rows, n_cols, HALF_PER_WARP, LONGEST)
    partial = scratch(s, n_rows, plan.splits) if plan.splits > 1 else None
    vec = math.gcd(16, n_cols, gy.stride(0), s.stride(0), stride(mask))
    strides = (gy.stride(0) // vec, s.stride(0) // vec, stride(k), stride(mask) // vec)
    block_c, warps, col_programs = plan.block_c, plan.warps, 1
    with device_guard(s):
        if partial is not None:
            launch(
                gradient_sum_kernel, (n_rows, plan.splits, 1), (gy, s, mask, trace, partial),
                (*strides[:2], strides[3], n_rows, n_cols // vec, plan.chunk // TILE, n_iters, *schedule),
                (TILE, vec), num_warps=4,
            )  # fmt: skip
            block_c, warps, col_programs = TILE, TILE // HALF_PER_WARP, cdiv(n_cols, TILE)
        n_splits = 0 if partial is None else next_power_of_2(plan.splits)
        launch(
            backward_kernel, (plan.programs, col_programs, 1), (gy, s, k, mask, trace, partial, ds, dk),
            (*strides, n_rows, n_cols // vec, plan.splits, k_value, n_iters,
             n_changing_of(n_iters, eps, eps_init, eps_decay), *schedule),
            (n_splits, plan.block_r, block_c, vec),
            **(resident(warps, 2) if warps == 16 else {"num_warps": warps}),
        )  # fmt: skip
    return ds, dk
