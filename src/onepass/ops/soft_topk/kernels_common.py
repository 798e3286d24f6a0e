"""What the Triton kernels of this folder share: loads, sums of pairs, and the launch shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import INTERPRET, cdiv, next_power_of_2

CAPPED_EXP = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
LAPLACE = tl.constexpr(2)
CLAMP = tl.constexpr(3)

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
# the interpreter runs a reduction with its own combine function element by element
SEPARATE = tl.constexpr(INTERPRET)

# elements one warp holds in registers, and the longest row one program does
PER_WARP = 1024
# half of what registers allow: more warps hide what a pass waits for
HALF_PER_WARP = 512
MAX_COLS = 32768
# most rows of one program
MAX_ROWS = 32
# columns of a long row that one program takes, and the most programs per row (their partial sums are all read by each)
CHUNK = 8192
MAX_SPLITS = 256
# columns of such a chunk in registers at a time
TILE = 4096


@triton.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def pair_sum(a, b, axis: tl.constexpr):
    """Both sums over one axis, through one exchange between the warps."""
    if SEPARATE:
        return tl.sum(a, axis), tl.sum(b, axis)
    return tl.reduce((a, b), axis, add_pairs)


@triton.jit
def load_scores(s_ptr, mask_ptr, rows, cols, s_row_stride, mask_row_stride, n_rows, n_cols, HAS_MASK: tl.constexpr):
    """(rows × cols) of scores in fp32, -inf where masked or outside."""
    inside = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    s = tl.load(s_ptr + rows[:, None] * s_row_stride + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_MASK:
        allowed = tl.load(mask_ptr + rows[:, None] * mask_row_stride + cols[None, :], mask=inside, other=0)
        s = tl.where(allowed != 0, s, -INF)
    return s


@triton.jit
def load_option(ptr, stride, value, rows, n_rows, HAS: tl.constexpr):
    """K or eps of each row: from a tensor of any dtype, or one number for all."""
    if HAS:
        return tl.load(ptr + rows * stride, mask=rows < n_rows, other=1.0).to(tl.float32)
    return tl.zeros(rows.shape, tl.float32) + value


@triton.jit
def offsets(s, base, eps):
    """(s - base)/eps; where base is +inf the +inf scores share k: 0 for them, -inf for the rest."""
    shared = tl.where(s == INF, 0.0, -INF)
    return tl.where(base[:, None] == INF, shared, (s - base[:, None]) * (1.0 / eps)[:, None])


@triton.jit
def gates_and_slopes(x, KIND: tl.constexpr):
    """φ(x) and φ'(x); `clamp` is measured from its lower edge."""
    if KIND == CAPPED_EXP:
        y = tl.exp2(x * LOG2E)
        saturated = x > 0
        w = tl.where(saturated, 0.0, y)
        y = tl.where(saturated, 1.0, y)
    elif KIND == SIGMOID:
        e = tl.exp2(-tl.abs(x) * LOG2E)
        r = 1.0 / (1.0 + e)
        w = e * r * r
        y = tl.where(x < 0, e * r, r)
    elif KIND == LAPLACE:
        w = 0.5 * tl.exp2(-tl.abs(x) * LOG2E)
        y = tl.where(x < 0, w, 1.0 - w)
    else:
        w = tl.where((x > 0) & (x < 1), 1.0, 0.0)
        y = tl.where(x > 1, 1.0, tl.where(x < 0, 0.0, x))
    return y, w


class Shape(NamedTuple):
    """Rows and columns of one program's tile, warps, programs along the rows and along the columns of a row."""

    block_r: int
    block_c: int
    warps: int
    programs: int
    splits: int
    chunk: int


def shape(n_rows: int, n_cols: int, per_warp: int = PER_WARP, max_cols: int = MAX_COLS) -> Shape:
    """The one launch formula. It depends on n_cols alone (but for the grid), so a row's result never depends on others.

    Up to max_cols columns a row stays in one program's registers, with several rows per warp when they are short;
    beyond, a row is cut into chunks, one program each.
    """
    if n_cols <= max_cols:
        block_c = next_power_of_2(n_cols)
        # rows that share a warp need registers for the state of each
        block_r = max(1, min(MAX_ROWS, per_warp // (2 * block_c)))
        return Shape(block_r, block_c, min(32, max(1, block_c // per_warp)), cdiv(n_rows, block_r), 1, block_c)
    chunk = cdiv(max(CHUNK, cdiv(n_cols, MAX_SPLITS)), TILE) * TILE
    return Shape(1, TILE, TILE // PER_WARP, n_rows, cdiv(n_cols, chunk), chunk)


def stride(value: Tensor | None) -> int:
    """Step between the rows of an optional tensor."""
    return 0 if value is None else value.stride(0)


def scratch(like: Tensor, *size: int) -> Tensor:
    """An uninitialised fp32 buffer beside a tensor."""
    return torch.empty(size, dtype=torch.float32, device=like.device)
