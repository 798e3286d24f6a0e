"""Triton kernels that move chosen rows, and their launchers.

An index that names no token (−1) reads zeros and adds nothing. The indices of one launch are unique within a sequence,
so no two programs write to one row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, replayed
from onepass.ops._shared.kernels_tokens import WARPS, named, strided, tile

INTS = ["x_batch_stride", "x_row_stride", "dy_batch_stride", "dy_row_stride", "n", "k", "routes", "route", "total"]


@triton.jit(do_not_specialize=INTS)
def gather_kernel(
    x_ptr,  # (batch, n, D), unit column stride
    index_ptr,  # (batch, k) int64
    y_ptr,  # (batch, k, D), contiguous
    x_batch_stride,  # in units of VEC elements, so that Triton can prove the alignment of every row
    x_row_stride,
    n,
    k,
    total,  # batch·k
    D: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    index, present = named(index_ptr, rows, rows < total, n)
    x_rows = x_ptr + (((rows // k) * x_batch_stride + index * x_row_stride) * VEC)[:, None]
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        # evict_last for data read once: the writes then leave the L2 cache first, in an even stream
        x = tl.load(x_rows + cols, mask=present[:, None] & (cols < D), other=0.0, eviction_policy="evict_last")
        tl.store(y_ptr + (rows * D)[:, None] + cols, x, mask=(rows < total)[:, None] & (cols < D))


@triton.jit(do_not_specialize=INTS)
def add_kernel(
    y_ptr,  # (batch, n, D), contiguous: changed in place
    u_ptr,  # (batch, routes, k, D), contiguous
    g_ptr,  # (batch, routes, k), contiguous; None: 1
    index_ptr,  # (batch, routes, k) int64, contiguous
    shift_ptr,  # (D,), subtracted from u; None: nothing is
    n,
    k,
    routes,
    route,  # which route this launch adds
    total,  # batch·k
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    batch = rows // k
    at = (batch * routes + route) * k + rows % k
    index, present = named(index_ptr, at, rows < total, n)
    if g_ptr is not None:
        gate = tl.load(g_ptr + at, mask=present, other=0.0).to(tl.float32)
    y_rows = y_ptr + ((batch * n + index) * D)[:, None]
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = present[:, None] & (cols < D)
        u = tl.load(u_ptr + (at * D)[:, None] + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        y = tl.load(y_rows + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if shift_ptr is not None:
            u -= tl.load(shift_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        if g_ptr is not None:
            u *= gate[:, None]
        tl.store(y_rows + cols, (y + u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=INTS)
def add_backward_kernel(
    dy_ptr,  # (batch, n, D), unit column stride
    u_ptr,  # (batch, k, D), contiguous; read only for dg
    g_ptr,  # (batch, k), contiguous; None: 1
    index_ptr,  # (batch, k) int64, contiguous; k counts all routes
    shift_ptr,  # (D,), subtracted from u; None: nothing is
    du_ptr,  # (batch, k, D), contiguous; None: not needed
    dg_ptr,  # (batch, k), contiguous; None: not needed
    dy_batch_stride,  # in units of VEC elements
    dy_row_stride,
    n,
    k,
    total,  # batch·k
    D: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute both gradients from one read of the chosen rows of dy."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    index, present = named(index_ptr, rows, inside, n)
    if g_ptr is not None:
        gate = tl.load(g_ptr + rows, mask=present, other=0.0).to(tl.float32)
    dy_rows = dy_ptr + (((rows // k) * dy_batch_stride + index * dy_row_stride) * VEC)[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = present[:, None] & (cols < D)
        offsets = (rows * D)[:, None] + cols
        dy = tl.load(dy_rows + cols, mask=mask, other=0.0).to(tl.float32)
        if dg_ptr is not None:
            u = tl.load(u_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if shift_ptr is not None:
                u -= tl.load(shift_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            dot += dy * u
        if du_ptr is not None:
            if g_ptr is not None:
                dy *= gate[:, None]
            tl.store(du_ptr + offsets, dy.to(du_ptr.dtype.element_ty), mask=inside[:, None] & (cols < D))
    if dg_ptr is not None:
        tl.store(dg_ptr + rows, tl.sum(dot, 1).to(dg_ptr.dtype.element_ty), mask=inside)


@replayed
def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows (…, d) of x (batch, n, d) at indices (batch, …), contiguous."""
    x, batch_stride, row_stride = strided(x)
    (batch, n, d), total = x.shape, indices.numel()
    y = torch.empty((*indices.shape, d), dtype=x.dtype, device=x.device)
    vec = math.gcd(8, batch_stride, row_stride)
    block_r, block_c = tile(d)
    launch(
        gather_kernel, (cdiv(total, block_r), 1, 1), (x, indices, y),
        (batch_stride // vec, row_stride // vec, n, total // batch, total), (d, vec, block_r, block_c),
        num_warps=WARPS,
    )  # fmt: skip
    return y


@replayed
def add_rows(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, shift: Tensor | None) -> tuple[()]:
    """Add gates·(update − shift) in place to y (batch·n, d), all contiguous; shapes as in `scatter_add`."""
    batch, k, d = len(indices), indices.shape[-1], y.shape[-1]
    routes, total = indices.numel() // (batch * k), batch * k
    block_r, block_c = tile(d)
    for route in range(routes):
        # one launch per route: a row that several routes chose gets their updates in order
        launch(
            add_kernel, (cdiv(total, block_r), 1, 1), (y, update, gates, indices, shift),
            (y.shape[0] // batch, k, routes, route, total), (d, block_r, block_c), num_warps=WARPS,
        )  # fmt: skip
    return ()


@replayed
def add_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, need_u: bool, need_g: bool, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return du and dg for dy (batch, n, d); update, gates and indices are contiguous, of any number of routes."""
    dy, batch_stride, row_stride = strided(dy)
    (batch, n, d), total = dy.shape, indices.numel()
    du = torch.empty_like(update) if need_u else None
    dg = torch.empty_like(gates) if need_g and gates is not None else None
    vec = math.gcd(8, batch_stride, row_stride)
    block_r, block_c = tile(d)
    launch(
        add_backward_kernel, (cdiv(total, block_r), 1, 1), (dy, update, gates, indices, shift, du, dg),
        (batch_stride // vec, row_stride // vec, n, total // batch, total), (d, vec, block_r, block_c),
        num_warps=WARPS,
    )  # fmt: skip
    return du, dg
