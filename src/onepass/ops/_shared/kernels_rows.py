"""Tiles of rows for Triton kernels: loads, sums of each row, and the launch shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import aligned, cdiv, even_rows, next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))

# arguments that kernels do not specialise on, so that `launch` skips Triton's check of their values
SIZES = (
    "gy_row_stride", "s_row_stride", "k_stride", "eps_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits",
    "tiles", "n_iters", "n_changing",
)  # fmt: skip
# elements that one warp holds in registers: as many as fit, or half, since more warps hide more latency
PER_WARP = 1024
HALF_PER_WARP = 512
# columns beyond which a warp holds 2·PER_WARP: then several rows fit, or fewer warps wait for each other
CROWDED = 4096
# most rows of one program
MAX_ROWS = 32
# columns of a long row per program, and the most programs per row, as each reads the partials of all
CHUNK = 8192
MAX_SPLITS = 256
# columns of a chunk that are in registers at a time
TILE = 4096


# A tile of several rows is (R, C), with rows (R, 1), cols (1, C) and values per row (R, 1). A tile of one row is (C,),
# with scalars for rows and values per row: tensors of one element are slow in Triton 3.6.


@triton.jit
def tile_rows(BLOCK_R: tl.constexpr):
    """Return the rows of this program."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    return first + tl.arange(0, BLOCK_R)[:, None] if BLOCK_R > 1 else first


@triton.jit
def tile_cols(first, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return BLOCK_C columns from `first` on."""
    cols = first + tl.arange(0, BLOCK_C)
    return cols[None, :] if BLOCK_R > 1 else cols


@triton.jit
def within(rows, cols, n_rows, n_cols, BLOCK_R: tl.constexpr):
    """Return the mask of a tile: where it lies inside the tensor."""
    return (rows < n_rows) & (cols < n_cols) if BLOCK_R > 1 else cols < n_cols


@triton.jit
def row_sum(x, BLOCK_R: tl.constexpr):
    """Return the sum of each row."""
    return tl.sum(x, 1 if BLOCK_R > 1 else 0, keep_dims=BLOCK_R > 1)


@triton.jit
def row_max(x, BLOCK_R: tl.constexpr):
    """Return the maximum of each row."""
    return tl.max(x, 1 if BLOCK_R > 1 else 0, keep_dims=BLOCK_R > 1)


@triton.jit
def largest(x, BLOCK_R: tl.constexpr):
    """Return the maximum over the rows of one value per row."""
    return tl.max(x) if BLOCK_R > 1 else x


@triton.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def pair_sum(a, b, BLOCK_R: tl.constexpr):
    """Return the sums of a and of b per row, by one exchange between the warps."""
    return tl.reduce((a, b), 1 if BLOCK_R > 1 else 0, add_pairs, keep_dims=BLOCK_R > 1)


class Scores(NamedTuple):
    """Rows of scores and their mask as functions of the kernels take them."""

    s_ptr: Any  # (n_rows, n_cols) any float, unit column stride
    mask_ptr: Any  # (n_rows, n_cols) uint8, unit column stride, or None
    row_stride: Any
    mask_row_stride: Any
    n_rows: Any
    n_cols: Any


@triton.jit
def load_scores(scores, rows, cols, BLOCK_R: tl.constexpr):
    """Load a tile of scores in fp32, -inf where masked or outside."""
    inside = within(rows, cols, scores.n_rows, scores.n_cols, BLOCK_R)
    s = tl.load(scores.s_ptr + rows * scores.row_stride + cols, mask=inside, other=-float("inf")).to(tl.float32)
    if scores.mask_ptr is not None:
        allowed = tl.load(scores.mask_ptr + rows * scores.mask_row_stride + cols, mask=inside, other=0)
        s = tl.where(allowed != 0, s, -INF)
    return s


@triton.jit
def load_gradient(gy_ptr, rows, cols, gy_row_stride, n_rows, n_cols, BLOCK_R: tl.constexpr):
    """Load a tile of the upstream gradient in fp32, 0 outside."""
    inside = within(rows, cols, n_rows, n_cols, BLOCK_R)
    return tl.load(gy_ptr + rows * gy_row_stride + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_option(ptr, stride, value, rows, n_rows):
    """Return k or eps of each row in fp32: from a tensor of any dtype, or one number for all."""
    if ptr is not None:
        option = tl.load(ptr + rows * stride, mask=rows < n_rows, other=1.0).to(tl.float32)
    else:
        option = rows.to(tl.float32) * 0.0 + value
    return option


class Shape(NamedTuple):
    """Launch shape: rows and columns of a tile, warps, programs over the rows, splits of a row, columns per split."""

    block_r: int
    block_c: int
    warps: int
    programs: int
    splits: int
    chunk: int


def shape(n_rows: int, n_cols: int, per_warp: int, max_cols: int) -> Shape:
    """Return the launch shape. Only the grid depends on n_rows, so the result of a row is the same in every batch.

    A row of up to max_cols columns stays in one program's registers; short rows share a warp. Longer rows are split
    into chunks, one program each.
    """
    if n_cols <= max_cols:
        block_c = next_power_of_2(n_cols)
        # divided by 2: rows that share a warp need registers for the values per row
        block_r = max(1, min(MAX_ROWS, per_warp // (2 * block_c)))
        return Shape(block_r, block_c, min(32, max(1, block_c // per_warp)), cdiv(n_rows, block_r), 1, block_c)
    chunk = cdiv(max(CHUNK, cdiv(n_cols, MAX_SPLITS)), TILE) * TILE
    return Shape(1, TILE, TILE // PER_WARP, n_rows, cdiv(n_cols, chunk), chunk)


def even(
    s: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the inputs of forward, copied if not aligned: then only the width decides the order of a row's sums."""
    k, eps = (None if value is None else aligned(value) for value in (k, eps))
    return even_rows(s), k, eps, None if mask is None else even_rows(mask)


def stride(value: Tensor | None) -> int:
    """Return the stride between the rows of an optional tensor; 0 for None."""
    return 0 if value is None else value.stride(0)


def scratch(like: Tensor, *size: int) -> Tensor:
    """Return an uninitialised fp32 buffer on the device of a tensor."""
    return torch.empty(size, dtype=torch.float32, device=like.device)
