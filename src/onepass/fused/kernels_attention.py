"""Triton kernels of routed attention between its products: gates on values, and places of keys chosen per window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, replayed
from onepass.ops._shared.kernels_tokens import WARPS, tile

INTS = ["v_stride", "dv_stride", "total", "per_window", "windows", "window", "n_places", "n_queries"]
BLOCK = 256


@triton.jit(do_not_specialize=INTS)
def gate_kernel(
    v_ptr,  # (total, D), unit column stride
    g_ptr,  # (total,), contiguous
    out_ptr,  # (total, D), contiguous
    v_stride,  # in units of VEC elements
    total,
    D: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Multiply each row by its gate, in fp32, and round once."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    gate = tl.load(g_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = inside[:, None] & (cols < D)
        v = tl.load(v_ptr + (rows * v_stride * VEC)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + (rows * D)[:, None] + cols, (v * gate).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=INTS)
def gate_backward_kernel(
    dv_ptr,  # (total, D), unit column stride: gradient of the gated rows; overwritten with that of the rows
    v_ptr,  # (total, D), unit column stride
    g_ptr,  # (total,), contiguous
    dg_ptr,  # (total,), contiguous
    dv_stride,  # in units of VEC elements
    v_stride,
    total,
    D: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    gate = tl.load(g_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = inside[:, None] & (cols < D)
        at = dv_ptr + (rows * dv_stride * VEC)[:, None] + cols
        dv = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        dot += dv * tl.load(v_ptr + (rows * v_stride * VEC)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (dv * gate).to(dv_ptr.dtype.element_ty), mask=mask)
    tl.store(dg_ptr + rows, tl.sum(dot, 1).to(dg_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=INTS)
def place_kernel(
    within_ptr,  # (batch·windows, per_window) int64: places in windows, or −1
    query_ptr,  # (batch, queries) int64: places in the sequence, or −1
    at_ptr,  # (batch, windows·per_window) int64
    seen_ptr,  # (2, batch, queries) int32: the first and the last + 1 of the keys that each query sees
    per_window,
    windows,
    window,
    n_places,
    n_queries,
    BLOCK: tl.constexpr,
):
    """Compute places in the sequence, and how many keys lie in the windows before each query's; missing ones: all."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = tl.load(within_ptr + i, mask=i < n_places, other=-1)
    at = tl.where(within >= 0, within + (i // per_window) % windows * window, -1)
    tl.store(at_ptr + i, at, mask=i < n_places)
    query = tl.load(query_ptr + i, mask=i < n_queries, other=-1)
    last = tl.where(query >= 0, query // window, windows) * per_window
    tl.store(seen_ptr + i, tl.zeros_like(i).to(tl.int32), mask=i < n_queries)
    tl.store(seen_ptr + n_queries + i, last.to(tl.int32), mask=i < n_queries)


def _rows(v: Tensor) -> tuple[int, int, int]:
    """Return (stride, vector width, columns) of v (batch, m, heads, width) as rows of heads·width."""
    return v.stride(1), 8 if v.stride(1) % 8 == 0 else 1, v.shape[2] * v.shape[3]


@replayed
def gate(v: Tensor, gates: Tensor) -> Tensor:
    """Return gates·v for v (batch, m, heads, width) of one projection, and gates (batch, m), contiguous."""
    stride, vec, d = _rows(v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_r, block_c = tile(d)
    with device_guard(v):
        launch(
            gate_kernel, (cdiv(gates.numel(), block_r), 1, 1), (v, gates, out), (stride // vec, gates.numel()),
            (d, vec, block_r, block_c), num_warps=WARPS,
        )  # fmt: skip
    return out


@replayed
def gate_backward(dv: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Return the gradient of the gates; overwrite dv, the gradient of `gate`, with that of v."""
    (dv_stride, dv_vec, d), (v_stride, v_vec, _) = _rows(dv), _rows(v)
    vec = min(dv_vec, v_vec)
    d_gates = torch.empty_like(gates)
    block_r, block_c = tile(d)
    with device_guard(v):
        launch(
            gate_backward_kernel, (cdiv(gates.numel(), block_r), 1, 1), (dv, v, gates, d_gates),
            (dv_stride // vec, v_stride // vec, gates.numel()), (d, vec, block_r, block_c), num_warps=WARPS,
        )  # fmt: skip
    return d_gates


@replayed
def place(within: Tensor, at_q: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the keys' places (batch, windows·quota) and which of them each query sees (2, batch, queries)."""
    batch, per_window = at_q.shape[0], within.shape[1]
    windows = within.shape[0] // batch
    at = torch.empty((batch, windows * per_window), dtype=torch.int64, device=within.device)
    seen = torch.empty((2, *at_q.shape), dtype=torch.int32, device=within.device)
    with device_guard(within):
        launch(
            place_kernel, (cdiv(max(at.numel(), at_q.numel()), BLOCK), 1, 1), (within, at_q, at, seen),
            (per_window, windows, window, at.numel(), at_q.numel()), (BLOCK,), num_warps=4,
        )  # fmt: skip
    return at, seen
