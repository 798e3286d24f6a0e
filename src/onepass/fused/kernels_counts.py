"""Triton kernels of a choice by shares: how many tokens to choose of each row, and the choice cut to that number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, cdiv, device_guard, launch, next_power_of_2

INTS = ["mask_row_stride", "n", "k", "numerator", "denominator", "total", "soft_row_stride"]
BLOCK = 1024
# places of a program that cuts
CUT = 256


@triton.jit(do_not_specialize=INTS)
def count_kernel(
    mask_ptr,  # (rows, n) uint8, unit column stride
    count_ptr,  # (rows,) fp32: max(1, round(share·m)) for the m real tokens of the row
    mask_row_stride,
    n,
    numerator,
    denominator,
    BLOCK: tl.constexpr,
):
    """Round in integers, halves to even, as the host does."""
    row = tl.program_id(0).to(tl.int64)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        found += (tl.load(mask_ptr + row * mask_row_stride + cols, mask=cols < n, other=0) != 0).to(tl.int32)
    twice = 2 * tl.sum(found, 0).to(tl.int64) * numerator + denominator
    count = twice // (2 * denominator)
    tie = twice % (2 * denominator) == 0
    count = tl.where(tie, count - count % 2, count)
    tl.store(count_ptr + row, tl.maximum(count, 1).to(tl.float32))


@triton.jit(do_not_specialize=INTS)
def cut_kernel(
    index_ptr,  # (rows, k) int64, best first; −1 is written after the first `count` of a row
    gate_ptr,  # (rows, k) fp32 or fp16, contiguous: gates; 0 is written there
    soft_ptr,  # (rows, n) gates of all tokens, written to the chosen ones; None: these keep their gates
    count_ptr,  # (rows,) fp32
    soft_row_stride,
    k,
    total,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = at // k
    index = tl.load(index_ptr + at, mask=inside, other=-1)
    count = tl.load(count_ptr + row, mask=inside, other=0.0)
    kept = inside & (index >= 0) & ((at - row * k).to(tl.float32) < count)
    if soft_ptr is None:
        gate = tl.load(gate_ptr + at, mask=kept, other=0.0)
    else:
        gate = tl.load(soft_ptr + row * soft_row_stride + index, mask=kept, other=0.0)
    tl.store(index_ptr + at, tl.where(kept, index, -1), mask=inside)
    tl.store(gate_ptr + at, tl.where(kept, gate, 0.0).to(gate_ptr.dtype.element_ty), mask=inside)


def counts(mask: Tensor, share: tuple[int, int]) -> Tensor:
    """Return how many tokens to choose of each row (rows, n) of a mask, at least 1: (rows,) fp32."""
    rows = as_rows(mask.view(torch.uint8))
    out = torch.empty(len(rows), dtype=torch.float32, device=mask.device)
    block = min(BLOCK, next_power_of_2(mask.shape[1]))
    with device_guard(mask):
        launch(
            count_kernel, (len(rows), 1, 1), (rows, out), (rows.stride(0), rows.shape[1], *share), (block,), num_warps=4
        )  # fmt: skip
    return out


def cut(indices: Tensor, gates: Tensor, soft: Tensor | None, counts: Tensor) -> None:
    """Keep the first `counts` of each row (rows, k), with their gates from `soft` (rows, n) if given; in place."""
    total = indices.numel()
    with device_guard(indices):
        launch(
            cut_kernel, (cdiv(total, CUT), 1, 1), (indices, gates, soft, counts),
            (0 if soft is None else soft.stride(0), indices.shape[1], total), (CUT,), num_warps=4,
        )  # fmt: skip
