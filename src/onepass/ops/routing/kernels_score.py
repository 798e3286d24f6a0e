"""Triton kernels of `score` and their launchers: one read of x serves the dot products and the length."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import aligned, cdiv, even_rows, launch, replayed, sm_count
from onepass.ops._shared.kernels_partials import add_partials
from onepass.ops._shared.kernels_tokens import least_padding, strided

INTS = ["x_batch_stride", "x_row_stride", "n", "total", "groups"]

# a thread adds up the columns of one load at once, so an accumulator takes one register per row and sum
FORWARD_WARPS = 4
BACKWARD_WARPS = 8
# warps per multiprocessor that the backward kernel fills
RESIDENT_WARPS = 24


@triton.jit(do_not_specialize=INTS)
def forward_kernel(
    x_ptr,  # (batch, n, D), unit column stride
    v_ptr,  # (R, D), contiguous
    s_ptr,  # (batch, R, n) fp32, contiguous
    inverse_ptr,  # (batch, n) fp32: 1/rms
    x_batch_stride,  # in units of VEC elements
    x_row_stride,
    n,
    total,  # batch·n
    eps,
    D: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    VECTOR: tl.constexpr,  # adjacent columns that one thread loads at once
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    batch, token = rows // n, rows % n
    x_rows = x_ptr + ((batch * x_batch_stride + token * x_row_stride) * VEC)[:, None]
    square = tl.zeros((BLOCK_R, BLOCK_C // VECTOR), tl.float32)
    dots = (square,) * R
    for start in range(0, D, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        x = tl.load(x_rows + cols[None, :], mask=inside[:, None] & (cols < D)[None, :], other=0.0).to(tl.float32)
        square += tl.sum(tl.reshape(x * x, (BLOCK_R, BLOCK_C // VECTOR, VECTOR)), 2)
        sums = ()
        for r in tl.static_range(R):
            v = tl.load(v_ptr + r * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            sums = sums + (dots[r] + tl.sum(tl.reshape(x * v[None, :], (BLOCK_R, BLOCK_C // VECTOR, VECTOR)), 2),)
        dots = sums
    inverse = tl.rsqrt(tl.sum(square, 1) / D + eps)
    tl.store(inverse_ptr + rows, inverse, mask=inside)
    for r in tl.static_range(R):
        tl.store(s_ptr + (batch * R + r) * n + token, tl.sum(dots[r], 1) * inverse, mask=inside)


@triton.jit(do_not_specialize=INTS)
def backward_kernel(
    ds_ptr,  # (batch, R, n), contiguous
    x_ptr,  # (batch, n, D), unit column stride
    v_ptr,  # (R, D), contiguous
    s_ptr,  # (batch, R, n) fp32
    inverse_ptr,  # (batch, n) fp32
    dx_ptr,  # (batch, n, D), contiguous; None: not needed
    dv_ptr,  # (groups, R, D) fp32, contiguous: partials; None: not needed
    x_batch_stride,  # in units of VEC elements
    x_row_stride,
    n,
    total,  # batch·n
    D: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program takes one tile of columns and every G-th tile of UNROLL·BLOCK_R rows; v and dv stay in registers.

    Forward's scores and 1/rms replace all sums over a row: dx = Σ ds·v/rms − (Σ ds·s)·x/(d·rms²).
    """
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_cols = cols < D
    vs = ()
    for r in tl.static_range(R):
        vs = vs + (tl.load(v_ptr + r * D + cols, mask=in_cols, other=0.0).to(tl.float32),)
    dvs = (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),) * R
    for tile in tl.range(group, tl.cdiv(total, UNROLL * BLOCK_R), tl.num_programs(1)):
        first_rows = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        # load the whole tile before the first store, because the compiler can't move a load across a store
        xs = ()
        along_vs = ()
        along_xs = ()
        for u in tl.static_range(UNROLL):
            rows = first_rows + u * BLOCK_R
            inside = rows < total
            batch, token = rows // n, rows % n
            inverse = tl.load(inverse_ptr + rows, mask=inside, other=0.0)
            along_x = tl.zeros((BLOCK_R,), tl.float32)
            live = rows < 0
            for r in tl.static_range(R):
                place = (batch * R + r) * n + token
                ds = tl.load(ds_ptr + place, mask=inside, other=0.0).to(tl.float32)
                has_gradient = ds != 0.0
                live = live | has_gradient
                along_x += tl.where(has_gradient, ds * tl.load(s_ptr + place, mask=inside, other=0.0), 0.0)
                along_vs = along_vs + (tl.where(has_gradient, ds * inverse, 0.0)[:, None],)
            x_rows = x_ptr + ((batch * x_batch_stride + token * x_row_stride) * VEC)[:, None]
            # a token whose scores have no gradient is not read, so that its NaN can't spread
            xs = xs + (tl.load(x_rows + cols[None, :], mask=live[:, None] & in_cols[None, :], other=0.0),)
            along_xs = along_xs + (tl.where(live, along_x * inverse * inverse / D, 0.0)[:, None],)
        for u in tl.static_range(UNROLL):
            rows = first_rows + u * BLOCK_R
            x = xs[u].to(tl.float32)
            dx = -along_xs[u] * x
            new_dvs = ()
            for r in tl.static_range(R):
                dx += along_vs[u * R + r] * vs[r][None, :]
                new_dvs = new_dvs + (dvs[r] + along_vs[u * R + r] * x,)
            dvs = new_dvs
            if dx_ptr is not None:
                mask = (rows < total)[:, None] & in_cols[None, :]
                tl.store(dx_ptr + (rows * D)[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dv_ptr is not None:
        for r in tl.static_range(R):
            tl.store(dv_ptr + (group * R + r) * D + cols, tl.sum(dvs[r], 0), mask=in_cols)


@replayed
def score_forward(x: Tensor, vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return scores (batch, R, n) and 1/rms (batch, n) for x (batch, n, d) and vectors (R, d), contiguous."""
    x, vectors = even_rows(strided(x)[0], 8), aligned(vectors)
    (batch, n, d), (batch_stride, row_stride) = x.shape, x.stride()[:2]
    routes, total = len(vectors), batch * n
    scores = torch.empty((batch, routes, n), dtype=torch.float32, device=x.device)
    inverse = torch.empty((batch, n), dtype=torch.float32, device=x.device)
    vec = math.gcd(8, d)
    vector = min(vec, 16 // x.element_size())
    block_c = least_padding(d, vector)
    # two loads per thread; each further vector costs a reduction, which is cheaper for more rows at a time
    loads = 4 if routes > 1 and x.element_size() == 2 else 2
    # the number of rows is not used, so that a token's score does not depend on the other tokens
    block_r = max(1, loads * FORWARD_WARPS * 32 * vector // block_c)
    # no fused multiply-add: the compiler fuses differently for two rows of one thread, so that a score's bits would
    # depend on the token's place
    launch(
        forward_kernel, (cdiv(total, block_r), 1, 1), (x, vectors, scores, inverse),
        (batch_stride // vec, row_stride // vec, n, total, float(eps)),
        (d, vec, routes, min(vector, block_c), block_r, block_c), num_warps=FORWARD_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return scores, inverse


def score_backward(
    ds: Tensor, x: Tensor, vectors: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and the gradient of the vectors for ds (batch, R, n), contiguous; None where not needed."""
    x, vectors = even_rows(strided(x)[0], 8), aligned(vectors)
    (batch, n, d), (batch_stride, row_stride) = x.shape, x.stride()[:2]
    routes, total = len(vectors), batch * n
    dx = torch.empty((batch, n, d), dtype=x.dtype, device=x.device) if need_x else None
    vec = math.gcd(8, batch_stride, row_stride)
    block_c = least_padding(d, min(vec, (16 if routes <= 4 else 8) // x.element_size()))
    unroll = 4 if routes <= 2 else 2 if routes <= 4 and x.element_size() == 2 else 1
    block_r = max(1, BACKWARD_WARPS * 32 * min(vec, 16 // x.element_size()) // block_c // (1 if routes <= 4 else 4))
    tiles, columns = cdiv(total, unroll * block_r), cdiv(d, block_c)
    groups = max(1, min(tiles, sm_count(x) * RESIDENT_WARPS // BACKWARD_WARPS // columns))
    partials = dw = None
    if need_w:
        partials = torch.empty((groups, routes, d), dtype=torch.float32, device=x.device)
        dw = torch.empty_like(vectors)
    launch(
        backward_kernel, (columns, groups, 1), (ds, x, vectors, scores, inverse, dx, partials),
        (batch_stride // vec, row_stride // vec, n, total), (d, vec, routes, unroll, block_r, block_c),
        num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    if partials is not None and dw is not None:
        add_partials(partials.view(groups, -1), dw, math.gcd(dw.numel(), 16))
    return dx, dw
