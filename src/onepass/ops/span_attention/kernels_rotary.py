"""Triton kernel of rotary embedding: one read, one write; the kernel computes the angles."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2

from .definition import LOG2_BASE, in_two

# 1/2π in three parts, which the compiler adds up
_HIGH, _REST = in_two(1 / (2 * math.pi))
_MIDDLE, _LOW = in_two(_REST)
TURNS_HIGH, TURNS_MIDDLE, TURNS_LOW = tl.constexpr(_HIGH), tl.constexpr(_MIDDLE), tl.constexpr(_LOW)
TURN = tl.constexpr(2 * math.pi)


@triton.jit
def cos_sin(positions, channels, log2_base_high, log2_base_low, HALF: tl.constexpr):
    """Return the cosine and sine of the angles of channels at positions."""
    # fp32 holds a million radians only to 0.06, so angles are fp64 until they are less than one turn
    log2_base = tl.cast(log2_base_high, tl.float64) + tl.cast(log2_base_low, tl.float64)
    radians = positions.to(tl.float64) * tl.exp2((channels.to(tl.float64) / HALF) * -log2_base)
    per_radian = tl.cast(TURNS_HIGH, tl.float64) + tl.cast(TURNS_MIDDLE, tl.float64) + tl.cast(TURNS_LOW, tl.float64)
    turns = radians * per_radian
    angle = ((turns - tl.floor(turns)) * TURN).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


STRIDES = [f"{t}_{d}" for t in ("x", "out") for d in ("batch", "row", "head")]
INTS = [*STRIDES, "position_batch", "n", "heads"]


@triton.jit(do_not_specialize=INTS)
def rotary_kernel(
    x_ptr,  # (batch, n, heads, 2·HALF), unit stride in the last dimension
    positions_ptr,  # (batch or 1, n) int64, or None: 0 … n−1
    out_ptr,  # like x; may be x
    x_batch, x_row, x_head, out_batch, out_row, out_head,  # strides
    position_batch,  # stride of positions, 0 when shared
    n, heads,
    log2_base_high, log2_base_low,  # log2(base) as a sum, more exact than one fp32 number
    UNIT: tl.constexpr,  # strides are given in this many elements
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,  # rotate by the negative angles
    HAS_POSITIONS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a few tokens per program, so that their cosines and sines are computed once."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = (rows < n)[:, None] & (cols < HALF)[None, :]
    if HAS_POSITIONS:
        positions = tl.load(positions_ptr + b * position_batch + rows, mask=rows < n, other=0)
    else:
        positions = rows
    cos, sin = cos_sin(positions[:, None], cols[None, :], log2_base_high, log2_base_low, HALF)
    if INVERSE:
        sin = -sin
    x_ptr += b * x_batch * UNIT + rows.to(tl.int64)[:, None] * (x_row * UNIT) + cols[None, :]
    out_ptr += b * out_batch * UNIT + rows.to(tl.int64)[:, None] * (out_row * UNIT) + cols[None, :]
    for head in tl.range(0, heads, num_stages=4):
        left = tl.load(x_ptr + head * x_head * UNIT, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(x_ptr + head * x_head * UNIT + HALF, mask=inside, other=0.0).to(tl.float32)
        dtype = out_ptr.dtype.element_ty
        tl.store(out_ptr + head * out_head * UNIT, (left * cos - right * sin).to(dtype), mask=inside)
        tl.store(out_ptr + head * out_head * UNIT + HALF, (left * sin + right * cos).to(dtype), mask=inside)


def rotate(x: Tensor, positions: Tensor | None, inverse: bool, out: Tensor) -> None:
    """Rotate x (B, N, H, D) by its positions (B or 1, N) and write the result to out, which may be x."""
    batch, n, heads, width = x.shape
    half = width // 2
    block_c = max(16, next_power_of_2(half))
    block_n = max(4, 512 // block_c)
    strides = *x.stride()[:3], *out.stride()[:3]
    unit = 16 if all(s % 16 == 0 for s in strides) else 1
    position_batch = 0 if positions is None or len(positions) == 1 else positions.stride(0)
    launch(
        rotary_kernel, (cdiv(n, block_n), batch, 1), (x, positions, out),
        (*(s // unit for s in strides), position_batch, n, heads, *LOG2_BASE),
        (unit, half, inverse, positions is not None, block_n, block_c), num_warps=2,
    )  # fmt: skip
