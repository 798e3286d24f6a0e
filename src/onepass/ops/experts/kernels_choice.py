"""Triton kernels of the router: logits to experts, weights and counts in one launch, and their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, next_power_of_2, replayed

from .kernels_rows import INTS, run

TILE, WARPS = 512, 2  # logits of a tile, and its warps
# least sum to divide by, as in other libraries: chosen scores that are all 0 give weights of 0
LEAST = tl.constexpr(1e-20)
LOWEST = tl.constexpr(-(1 << 62))


@triton.jit
def high_and_low(x):
    """Return x as two bf16 numbers, whose sum has 16 bits of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["size"])
def parts_kernel(
    w_ptr,  # (size,) any float dtype, contiguous
    out_ptr,  # (3, size) bf16: three parts whose sum is w, or of two parts (high, high, low)
    size, THREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    high, low = high_and_low(w)
    tl.store(out_ptr + at, high, mask=at < size)
    if THREE:
        tl.store(out_ptr + size + at, low, mask=at < size)
        low = (w - high.to(tl.float32) - low.to(tl.float32)).to(tl.bfloat16)
    else:
        tl.store(out_ptr + size + at, high, mask=at < size)
    tl.store(out_ptr + 2 * size + at, low, mask=at < size)


@replayed
def parts(weight: Tensor, n: int) -> Tensor:
    """Return 16-bit parts (3·E, dim) of a weight (E, dim): three that add up to it, or for n = 2 high, high and low."""
    out = torch.empty((3 * weight.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=weight.device)
    run(parts_kernel, cdiv(weight.numel(), 1024), (weight.contiguous(), out), (weight.numel(),), n == 3, 1024)
    return out


@triton.jit
def router_scores(z, inside, SOFTMAX: tl.constexpr):
    """Return sigmoid or softmax of a tile of logits; 0 outside."""
    if SOFTMAX:
        z = tl.where(inside, z, -float("inf"))
        top = tl.max(z, 1, keep_dims=True)
        s = tl.exp2((z - tl.where(top == -float("inf"), 0.0, top)) * 1.4426950408889634)
        s = tl.where(inside, s / tl.maximum(tl.sum(s, 1, keep_dims=True), LEAST), 0.0)
    else:
        s = tl.where(inside, 1.0 / (1.0 + tl.exp2(z * -1.4426950408889634)), 0.0)
    return s


@triton.jit(do_not_specialize=INTS)
def choose_kernel(
    part_ptr,  # (n, PARTS·n_experts) fp32: parts of the logits, to be added up
    bias_ptr,  # (n_experts,) fp32, or None
    mask_ptr,  # (n,) uint8, or None
    logit_ptr,  # (n, n_experts) fp32: their sum; None where there is one part
    weight_ptr,  # (n, K) fp32
    index_ptr,  # (n, K) int64
    count_ptr,  # (n_experts,) int32, zeros: how many tokens chose an expert
    n, n_experts, PARTS: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    cols, choices = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (t < n) & (cols < n_experts)
    z = tl.load(part_ptr + t * (PARTS * n_experts) + cols, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        z += tl.load(part_ptr + t * (PARTS * n_experts) + part * n_experts + cols, mask=inside, other=0.0)
    if logit_ptr is not None:
        tl.store(logit_ptr + t * n_experts + cols, z, mask=inside)
    s = router_scores(z, inside, SOFTMAX)
    real = t < n
    if mask_ptr is not None:
        real = real & (tl.load(mask_ptr + t, mask=real, other=0) != 0)
    v = s
    if bias_ptr is not None:
        v += tl.load(bias_ptr + cols, mask=cols < n_experts, other=0.0)
    # integers in the order of the scores, NaN above all; the column below them, so that the lowest index wins ties
    bits = tl.where(v != v, float("inf"), v + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 65536 + (BLOCK_C - 1 - cols)
    key = tl.where(cols < n_experts, key, LOWEST)
    index = tl.zeros((BLOCK_R, BLOCK_K), tl.int32)
    for j in tl.static_range(K):
        best = tl.max(key, 1, keep_dims=True)
        index = tl.where(choices == j, BLOCK_C - 1 - (best & 65535).to(tl.int32), index)
        key = tl.where(key == best, LOWEST, key)
    weight = tl.where(choices < K, tl.gather(s, index, 1), 0.0)
    if NORM:
        weight = weight / tl.maximum(tl.sum(weight, 1, keep_dims=True), LEAST)
    at, written = t * K + choices, (t < n) & (choices < K)
    tl.store(index_ptr + at, tl.where(real, index, -1).to(tl.int64), mask=written)
    tl.store(weight_ptr + at, tl.where(real, weight, 0.0), mask=written)
    counts = tl.sum((real & inside & (key == LOWEST)).to(tl.int32), 0)[None, :]
    tl.atomic_add(count_ptr + cols, counts, mask=(cols < n_experts) & (counts > 0))


@triton.jit(do_not_specialize=INTS)
def choose_backward_kernel(
    logit_ptr,  # (n, n_experts) fp32
    index_ptr,  # (n, K) int64
    weight_ptr,  # (n, K) fp32
    d_weight_ptr,  # (n, K) fp32; None: no gradient comes this way
    more_ptr,  # (n, n_experts) fp32, added to the gradient; None: nothing is
    out_ptr,  # (n, n_experts) fp32, or (n, 3·n_experts) bf16: high, low and high part
    n, n_experts, K: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    cols = tl.arange(0, BLOCK_C)[None, :]
    inside = (t < n) & (cols < n_experts)
    d = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    if d_weight_ptr is not None:
        s = router_scores(tl.load(logit_ptr + t * n_experts + cols, mask=inside, other=0.0), inside, SOFTMAX)
        dot = tl.zeros((BLOCK_R, 1), tl.float32)
        hot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for j in range(K):
            is_choice = cols == tl.load(index_ptr + t * K + j, mask=t < n, other=-1)
            up = tl.load(d_weight_ptr + t * K + j, mask=t < n, other=0.0)
            d = tl.where(is_choice, up, d)
            hot = tl.where(is_choice, 1.0, hot)
            dot += up * tl.load(weight_ptr + t * K + j, mask=t < n, other=0.0)
        if NORM:
            d = hot * (d - dot) / tl.maximum(tl.sum(hot * s, 1, keep_dims=True), LEAST)
        d = s * (d - tl.sum(d * s, 1, keep_dims=True)) if SOFTMAX else d * s * (1.0 - s)
    if more_ptr is not None:
        d += tl.load(more_ptr + t * n_experts + cols, mask=inside, other=0.0)
    if IN_PARTS:
        at = t * (3 * n_experts) + cols
        high, low = high_and_low(d)
        tl.store(out_ptr + at, high, mask=inside)
        tl.store(out_ptr + at + n_experts, low, mask=inside)
        tl.store(out_ptr + at + 2 * n_experts, high, mask=inside)
    else:
        tl.store(out_ptr + t * n_experts + cols, d, mask=inside)


def _tile(n_experts: int) -> tuple[int, int]:
    block_c = next_power_of_2(n_experts)
    return max(1, min(32, TILE // block_c)), block_c


@replayed
def choose(
    parts: Tensor, bias: Tensor | None, mask: Tensor | None, n_experts: int, k: int, softmax: bool, norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights (T, k), logits (T, E), indices (T, k) and counts (E,) of parts of logits; mask (T,) is uint8."""
    n, n_parts = parts.shape[0], parts.shape[1] // n_experts
    weights = torch.empty((n, k), dtype=torch.float32, device=parts.device)
    indices = torch.empty((n, k), dtype=torch.int64, device=parts.device)
    counts = torch.zeros(n_experts, dtype=torch.int32, device=parts.device)
    logits = torch.empty((n, n_experts), dtype=torch.float32, device=parts.device) if n_parts > 1 else None
    tensors, (block_r, block_c) = (parts, bias, mask, logits, weights, indices, counts), _tile(n_experts)
    constants = (n_parts, k, softmax, norm, block_r, block_c, next_power_of_2(k))
    run(choose_kernel, cdiv(n, block_r), tensors, (n, n_experts), *constants, warps=WARPS)
    return weights, parts if logits is None else logits, indices, counts


@replayed
def choose_backward(
    logits: Tensor, indices: Tensor, weights: Tensor, d_weights: Tensor | None, more: Tensor | None, softmax: bool,
    norm: bool, in_parts: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits, `more` added: fp32, or its bf16 parts (T, 3·E) high, low, high."""
    n, experts = logits.shape
    shape, dtype = ((n, 3 * experts), torch.bfloat16) if in_parts else ((n, experts), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=logits.device)
    tensors, (block_r, block_c) = (logits, indices, weights, d_weights, more, out), _tile(experts)
    constants = (indices.shape[1], softmax, norm, in_parts, block_r, block_c)
    run(choose_backward_kernel, cdiv(n, block_r), tensors, (n, experts), *constants, warps=WARPS)
    return out
