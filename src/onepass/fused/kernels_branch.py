"""Triton kernels between the matrix products of a feed-forward's backward: GELU's gradient, sums over rows.

Each program writes its partials of sums over rows (gradients of biases and of a norm's weight) to a row of one buffer.
One last kernel adds up those of a whole backward pass, always in the same order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, next_power_of_2, replayed, sm_count
from onepass.ops._shared.kernels_partials import add_partials

INTS = ["total", "partials_stride"]
WARPS = 8
# 16-byte loads of each tensor that a thread has in flight
SUMS_UNROLL = 4
GELU_UNROLL = 4
# programs per multiprocessor that share the rows
PER_SM = 2
# elements of a program of the residual sum: two 16-byte loads of fp32 per thread
RESIDUAL_BLOCK = 1024


@triton.jit(do_not_specialize=INTS)
def sums_kernel(
    x_ptr,  # (total, D), contiguous
    copy_ptr,  # (total, D), contiguous, of another dtype: gets x rounded, and the sums are of that; None: not needed
    partials_ptr,  # (programs, ...) fp32; D columns of each row are written
    total,
    partials_stride,
    D: tl.constexpr,
    OFFSET: tl.constexpr,  # first of these columns
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (cols < D)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in tl.range(group, tl.cdiv(total, UNROLL * BLOCK_R), tl.num_programs(1)):
        top = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        xs = ()
        # load the whole tile before the first store, because the compiler can't move a load across a store
        for u in tl.static_range(UNROLL):
            rows = top + u * BLOCK_R
            mask = (rows < total)[:, None] & inside
            xs = xs + (tl.load(x_ptr + (rows * D)[:, None] + cols[None, :], mask=mask, other=0.0),)
        for u in tl.static_range(UNROLL):
            x = xs[u]
            if copy_ptr is not None:
                rows = top + u * BLOCK_R
                x = x.to(copy_ptr.dtype.element_ty)
                tl.store(copy_ptr + (rows * D)[:, None] + cols[None, :], x, mask=(rows < total)[:, None] & inside)
            acc += x.to(tl.float32)
    out = partials_ptr + group.to(tl.int64) * partials_stride + OFFSET
    tl.store(out + cols, tl.sum(acc, 0), mask=cols < D)


@triton.jit(do_not_specialize=INTS)
def gelu_backward_kernel(
    dh_ptr,  # (total, D), contiguous; overwritten with du
    u_ptr,  # (total, D), contiguous
    partials_ptr,  # (programs, ...) fp32; D columns of each row get the sums of du; None: not needed
    total,
    partials_stride,
    D: tl.constexpr,
    OFFSET: tl.constexpr,  # first of these columns
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute du = dh·(Φ(u) + u·φ(u)) with the normal distribution function Φ and its density φ."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (cols < D)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in tl.range(group, tl.cdiv(total, UNROLL * BLOCK_R), tl.num_programs(1)):
        top = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        us = ()
        dhs = ()
        # loads first, as in `sums_kernel`
        for i in tl.static_range(UNROLL):
            rows = top + i * BLOCK_R
            mask = (rows < total)[:, None] & inside
            at = (rows * D)[:, None] + cols[None, :]
            us = us + (tl.load(u_ptr + at, mask=mask, other=0.0),)
            dhs = dhs + (tl.load(dh_ptr + at, mask=mask, other=0.0),)
        for i in tl.static_range(UNROLL):
            rows = top + i * BLOCK_R
            mask = (rows < total)[:, None] & inside
            u = us[i].to(tl.float32)
            slope = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476) + u * (0.3989422804014327 * tl.exp(-0.5 * u * u))
            du = (dhs[i].to(tl.float32) * slope).to(dh_ptr.dtype.element_ty)
            tl.store(dh_ptr + (rows * D)[:, None] + cols[None, :], du, mask=mask)
            # sum du as rounded: the matrix products read the same values
            acc += du.to(tl.float32)
    if partials_ptr is not None:
        out = partials_ptr + group.to(tl.int64) * partials_stride + OFFSET
        tl.store(out + cols, tl.sum(acc, 0), mask=cols < D)


@triton.jit(do_not_specialize=["total"])
def residual_kernel(
    x_ptr,  # (total · UNIT,)
    y_ptr,  # (total · UNIT,), of any dtype
    out_ptr,  # (total · UNIT,)
    total,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total.to(tl.int64) * UNIT
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def programs(x: Tensor, rows: int) -> int:
    """Return how many programs share the rows in each kernel; the buffer of partials has as many rows."""
    return min(PER_SM * sm_count(x), max(1, cdiv(rows, 4)))


def _tile(x: Tensor) -> tuple[int, int]:
    """Return (BLOCK_R, BLOCK_C): one 16-byte load per thread."""
    vector = 16 // x.element_size()
    block_c = min(next_power_of_2(x.shape[1]), 128 * vector)
    return max(1, WARPS * 32 * vector // block_c), block_c


@replayed
def column_sums(x: Tensor, partials: Tensor, offset: int, dtype: torch.dtype | None = None) -> tuple[Tensor | None]:
    """Write the partials of the sums over the rows of x (rows, d) to d columns of `partials` from `offset` on.

    With a `dtype`, return x rounded to it, and the sums are of that.
    """
    rows, d = x.shape
    block_r, block_c = _tile(x)
    copy = None if dtype is None else torch.empty((rows, d), dtype=dtype, device=x.device)
    with device_guard(x):
        launch(
            sums_kernel, (cdiv(d, block_c), partials.shape[0], 1), (x, copy, partials), (rows, partials.shape[1]),
            (d, offset, SUMS_UNROLL, block_r, block_c), num_warps=WARPS,
        )  # fmt: skip
    return (copy,)


@replayed
def gelu_backward(dh: Tensor, u: Tensor, partials: Tensor | None, offset: int) -> tuple[()]:
    """Overwrite dh (rows, d) with du; write the partials of its sums as :func:`column_sums`, unless None is given."""
    rows, d = u.shape
    block_r, block_c = _tile(u)
    groups = programs(u, rows) if partials is None else partials.shape[0]
    with device_guard(u):
        launch(
            gelu_backward_kernel, (cdiv(d, block_c), groups, 1), (dh, u, partials),
            (rows, 0 if partials is None else partials.shape[1]), (d, offset, GELU_UNROLL, block_r, block_c),
            num_warps=WARPS,
        )  # fmt: skip
    return ()


@replayed
def total(partials: Tensor) -> Tensor:
    """Return the sums over the rows of `partials`."""
    width = partials.shape[1]
    out = torch.empty(width, dtype=torch.float32, device=partials.device)
    with device_guard(partials):
        add_partials(partials, out, math.gcd(width, 16))
    return out


def residual_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the shape of x and the wider dtype, for contiguous tensors of as many elements."""
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    unit = math.gcd(16, x.numel())
    with device_guard(x):
        launch(
            residual_kernel, (cdiv(x.numel(), RESIDUAL_BLOCK), 1, 1), (x, y, out), (x.numel() // unit,),
            (unit, RESIDUAL_BLOCK), num_warps=4,
        )  # fmt: skip
    return out
