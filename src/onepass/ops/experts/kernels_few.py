"""Triton kernels for few tokens without gradients, as in decoding: three launches that read the chosen experts alone.

Many programs share a matrix, one tile each, so that little work keeps the memory busy; so sums come in parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2, replayed
from onepass.ops._shared.kernels_partials import add_vector_partials

from .kernels_rows import INTS, activation_parts, load_experts

# most choices for these kernels. Each choice reads its expert again: with more choices than experts, or beyond 64 MB,
# the kernels of many tokens are as fast
MOST, MOST_BYTES = 128, 1 << 26
# terms of a tile's sums, and bytes of its rows. Neighbouring programs read neighbouring columns of the same rows
DEEP, ROW_BYTES = 256, 128


@triton.jit
def load_tile(ptr, e, expert_stride, rows, row_stride, cols, ROWS: tl.constexpr, COLS: tl.constexpr, VEC: tl.constexpr):
    """Load a tile of expert e's matrix; strides are in units of VEC elements: every row's alignment can be proved."""
    mask = (rows < tl.where(e >= 0, ROWS, 0))[:, None] & (cols < COLS)[None, :]
    at = ptr + e * expert_stride * VEC + (rows * row_stride * VEC)[:, None] + cols[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=INTS)
def hidden_kernel(
    x_ptr,  # (tokens, D), contiguous
    id_ptr,  # (n,) int32 or int64, n = tokens·K
    up_ptr,  # (n_experts, D, H), unit column stride; other strides as `load_tile` has them
    part_ptr,  # (parts of D, n, H) fp32
    n, n_experts, expert_stride, row_stride, K: tl.constexpr, D: tl.constexpr, H: tl.constexpr, VEC: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write x[p // K] · up[e] over some of the columns of x."""
    p, part = tl.program_id(2), tl.program_id(1)
    d, h = part * DEEP + tl.arange(0, DEEP), tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    e = load_experts(id_ptr, p, n, n_experts).to(tl.int64)
    up = load_tile(up_ptr, e, expert_stride, d, row_stride, h, D, H, VEC)
    x = tl.load(x_ptr + (p // K) * D + d, mask=d < D, other=0.0).to(tl.float32)[:, None]
    tl.store(part_ptr + (part * n + p) * H + h, tl.sum(x * up, 0), mask=h < H)


@triton.jit(do_not_specialize=INTS)
def out_kernel(
    part_ptr,  # of `hidden_kernel`
    id_ptr,  # (n,) int32 or int64
    weight_ptr,  # (n,)
    down_ptr,  # (n_experts, H, D), unit column stride
    out_ptr,  # (n, parts of H, D) fp32
    n, n_experts, expert_stride, row_stride,
    n_parts,  # of D
    GATED: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two ≥ n_parts
    VEC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write weight · act(hidden) · down[e] over some of the hidden units; 0 for a choice of no expert."""
    p, part_h = tl.program_id(2), tl.program_id(1)
    h, d = part_h * DEEP + tl.arange(0, DEEP), tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    e = load_experts(id_ptr, p, n, n_experts).to(tl.int64)
    # start these long loads first: they run while the others wait
    down = load_tile(down_ptr, e, expert_stride, h, row_stride, d, H, D, VEC)
    part = tl.arange(0, PARTS)[:, None]
    at, mask = part_ptr + (part * n + p) * (2 * H if GATED else H) + h[None, :], (part < n_parts) & (h < H)[None, :]
    # the activation takes what a product would have written
    dtype = down_ptr.dtype.element_ty
    a, _ = activation_parts(tl.sum(tl.load(at, mask=mask, other=0.0), 0).to(dtype).to(tl.float32), not GATED)
    if GATED:
        a *= tl.sum(tl.load(at + H, mask=mask, other=0.0), 0).to(dtype).to(tl.float32)
    a = tl.where(e >= 0, a * tl.load(weight_ptr + p).to(tl.float32), 0.0)  # without an expert even NaN does not count
    tl.store(out_ptr + (p * tl.num_programs(1) + part_h) * D + d, tl.sum(a[:, None] * down, 0), mask=d < D)


def takes(choices: int, up: Tensor, down: Tensor) -> bool:
    """Return whether these kernels are faster than grouped products for so many choices, and find a matrix's rows."""
    size = (up.shape[2] + down.shape[1]) * down.shape[2] * up.element_size()
    within = all(m.stride(2) == 1 and m.shape[1] * m.stride(1) < 2**31 for m in (up, down))
    return within and 0 < choices <= min(MOST, max(len(up), MOST_BYTES // max(1, size)))


@replayed
def few(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return y (T, d) of tokens x; all tensors contiguous but for the experts' and rows' strides of the matrices."""
    (tokens, k), (n_experts, hidden, dim), columns = ids.shape, down.shape, up.shape[2]
    n, parts_d, parts_h, wide = tokens * k, cdiv(dim, DEEP), cdiv(hidden, DEEP), ROW_BYTES // up.element_size()
    y = torch.empty_like(x)
    parts = torch.empty((parts_d, n, columns), dtype=torch.float32, device=x.device)
    outs = torch.empty((n, parts_h, dim), dtype=torch.float32, device=x.device)
    strides = (*up.stride()[:2], *down.stride()[:2])
    vec = 1 if any(s % 8 for s in strides) else 8
    strides = [s // vec for s in strides]
    launch(
        hidden_kernel, (cdiv(columns, wide), parts_d, n), (x, ids, up, parts), (n, n_experts, *strides[:2]),
        (k, dim, columns, vec, DEEP, wide), num_warps=4,
    )  # fmt: skip
    launch(
        out_kernel, (cdiv(dim, wide), parts_h, n), (parts, ids, weights, down, outs),
        (n, n_experts, *strides[2:], parts_d),
        (columns > hidden, dim, hidden, next_power_of_2(parts_d), vec, DEEP, wide), num_warps=4,
    )  # fmt: skip
    add_vector_partials(outs[None], y, None, k * parts_h, tokens)
    return y
