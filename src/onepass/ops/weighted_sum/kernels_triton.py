"""Triton kernels of weighted_sum and their launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, cdiv, device_guard, next_power_of_2, sm_count


@triton.jit
def forward_kernel(
    x_ptr,  # (n_rows, n_cols), unit column stride
    w_ptr,  # (N_VECTORS, n_cols), contiguous
    y_ptr,  # (n_rows, N_VECTORS), contiguous
    x_row_stride,
    n_rows,
    n_cols,
    N_VECTORS: tl.constexpr,
    PADDED_VECTORS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of rows per program; each tile of x serves all vectors."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    vectors = tl.arange(0, PADDED_VECTORS)
    acc = tl.zeros((BLOCK_R, PADDED_VECTORS), tl.float32)
    for start in range(0, n_cols, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        for r in tl.static_range(N_VECTORS):
            w = tl.load(w_ptr + r * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            part = tl.sum(x * w[None, :], 1)
            acc += tl.where(vectors[None, :] == r, part[:, None], 0.0)
    out = rows[:, None] * N_VECTORS + vectors[None, :]
    mask = (rows[:, None] < n_rows) & (vectors[None, :] < N_VECTORS)
    tl.store(y_ptr + out, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy_ptr,  # (n_rows, N_VECTORS), contiguous
    x_ptr,  # (n_rows, n_cols), unit column stride
    w_ptr,  # (N_VECTORS, n_cols), contiguous
    dx_ptr,  # (n_rows, n_cols), contiguous
    dw_ptr,  # (row groups, N_VECTORS, n_cols) fp32, contiguous
    x_row_stride,
    n_rows,
    n_cols,
    N_VECTORS: tl.constexpr,
    PADDED_VECTORS: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of columns and every n-th tile of rows per program: x read once, dx written once, dw in registers."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_cols = cols < n_cols
    vectors = tl.arange(0, PADDED_VECTORS)
    dw = tl.zeros((PADDED_VECTORS, BLOCK_C), tl.float32)
    for tile in tl.range(group, tl.cdiv(n_rows, BLOCK_R), tl.num_programs(1)):
        rows = (tile * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (rows[:, None] < n_rows) & in_cols[None, :]
        if NEED_W:
            x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dx = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for r in tl.static_range(N_VECTORS):
            dy = tl.load(dy_ptr + rows * N_VECTORS + r, mask=rows < n_rows, other=0.0).to(tl.float32)
            if NEED_X:
                w = tl.load(w_ptr + r * n_cols + cols, mask=in_cols, other=0.0).to(tl.float32)
                dx += dy[:, None] * w[None, :]
            if NEED_W:
                part = tl.sum(dy[:, None] * x, 0)
                dw += tl.where(vectors[:, None] == r, part[None, :], 0.0)
        if NEED_X:
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_W:
        out = (group * N_VECTORS + vectors[:, None]).to(tl.int64) * n_cols + cols[None, :]
        tl.store(dw_ptr + out, dw, mask=(vectors[:, None] < N_VECTORS) & in_cols[None, :])


def _tile(n_cols: int, elements: int) -> tuple[int, int]:
    block_c = min(next_power_of_2(n_cols), elements)
    return max(1, elements // block_c), block_c


def forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """X (rows, D) with unit column stride, weight (R, D) contiguous → y (rows, R)."""
    n_rows, n_cols = x.shape
    n_vectors = weight.shape[0]
    y = torch.empty((n_rows, n_vectors), dtype=out_dtype, device=x.device)
    if y.numel():
        block_r, block_c = _tile(n_cols, 4096)
        with device_guard(x):
            forward_kernel[(cdiv(n_rows, block_r),)](
                x, weight, y, x.stride(0), n_rows, n_cols,
                N_VECTORS=n_vectors, PADDED_VECTORS=next_power_of_2(n_vectors), BLOCK_R=block_r, BLOCK_C=block_c,
                num_warps=4, **OPTIONS,
            )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    """Dy (rows, R) contiguous → dx (rows, D) and dweight (R, D); what is not needed comes back empty."""
    n_rows, n_cols = x.shape
    n_vectors = weight.shape[0]
    dx = torch.empty((n_rows, n_cols) if need_x else (0,), dtype=x.dtype, device=x.device)
    if not x.numel() or not n_vectors:
        return dx.zero_(), torch.zeros_like(weight) if need_w else weight.new_empty(0)
    block_r, block_c = _tile(n_cols, 4096)
    col_tiles = cdiv(n_cols, block_c)
    groups = min(cdiv(n_rows, block_r), max(1, 8 * sm_count(x) // col_tiles))
    dw = torch.empty((groups if need_w else 0, n_vectors, n_cols), dtype=torch.float32, device=x.device)
    with device_guard(x):
        backward_kernel[(col_tiles, groups)](
            dy, x, weight, dx, dw, x.stride(0), n_rows, n_cols,
            N_VECTORS=n_vectors, PADDED_VECTORS=next_power_of_2(n_vectors), NEED_X=need_x, NEED_W=need_w,
            BLOCK_R=block_r, BLOCK_C=block_c, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return dx, dw.sum(0).to(weight.dtype) if need_w else weight.new_empty(0)
