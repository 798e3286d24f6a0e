"""Triton kernels of an RMS norm that also scores its rows, or reads chosen rows only, and their launchers."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import aligned, cdiv, even_rows, launch, next_power_of_2, replayed, sm_count
from onepass.ops._shared.kernels_tokens import named, strided
from onepass.ops.routing.op import as_bytes

# a program keeps whole rows in registers between the sums and the result
MAX_COLS = 4096
INTS = ["x_batch_stride", "x_row_stride", "n", "m", "total", "stride", "n_explore", "partials_stride"]


@triton.jit
def token_of(index_ptr, mask_ptr, rows, total, n, m):
    """Return (sequence, token, whether to read it) for each row: a row is any token, or one of m chosen ones."""
    inside = rows < total
    if index_ptr is None:
        token = rows % m
        if mask_ptr is not None:
            inside = inside & (tl.load(mask_ptr + rows, mask=inside, other=0) != 0)
    else:
        token, inside = named(index_ptr, rows, inside, n)
    return rows // m, token, inside


@triton.jit(do_not_specialize=INTS)
def forward_kernel(
    x_ptr,  # (batch, n, D), unit column stride
    index_ptr,  # (batch, m) int64; None: all tokens, m = n
    mask_ptr,  # (batch, n) uint8; a token with 0 counts as zeros and is not read; None: read all, or index_ptr is given
    w_ptr,  # (D,) or None
    v_ptr,  # (R, D), contiguous; None where R = 0
    y_ptr,  # (batch, m, D), contiguous, of any dtype
    s_ptr,  # (R, batch, m) fp32; None where R = 0
    stats_ptr,  # (1 or 2, batch·m) fp32: 1/rms with eps, and with scores 1/rms with score_eps
    x_batch_stride,  # in units of VEC elements
    x_row_stride,
    n,
    m,
    total,  # batch·m
    eps,
    score_eps,
    D: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    CHUNKS: tl.constexpr = (D + BLOCK_C - 1) // BLOCK_C
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    batch, token, real = token_of(index_ptr, mask_ptr, rows, total, n, m)
    x_rows = x_ptr + ((batch * x_batch_stride + token * x_row_stride) * VEC)[:, None]
    xs = ()
    for i in tl.static_range(CHUNKS):
        cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        xs = xs + (tl.load(x_rows + cols, mask=real[:, None] & (cols < D), other=0.0).to(tl.float32),)
    square = xs[0] * xs[0]
    for i in tl.static_range(1, CHUNKS):
        square += xs[i] * xs[i]
    mean_square = tl.sum(square, 1) / D
    rstd = tl.rsqrt(mean_square + eps)
    tl.store(stats_ptr + rows, rstd, mask=rows < total)
    for i in tl.static_range(CHUNKS):
        cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        y = xs[i] * rstd[:, None]
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        mask = (rows < total)[:, None] & (cols < D)
        tl.store(y_ptr + (rows * D)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if R > 0:
        inverse = tl.rsqrt(mean_square + score_eps)
        tl.store(stats_ptr + total + rows, inverse, mask=rows < total)
        for r in tl.static_range(R):
            dot = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            for i in tl.static_range(CHUNKS):
                cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
                dot += xs[i] * tl.load(v_ptr + r * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            tl.store(s_ptr + r * total.to(tl.int64) + rows, tl.sum(dot, 1) * inverse, mask=rows < total)


@triton.jit(do_not_specialize=INTS)
def backward_kernel(
    dy_ptr,  # (batch, m, D), contiguous
    x_ptr,  # (batch, n, D), unit column stride
    index_ptr,  # (batch, m) int64; None: all tokens, m = n
    mask_ptr,  # (batch, n) uint8; a token with 0 counts as zeros and is not read; None: read all, or index_ptr is given
    w_ptr,  # (D,) or None
    v_ptr,  # (R, D), contiguous; None where R = 0
    stats_ptr,  # (1 or 2, batch·m) fp32
    s_ptr,  # (R, batch, m) fp32; None where R = 0
    ds_ptr,  # (R, batch, m); None where R = 0
    explore_grad_ptr,  # (batch, ⌈m / stride⌉) fp32: added to ds at each `stride`-th token, for dv[0]; or None
    residual_ptr,  # (batch, m, D), contiguous: added to dx; None: nothing is
    dx_ptr,  # (batch, m, D), contiguous; None: not needed
    partials_ptr,  # (programs, ...) fp32: (1 + R)·D columns, of dw, then of dv; None: not needed
    x_batch_stride,  # in units of VEC elements
    x_row_stride,
    n,
    m,
    total,  # batch·m
    stride,
    n_explore,
    partials_stride,
    D: tl.constexpr,
    VEC: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each of P programs takes every P-th tile of rows and keeps its partials of dw and dv in registers to the end."""
    CHUNKS: tl.constexpr = (D + BLOCK_C - 1) // BLOCK_C
    program = tl.program_id(0)
    dws = (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),) * CHUNKS
    dvs = (tl.zeros((BLOCK_R, BLOCK_C), tl.float32),) * (CHUNKS * R)
    ws = ()
    vs = ()
    for i in tl.static_range(CHUNKS):
        cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
        if w_ptr is not None:
            ws = ws + (tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32),)
        for r in tl.static_range(R):
            vs = vs + (tl.load(v_ptr + r * D + cols, mask=cols < D, other=0.0).to(tl.float32),)
    for tile in tl.range(program, tl.cdiv(total, BLOCK_R), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        batch, token, real = token_of(index_ptr, mask_ptr, rows, total, n, m)
        x_rows = x_ptr + ((batch * x_batch_stride + token * x_row_stride) * VEC)[:, None]
        rstd = tl.load(stats_ptr + rows, mask=rows < total, other=1.0)[:, None]
        ns = ()
        gs = ()
        new_dws = ()
        for i in tl.static_range(CHUNKS):
            cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
            mask = real[:, None] & (cols < D)
            x = tl.load(x_rows + cols, mask=mask, other=0.0).to(tl.float32)
            g = tl.load(dy_ptr + (rows * D)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
            ns = ns + (x * rstd,)
            new_dws = new_dws + (dws[i] + g * ns[i] if partials_ptr is not None else dws[i],)
            if w_ptr is not None:
                g *= ws[i]
            gs = gs + (g,)
        dws = new_dws
        if R > 0:
            inverse = tl.load(stats_ptr + total + rows, mask=rows < total, other=0.0)
            back = tl.zeros((BLOCK_R,), tl.float32)
            live = rows < 0
            alongs = ()
            for r in tl.static_range(R):
                at = r * total.to(tl.int64) + rows
                ds = tl.load(ds_ptr + at, mask=real, other=0.0).to(tl.float32)
                moved = ds != 0.0
                live = live | moved
                back += tl.where(moved, ds * tl.load(s_ptr + at, mask=real, other=0.0), 0.0)
                alongs = alongs + (tl.where(moved, ds * inverse, 0.0)[:, None],)
            # coefficient of n = x/rms in dx; a row without score gradients is left out, so that its NaN can't reach v
            back = tl.where(live, back * inverse * inverse / D, 0.0)[:, None] / rstd
            if partials_ptr is not None:
                taught = live
                extra = tl.zeros((BLOCK_R, 1), tl.float32)
                if explore_grad_ptr is not None:
                    probed = real & (token % stride == 0)
                    explore_grad = tl.load(
                        explore_grad_ptr + batch * n_explore + token // stride, mask=probed, other=0.0
                    )
                    taught = live | (explore_grad != 0.0)
                    extra = tl.where(explore_grad != 0.0, explore_grad * inverse, 0.0)[:, None]
                new_dvs = ()
                for i in tl.static_range(CHUNKS):
                    x = tl.where(taught[:, None], ns[i] / rstd, 0.0)
                    for r in tl.static_range(R):
                        new_dvs = new_dvs + (dvs[i * R + r] + (alongs[r] + extra if r == 0 else alongs[r]) * x,)
                dvs = new_dvs
        if dx_ptr is not None:
            products = gs[0] * ns[0]
            for i in tl.static_range(1, CHUNKS):
                products += gs[i] * ns[i]
            mean = (tl.sum(products, 1) / D)[:, None]
            for i in tl.static_range(CHUNKS):
                cols = (i * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
                dx = (gs[i] - ns[i] * mean) * rstd
                if R > 0:
                    dx -= back * tl.where(live[:, None], ns[i], 0.0)
                    for r in tl.static_range(R):
                        dx += alongs[r] * vs[i * R + r]
                mask = (rows < total)[:, None] & (cols < D)
                if residual_ptr is not None:
                    dx += tl.load(residual_ptr + (rows * D)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptr + (rows * D)[:, None] + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if partials_ptr is not None:
        for i in tl.static_range(CHUNKS):
            cols = i * BLOCK_C + tl.arange(0, BLOCK_C)
            out = partials_ptr + program.to(tl.int64) * partials_stride + cols
            tl.store(out, tl.sum(dws[i], 0), mask=cols < D)
            for r in tl.static_range(R):
                tl.store(out + (1 + r) * D, tl.sum(dvs[i * R + r], 0), mask=cols < D)


def _forward_tile(d: int, itemsize: int) -> tuple[int, int, int]:
    """Return (BLOCK_R, BLOCK_C, warps): two warps up to 2048 columns; one or two 16-byte loads a thread and chunk."""
    load = 32 * 16 // itemsize
    if d <= 2 * load:
        cols = next_power_of_2(d)
        return 4 * load // cols, cols, 2
    if d <= 2048:
        return 1, 2 * load, 2
    warps = min(32, next_power_of_2(cdiv(d, 40 * 32)))
    return 1, warps * load, warps


def _backward_tile(d: int) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_R, BLOCK_C, warps, stages, programs per multiprocessor), which 128 registers a thread can hold."""
    if d <= 1024:
        # small programs, four per multiprocessor: one reduces while the others load
        cols = next_power_of_2(d)
        return min(32, 1024 // cols), cols, 4, 3, 4
    return (1, 1024, 8, 3, 2) if d <= 2048 else (1, 4096, 16, 2, 1)


@replayed
def forward(
    x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float,
    score_eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return y (batch, m, d) in `dtype`, scores ([R,] batch, m) or None, and statistics, for x (batch, n, d)."""
    x, mask = even_rows(strided(x)[0], 8), as_bytes(mask)
    weight, vectors = (None if v is None else aligned(v) for v in (weight, vectors))
    (batch, n, d), (batch_stride, row_stride) = x.shape, x.stride()[:2]
    m = n if indices is None else indices.shape[1]
    routes = 0 if vectors is None else vectors.numel() // d
    y = torch.empty((batch, m, d), dtype=dtype, device=x.device)
    scores = None
    if vectors is not None:
        scores = torch.empty((*vectors.shape[:-1], batch, m), dtype=torch.float32, device=x.device)
    stats = torch.empty((2 if routes else 1, batch * m), dtype=torch.float32, device=x.device)
    vec = math.gcd(8, d)
    block_r, block_c, warps = _forward_tile(d, x.element_size())
    launch(
        forward_kernel, (cdiv(batch * m, block_r), 1, 1), (x, indices, mask, weight, vectors, y, scores, stats),
        (batch_stride // vec, row_stride // vec, n, m, batch * m, float(eps), float(score_eps)),
        (d, vec, routes, block_r, block_c), num_warps=warps,
    )  # fmt: skip
    return y, scores, stats


def programs(x: Tensor, rows: int) -> int:
    """Return how many programs share the rows in backward, where no buffer of partials decides it."""
    block_r, _, _, _, per_sm = _backward_tile(x.shape[-1])
    return min(per_sm * sm_count(x), cdiv(rows, block_r))


@replayed
def backward(
    dy: Tensor, x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None,
    stats: Tensor, scores: Tensor | None, ds: Tensor | None, explore_grad: Tensor | None, stride: int, need_x: bool,
    partials: Tensor | None, residual: Tensor | None,
) -> tuple[Tensor | None]:  # fmt: skip
    """Return (dx,) for dy (batch, m, d), contiguous; dx (batch, m, d) has the dtype of x, or is None without need_x.

    `residual`, contiguous and shaped like dx, is added to it.

    `partials` (programs, …), with unit column stride, gets (1 + R)·d columns: each program's partials of the gradients
    of weight and vectors.
    """
    (x, batch_stride, row_stride), mask = strided(x), as_bytes(mask)
    batch, n, d = x.shape
    m = dy.shape[1]
    routes = 0 if vectors is None else vectors.numel() // d
    vec = math.gcd(8, batch_stride, row_stride)
    block_r, block_c, warps, stages, _ = _backward_tile(d)
    grid = programs(x, batch * m) if partials is None else partials.shape[0]
    dx = torch.empty((batch, m, d), dtype=x.dtype, device=x.device) if need_x else None
    launch(
        backward_kernel, (grid, 1, 1),
        (dy, x, indices, mask, weight, vectors, stats, scores, ds, explore_grad, residual, dx, partials),
        (
            batch_stride // vec, row_stride // vec, n, m, batch * m, stride,
            0 if explore_grad is None else explore_grad.shape[1], 0 if partials is None else partials.stride(0),
        ),
        (d, vec, routes, block_r, block_c, stages), num_warps=warps,
    )  # fmt: skip
    return (dx,)
