"""Triton kernels for few tokens without gradients, as in decoding: two launches that read the chosen experts alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, replayed

from .kernels_rows import activation_parts, load_experts

INTS = ["n", "n_experts", "expert_stride", "row_stride", "gate_expert_stride", "gate_row_stride"]
# choices up to which these kernels run: beyond, experts are shared by tokens, and each token reads its own again here
MOST = 64


@triton.jit(do_not_specialize=INTS)
def hidden_kernel(
    x_ptr,  # (tokens, D), contiguous
    id_ptr,  # (n,) int32 or int64, n = tokens·K
    weight_ptr,  # (n,)
    up_ptr,  # (n_experts, D, H), unit column stride
    gate_ptr,  # the same; None: GELU
    a_ptr,  # (n, H) fp32
    n,
    n_experts,
    expert_stride,
    row_stride,
    gate_expert_stride,
    gate_row_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """a[p] = weight[p] · act(x[p // K] · up[e]); 0 for a choice of no expert."""
    p = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = load_experts(id_ptr, p, n, n_experts).to(tl.int64)
    hidden, linear = tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H,), tl.float32)
    if e >= 0:
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            mask = (d < D)[:, None] & (h < H)[None, :]
            x = tl.load(x_ptr + (p // K) * D + d, mask=d < D, other=0.0).to(tl.float32)[:, None]
            up = tl.load(up_ptr + e * expert_stride + d[:, None] * row_stride + h[None, :], mask=mask, other=0.0)
            linear += tl.sum(x * up.to(tl.float32), 0)
            if gate_ptr is not None:
                at = e * gate_expert_stride + d[:, None] * gate_row_stride + h[None, :]
                hidden += tl.sum(x * tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32), 0)
    # the activation takes what a product would have written
    dtype = x_ptr.dtype.element_ty
    linear = linear.to(dtype).to(tl.float32)
    a, _ = activation_parts(linear if gate_ptr is None else hidden.to(dtype).to(tl.float32), gate_ptr is None)
    a = (a if gate_ptr is None else a * linear) * tl.load(weight_ptr + p).to(tl.float32)
    tl.store(a_ptr + p * H + h, a, mask=h < H)


@triton.jit(do_not_specialize=INTS)
def out_kernel(
    a_ptr,  # (n, H) fp32
    id_ptr,  # (n,) int32 or int64
    down_ptr,  # (n_experts, H, D), unit column stride
    y_ptr,  # (n // K, D), contiguous
    n,
    n_experts,
    expert_stride,
    row_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """y[t] = Σ_j a[t·K + j] · down[e]; one program for a token and some columns."""
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for j in range(K):
        e = load_experts(id_ptr, t * K + j, n, n_experts).to(tl.int64)
        if e >= 0:
            for first in range(0, H, BLOCK_H):
                h = first + tl.arange(0, BLOCK_H)
                a = tl.load(a_ptr + (t * K + j) * H + h, mask=h < H, other=0.0)[:, None]
                at = e * expert_stride + h[:, None] * row_stride + d[None, :]
                down = tl.load(down_ptr + at, mask=(h < H)[:, None] & (d < D)[None, :], other=0.0)
                total += tl.sum(a * down.to(tl.float32), 0)
    tl.store(y_ptr + t * D + d, total.to(y_ptr.dtype.element_ty), mask=d < D)


@replayed
def few(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
    """Return y (T, d) of tokens x; all tensors contiguous but for the experts' and rows' strides of the matrices."""
    (tokens, k), (n_experts, dim, hidden) = ids.shape, up.shape
    y = torch.empty_like(x)
    a = torch.empty((tokens * k, hidden), dtype=torch.float32, device=x.device)
    strides = up.stride()[:2], down.stride()[:2], (0, 0) if gate is None else gate.stride()[:2]
    sizes = (tokens * k, n_experts)
    with device_guard(x):
        launch(
            hidden_kernel, (tokens * k, cdiv(hidden, 32), 1), (x, ids, weights, up, gate, a),
            (*sizes, *strides[0], *strides[2]), (k, dim, hidden, 128, 32), num_warps=4,
        )  # fmt: skip
        launch(
            out_kernel, (tokens, cdiv(dim, 16), 1), (a, ids, down, y), (*sizes, *strides[1]), (k, dim, hidden, 16, 256),
            num_warps=4,
        )  # fmt: skip
    return y
