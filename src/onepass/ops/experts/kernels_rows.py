"""torch's grouped products, Triton kernels around them and their launchers: order, spread, activation, gather-sum.

T tokens, K choices of a token, N = T·K rows in the order of their experts, E experts. Rows of choices of no expert
(−1) stand behind all others, from ends[E − 1] on, and no product reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2, replayed

# integers for whose values no kernel of this folder is compiled anew
INTS = ["n", "n_chunks", "n_experts", "n_parts", "row_stride", "expert_stride"]
TILE, CHUNK = 2048, 128  # elements of a tile, and choices of a chunk


@triton.jit
def load_experts(id_ptr, at, n, n_experts):
    """Load choices; one below 0 is no expert (−1), one beyond the last is the last. Outside: −2."""
    e = tl.load(id_ptr + at, mask=at < n, other=-2)
    return tl.where(at < n, tl.minimum(tl.maximum(e, -1), n_experts - 1), -2).to(tl.int32)


@triton.jit(do_not_specialize=INTS)
def count_kernel(
    id_ptr,  # (n,) int32 or int64
    count_ptr,  # (n_chunks, WIDTH) int32: how many choices of a chunk are an expert's
    n, n_experts, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    e = load_experts(id_ptr, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), n, n_experts)
    counts = tl.histogram(tl.maximum(e, 0), WIDTH, mask=e >= 0)
    tl.store(count_ptr + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), counts)


@triton.jit(do_not_specialize=INTS)
def scan_kernel(
    count_ptr,  # (n_chunks, WIDTH): overwritten with the counts of earlier chunks
    total_ptr,  # (WIDTH,) int32
    n_chunks, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = count_ptr + tl.program_id(0)
    total = 0
    for first in range(0, n_chunks, STEP):
        chunk = first + tl.arange(0, STEP)
        counts = tl.load(column + chunk * WIDTH, mask=chunk < n_chunks, other=0)
        tl.store(column + chunk * WIDTH, total + tl.cumsum(counts, 0) - counts, mask=chunk < n_chunks)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=INTS)
def place_kernel(
    id_ptr,  # (n,) int32 or int64
    count_ptr,  # (n_chunks, WIDTH) of `scan_kernel`
    total_ptr,  # (WIDTH,)
    place_ptr,  # (n,) int32: a choice's row
    row_ptr,  # (n,) int32: a row's choice
    end_ptr,  # (n_experts,) int32
    n, n_experts, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first, wide = tl.program_id(0) * CHUNK, tl.arange(0, WIDTH)
    at = first + tl.arange(0, CHUNK)
    e = load_experts(id_ptr, at, n, n_experts)
    before, total = tl.load(count_ptr + tl.program_id(0) * WIDTH + wide), tl.load(total_ptr + wide)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(end_ptr + wide, ends, mask=wide < n_experts)
    # which earlier choices of the chunk have the same expert
    same = (e[:, None] == e[None, :]) & (at[:, None] > at[None, :])
    start = tl.gather(before + ends - total, tl.maximum(e, 0), 0)
    # the rows of no expert follow all others, in the same order
    none = tl.sum(total, 0) + first - tl.sum(before, 0)
    place = tl.sum(same.to(tl.int32), 1) + tl.where(e < 0, none, start)
    tl.store(place_ptr + at, place, mask=at < n)
    tl.store(row_ptr + place, at, mask=at < n)


def run(kernel: Any, programs: int, tensors: Any, numbers: tuple[int, ...], *constants: Any, warps: int = 4) -> None:
    """Launch `programs` programs of a kernel."""
    launch(kernel, (programs, 1, 1), tensors, numbers, constants, num_warps=warps)


@replayed
def order(ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return places (T, K), rows (N,) and ends (E,) of choices (T, K), contiguous."""
    n, width = ids.numel(), next_power_of_2(n_experts)
    chunks = cdiv(n, CHUNK)
    if chunks * max(CHUNK, width) >= 2**31:
        raise ValueError(f"experts: {n} choices of {n_experts} experts are too many for one call; pass fewer tokens")
    shapes = (chunks, width), (width,), ids.shape, (n,), (n_experts,)
    counts, totals, places, rows, ends = (torch.empty(s, dtype=torch.int32, device=ids.device) for s in shapes)
    run(count_kernel, chunks, (ids, counts), (n, n_experts), CHUNK, width)
    run(scan_kernel, width, (counts, totals), (chunks,), min(1024, next_power_of_2(chunks)), width)
    run(place_kernel, chunks, (ids, counts, totals, places, rows, ends), (n, n_experts), CHUNK, width)
    return places, rows, ends


@triton.jit(do_not_specialize=INTS)
def spread_kernel(
    x_ptr,  # (n, D), unit column stride
    place_ptr,  # (n, K) int32
    out_ptr,  # (n·K, D), contiguous
    row_stride,  # in units of VEC elements, so that Triton can prove the alignment of every row
    n, K: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy each token to its K rows: x is read once."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = (t < n)[:, None] & (cols < D)
        x = tl.load(x_ptr + (t * row_stride * VEC)[:, None] + cols, mask=mask, other=0.0)
        for j in tl.static_range(K):
            row = tl.load(place_ptr + t * K + j, mask=t < n, other=0).to(tl.int64)
            tl.store(out_ptr + (row * D)[:, None] + cols, x, mask=mask)


@triton.jit(do_not_specialize=INTS)
def gather_sum_kernel(
    row_ptr,  # (n·K, D), contiguous
    place_ptr,  # (n, K) int32
    end_ptr,  # (n_experts,) int32
    y_ptr,  # (n, D), contiguous
    n, n_experts, K: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add up the K rows of each token in fp32, in their order."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = tl.load(end_ptr + n_experts - 1)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for j in tl.static_range(K):
            row = tl.load(place_ptr + t * K + j, mask=t < n, other=0).to(tl.int64)
            mask = ((t < n) & (row < real))[:, None] & (cols < D)
            total += tl.load(row_ptr + (row * D)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (t * D)[:, None] + cols, y, mask=(t < n)[:, None] & (cols < D))


def _tile(d: int) -> tuple[int, int]:
    """Return rows and columns of a tile: columns that divide d where they can, so that no lane is idle."""
    even = d & -d
    block_c = min(TILE, even if even >= 128 else next_power_of_2(d))
    return max(1, TILE // block_c), block_c


@replayed
def spread(x: Tensor, places: Tensor) -> Tensor:
    """Return the rows (N, d) of tokens x (T, d), in the order of their experts."""
    (n, k), d = places.shape, x.shape[1]
    x = x if d <= 1 or x.stride(1) == 1 else x.contiguous()
    out = torch.empty((n * k, d), dtype=x.dtype, device=x.device)
    block_r, block_c = _tile(d)
    vec = 8 if x.stride(0) % 8 == 0 else 1
    run(spread_kernel, cdiv(n, block_r), (x, places, out), (x.stride(0) // vec, n), k, d, vec, block_r, block_c)
    return out


@replayed
def gather_sum(rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Return the sum (T, d) of each token's rows (N, d)."""
    (n, k), d = places.shape, rows.shape[1]
    y = torch.empty((n, d), dtype=rows.dtype, device=rows.device)
    block_r, block_c = _tile(d)
    run(gather_sum_kernel, cdiv(n, block_r), (rows, places, ends, y), (n, len(ends)), k, d, block_r, block_c)
    return y


@triton.jit
def activation_parts(h, GELU: tl.constexpr):
    """Return GELU (by tanh) or SiLU of h, and its derivative; both are h·sigmoid(v)."""
    v, slope = h, 1.0
    if GELU:
        v = h * (1.5957691216057308 + 0.07135481282796229 * h * h)
        slope = 1.5957691216057308 + 0.21406443848388687 * h * h
    s = 1.0 / (1.0 + tl.exp2(v * -1.4426950408889634))
    return h * s, s + h * s * (1.0 - s) * slope


@triton.jit(do_not_specialize=INTS)
def activate_kernel(
    h_ptr,  # (n, D) hidden units before the activation; GATED: (n, 2·D), the gate's and the linear part
    weight_ptr,  # (n,) weights of the choices
    row_ptr,  # (n,) int32
    end_ptr,  # (n_experts,) int32
    a_ptr,  # (n, D)
    n, n_experts, GATED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the hidden units, multiplied by the weight of the row."""
    p = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = p < tl.load(end_ptr + n_experts - 1)
    w = tl.load(weight_ptr + tl.load(row_ptr + p, mask=real, other=0), mask=real, other=0.0).to(tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask, at = real[:, None] & (cols < D), (p * D)[:, None] + cols
        h_at = h_ptr + ((p * D * 2)[:, None] + cols if GATED else at)
        a, _ = activation_parts(tl.load(h_at, mask=mask, other=0.0).to(tl.float32), not GATED)
        if GATED:
            a *= tl.load(h_at + D, mask=mask, other=0.0).to(tl.float32)
        tl.store(a_ptr + at, (a * w[:, None]).to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=INTS)
def activate_backward_kernel(
    d_ptr,  # (n, D) gradient of the weighted hidden units: overwritten with that of h, or if GATED with these units
    h_ptr,  # (n, D); GATED: (n, 2·D)
    weight_ptr,  # (n,)
    row_ptr,  # (n,) int32
    end_ptr,  # (n_experts,) int32
    out_ptr,  # like h, may be h: the weighted hidden units, or if GATED the gradient of h
    d_weight_ptr,  # (n,)
    n, n_experts, GATED: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = p < tl.load(end_ptr + n_experts - 1)
    row = tl.load(row_ptr + p, mask=p < n, other=0)
    w = tl.load(weight_ptr + row, mask=real, other=0.0).to(tl.float32)[:, None]
    dtype = d_ptr.dtype.element_ty
    dot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask, at = real[:, None] & (cols < D), (p * D)[:, None] + cols
        h_at = (p * D * 2)[:, None] + cols if GATED else at
        d = tl.load(d_ptr + at, mask=mask, other=0.0).to(tl.float32)
        a, slope = activation_parts(tl.load(h_ptr + h_at, mask=mask, other=0.0).to(tl.float32), not GATED)
        if GATED:
            linear = tl.load(h_ptr + h_at + D, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + h_at + D, (d * a * w).to(dtype), mask=mask)
            a, slope = a * linear, slope * linear
        dot += d * a
        units, dh = (a * w).to(dtype), (d * slope * w).to(dtype)
        tl.store(out_ptr + h_at, dh if GATED else units, mask=mask)
        tl.store(d_ptr + at, units if GATED else dh, mask=mask)
    # a choice of no expert has a gradient of 0
    tl.store(d_weight_ptr + row, tl.sum(dot, 1).to(d_weight_ptr.dtype.element_ty), mask=p < n)


@replayed
def activate(h: Tensor, weights: Tensor, rows: Tensor, ends: Tensor, width: int) -> Tensor:
    """Return weight·act(h) (N, width); weights (T, K) are contiguous."""
    a, (block_r, block_c) = torch.empty((len(h), width), dtype=h.dtype, device=h.device), _tile(width)
    tensors, numbers = (h, weights, rows, ends, a), (len(h), len(ends))
    run(activate_kernel, cdiv(len(h), block_r), tensors, numbers, h.shape[1] > width, width, block_r, block_c)
    return a


@replayed
def activate_backward(
    d: Tensor, h: Tensor, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the weighted hidden units and the gradient of the weights; d becomes the gradient of h.

    If h is twice as wide as d, its gradient and the units change places. With `spare` the first overwrites h.
    """
    width, out, d_weights = d.shape[1], None if spare else torch.empty_like(h), torch.empty_like(weights)
    block_r, block_c = _tile(width)
    tensors = (d, h, weights, rows, ends, h if out is None else out, d_weights)
    constants = h.shape[1] > width, width, block_r, block_c
    run(activate_backward_kernel, cdiv(len(h), block_r), tensors, (len(h), len(ends)), *constants)
    return out, d_weights


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[p] · b[expert of p]; rows of no expert are undefined."""
    return F.grouped_mm(a, b, offs=ends)


def weight_product(tokens: Tensor, hidden: Tensor, rows: Tensor, ends: Tensor, by_hidden: bool) -> Tensor:
    """Return tokensᵀ · hidden over each expert's rows, both by row (E, dim, hidden), or (E, hidden, dim)."""
    a, b = (hidden, tokens) if by_hidden else (tokens, hidden)
    return F.grouped_mm(a.t(), b, offs=ends)


def hidden(
    x: Tensor, up: Tensor, weights: Tensor, places: Tensor, rows: Tensor, ends: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return what the activation takes, and the weighted hidden units (N, width)."""
    h = product(spread(x, places), up, ends)
    return h, activate(h, weights, rows, ends, width)


def hidden_backward(
    dy: Tensor, down: Tensor, h: Tensor, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradient of h (None: h became it), the weighted hidden units and the gradient of the weights."""
    d = product(dy, down.mT, ends)
    out, d_weights = activate_backward(d, h, weights, rows, ends, spare)
    return (out, d, d_weights) if h.shape[1] > d.shape[1] else (d, h if out is None else out, d_weights)
