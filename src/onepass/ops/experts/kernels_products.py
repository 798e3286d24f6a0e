"""Grouped products: torch's for bf16 from sm_90 on, Triton's where torch has none, or one that makes the host wait."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, next_power_of_2
from onepass.core.launch.compiled import launch_specialized


@triton.jit
def rows_kernel(
    a_ptr,  # (n, D), contiguous; rows in the order of their experts
    b_ptr,  # (E, D, M), any strides
    end_ptr,  # (E,) int32
    out_ptr,  # (n, M), contiguous
    b_expert,
    b_row,
    b_col,
    D,
    M,
    E,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[p] = a[p] · b[expert of p]; each expert's rows have tiles of their own."""
    wide = tl.arange(0, WIDTH)
    ends = tl.load(end_ptr + wide, mask=wide < E, other=0)
    starts = tl.load(end_ptr + wide - 1, mask=(wide < E) & (wide > 0), other=0)
    tiles = tl.where(wide < E, (ends - starts + BLOCK - 1) // BLOCK, 0)
    last = tl.cumsum(tiles, 0)
    e = tl.sum((last <= tl.program_id(0)).to(tl.int32), 0)
    if e < E:
        is_e = wide == e
        end = tl.sum(tl.where(is_e, ends, 0), 0)
        tile = tl.program_id(0) - tl.sum(tl.where(is_e, last - tiles, 0), 0)
        p = (tl.sum(tl.where(is_e, starts, 0), 0) + tile * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        m = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
        b = b_ptr + e.to(tl.int64) * b_expert + m.to(tl.int64) * b_col
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            x = tl.load(a_ptr + p * D + d[None, :], mask=(p < end) & (d[None, :] < D), other=0.0)
            y = tl.load(b + d.to(tl.int64)[:, None] * b_row, mask=(d[:, None] < D) & (m < M), other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")
        tl.store(out_ptr + p * M + m, total.to(out_ptr.dtype.element_ty), mask=(p < end) & (m < M))


@triton.jit
def weights_kernel(
    a_ptr,  # (n, P), contiguous; rows in the order of their experts
    b_ptr,  # (n, Q), contiguous
    end_ptr,  # (E,) int32
    out_ptr,  # (E, P, Q), contiguous
    P,
    Q,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[e] = Σ a[p]ᵀ · b[p] over the rows p of an expert, in their order."""
    e = tl.program_id(0)
    end = tl.load(end_ptr + e)
    start = tl.load(end_ptr + e - 1, mask=e > 0, other=0)
    p = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    q = (tl.program_id(2) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(start, end, BLOCK_N):
        n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        x = tl.load(a_ptr + n[None, :] * P + p, mask=(n[None, :] < end) & (p < P), other=0.0)
        y = tl.load(b_ptr + n[:, None] * Q + q, mask=(n[:, None] < end) & (q < Q), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    at = (e.to(tl.int64) * P + p) * Q + q
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(p < P) & (q < Q))


@cache
def _torch_waits(index: int) -> bool:
    """Return whether torch's grouped product of bf16 is a loop over the experts, which waits for their sizes."""
    return torch.cuda.get_device_capability(index) < (9, 0)


def _fits_torch(a: Tensor, b: Tensor) -> bool:
    """Return whether torch's product takes contiguous rows a, and b of any strides, without a wait of the host."""
    if not a.is_cuda or a.dtype != torch.bfloat16 or _torch_waits(a.device.index) or b.data_ptr() % 16:
        return False
    # rows of whole 16 bytes
    *strides, column = sorted((*b.stride(), a.shape[1]), reverse=True)
    return column == 1 and not any(stride % 8 for stride in strides)


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[p] · b[expert of p] for rows a (N, D) and b (E, D, M); rows of no expert are undefined."""
    if _fits_torch(a, b):
        return F.grouped_mm(a, b, offs=ends)
    (experts, d, m), n = b.shape, len(a)
    out = torch.empty((n, m), dtype=a.dtype, device=a.device)
    size, depth, warps = (64, 32, 4) if a.element_size() > 2 else (128, 64, 8)
    grid, width = (cdiv(n, size) + experts, cdiv(m, size)), next_power_of_2(experts)
    with torch.cuda.device_of(a):
        launch_specialized(
            rows_kernel, grid, a, b, ends, out, *b.stride(), d, m, experts, width, size, depth, num_warps=warps
        )
    return out


def weight_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return aᵀ · b over each expert's rows (E, P, Q), for a (N, P) and b (N, Q)."""
    if _fits_torch(a, b):
        return F.grouped_mm(a.t(), b, offs=ends)
    (p, q), experts = (a.shape[1], b.shape[1]), len(ends)
    out = torch.empty((experts, p, q), dtype=a.dtype, device=a.device)
    with torch.cuda.device_of(a):
        launch_specialized(
            weights_kernel, (experts, cdiv(p, 64), cdiv(q, 64)), a, b, ends, out, p, q, 32, 64, num_warps=4
        )
    return out
