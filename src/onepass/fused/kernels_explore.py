"""Triton kernels of exploration: the gradient's length at each `stride`-th token, minus its sequence's mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, replayed
from onepass.ops._shared.kernels_tokens import WARPS, tile

INTS = ["n", "stride", "count", "mask_stride", "total"]
# tokens per iteration of the second kernel
BLOCK = 1024


@triton.jit(do_not_specialize=INTS)
def length_kernel(
    dy_ptr,  # (batch, n, D), contiguous
    length_ptr,  # (batch, count) fp32
    n,
    stride,
    count,  # ⌈n / stride⌉
    total,  # batch·count
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    tokens = (rows // count) * n + (rows % count) * stride
    square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = inside[:, None] & (cols < D)
        dy = tl.load(dy_ptr + (tokens * D)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        square += dy * dy
    tl.store(length_ptr + rows, tl.sqrt(tl.sum(square, 1)), mask=inside)


@triton.jit(do_not_specialize=INTS)
def centre_kernel(
    length_ptr,  # (batch, count) fp32
    mask_ptr,  # (batch, n) bool as uint8, unit stride; None: all tokens are real
    explore_grad_ptr,  # (batch, count) fp32
    stride,
    count,
    mask_stride,
    scale,
    BLOCK: tl.constexpr,
):
    """Compute explore_grad = scale·(length − its mean over the sequence's real tokens), 0 at masked tokens."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    real = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        taken = at < count
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + row * mask_stride + at * stride, mask=taken, other=0) != 0)
        total += tl.load(length_ptr + row * count + at, mask=taken, other=0.0)
        real += taken.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(real, 0), 1.0)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        taken = at < count
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + row * mask_stride + at * stride, mask=taken, other=0) != 0)
        length = tl.load(length_ptr + row * count + at, mask=taken, other=0.0)
        tl.store(explore_grad_ptr + row * count + at, tl.where(taken, scale * (length - mean), 0.0), mask=at < count)


@replayed
def explore_gradient(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return explore_grad (batch, ⌈n / stride⌉) for dy (batch, n, d), contiguous, and a uint8 mask (batch, n) or None.

    The mask has unit column stride.
    """
    batch, n, d = dy.shape
    count = cdiv(n, stride)
    block_r, block_c = tile(d)
    lengths = torch.empty((batch, count), dtype=torch.float32, device=dy.device)
    explore_grad = torch.empty_like(lengths)
    with device_guard(dy):
        launch(
            length_kernel, (cdiv(batch * count, block_r), 1, 1), (dy, lengths),
            (n, stride, count, batch * count), (d, block_r, block_c), num_warps=WARPS,
        )  # fmt: skip
        launch(
            centre_kernel, (batch, 1, 1), (lengths, mask, explore_grad),
            (stride, count, 0 if mask is None else mask.stride(0), float(scale)), (BLOCK,), num_warps=WARPS,
        )  # fmt: skip
    return explore_grad
