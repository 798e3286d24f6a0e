"""Triton kernels of qk_norm_rope: RMS norm of each head, then the rotation, in registers; q and k in one launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, even_rows, launch, next_power_of_2, sm_count
from onepass.ops._shared.kernels_partials import add_vector_partials

# elements of a forward tile, bytes of a backward one: 32 elements per thread, and at most 16
FORWARD_TILE, BACKWARD_BYTES = 4096, 4096
WARPS = 4
# buffers of the software pipeline plus one
BACKWARD_STAGES = 3
# arguments that kernels do not specialise on
SIZES = (
    "q_rows", "k_rows", "q_heads", "k_heads", "tokens", "dq_batch_stride", "dq_token_stride", "dq_head_stride",
    "dk_batch_stride", "dk_token_stride", "dk_head_stride", "q_batch_stride", "q_token_stride", "q_head_stride",
    "k_batch_stride", "k_token_stride", "k_head_stride", "n_positions", "cos_stride", "sin_stride",
    "positions_batch_stride", "positions_stride", "q_tiles",
)  # fmt: skip


class Heads(NamedTuple):
    """Constants of the kernels, in their order: heads of `d` columns, of which `rotary` are rotated, `rows` a tile."""

    d: int
    vec: int
    table_vec: int
    rotary: int
    half: int
    rest: int
    interleaved: bool
    rows: int


def heads_of(d: int, rotary: int, interleaved: bool, tile: int) -> Heads:
    """Return the constants of a kernel whose tiles have about `tile` elements."""
    return Heads(
        d, math.gcd(8, d), math.gcd(8, rotary // 2), rotary, next_power_of_2(rotary // 2),
        next_power_of_2(d - rotary) if d > rotary else 0, interleaved, max(1, tile // next_power_of_2(d)),
    )  # fmt: skip


@triton.jit
def _tile(ptr, offsets, rows_ok, cols, N: tl.constexpr, MASK_COLS: tl.constexpr):
    """Load (rows, cols) as fp32; zero outside."""
    mask = rows_ok[:, None] & (cols < N)[None, :] if MASK_COLS else rows_ok[:, None]
    return tl.load(ptr + offsets[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_parts(ptr, offsets, rows_ok, h):
    """Load rows as (first, second numbers of the pairs, what is not rotated)."""
    if h.interleaved:
        pairs = _tile(ptr, offsets, rows_ok, tl.arange(0, 2 * h.half), h.rotary, 2 * h.half > h.rotary)
        a, b = tl.split(tl.reshape(pairs, (offsets.shape[0], h.half, 2)))
    else:
        a = _tile(ptr, offsets, rows_ok, tl.arange(0, h.half), h.rotary // 2, 2 * h.half > h.rotary)
        b = _tile(ptr + h.rotary // 2, offsets, rows_ok, tl.arange(0, h.half), h.rotary // 2, 2 * h.half > h.rotary)
    c = a
    if h.rest > 0:
        c = _tile(ptr + h.rotary, offsets, rows_ok, tl.arange(0, h.rest), h.d - h.rotary, h.rest > h.d - h.rotary)
    return a, b, c


@triton.jit
def _store(ptr, offsets, x, rows_ok, cols, N: tl.constexpr):
    mask = rows_ok[:, None] & (cols < N)[None, :]
    tl.store(ptr + offsets[:, None] + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_parts(ptr, offsets, a, b, c, rows_ok, h):
    if h.interleaved:
        pairs = tl.reshape(tl.join(a, b), (offsets.shape[0], 2 * h.half))
        _store(ptr, offsets, pairs, rows_ok, tl.arange(0, 2 * h.half), h.rotary)
    else:
        _store(ptr, offsets, a, rows_ok, tl.arange(0, h.half), h.rotary // 2)
        _store(ptr + h.rotary // 2, offsets, b, rows_ok, tl.arange(0, h.half), h.rotary // 2)
    if h.rest > 0:
        _store(ptr + h.rotary, offsets, c, rows_ok, tl.arange(0, h.rest), h.d - h.rotary)


@triton.jit
def _load_weight(ptr, rows_ok, h):
    """Load (d,) as equal rows, in the layout of x: a 1-D load would need layout conversions."""
    return _load_parts(ptr, tl.where(rows_ok, 0, 0), rows_ok, h)


@triton.jit
def _angles(
    rows, rows_ok, heads, tokens, h, cos_ptr, sin_ptr, positions_ptr, n_positions, cos_stride, sin_stride,
    positions_batch_stride, positions_stride,
):  # fmt: skip
    """Return cos and sin of the rows' positions; NaN outside of the table."""
    token = rows // heads
    position = (token % tokens).to(tl.int64)
    if positions_ptr is not None:
        at = (token // tokens).to(tl.int64) * positions_batch_stride + position * positions_stride
        position = tl.load(positions_ptr + at, mask=rows_ok, other=0).to(tl.int64)
    inside = (position >= 0) & (position < n_positions)
    position = tl.where(inside, position, 0)
    cols = tl.arange(0, h.half)
    cos = _tile(cos_ptr, position * cos_stride * h.table_vec, rows_ok, cols, h.rotary // 2, 2 * h.half > h.rotary)
    sin = _tile(sin_ptr, position * sin_stride * h.table_vec, rows_ok, cols, h.rotary // 2, 2 * h.half > h.rotary)
    return tl.where(inside[:, None], cos, float("nan")), tl.where(inside[:, None], sin, float("nan"))


@triton.jit
def _rotate(a, b, cos, sin):
    """Return (a·cos − b·sin, b·cos + a·sin), each as one rounded product and one fma.

    Left to the compiler, which of the two products it contracts differs between layouts, and with it the last bit.
    """
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


@triton.jit
def _normed(a, b, c, eps, h):
    """Return a row's parts over its root mean square, and its inverse; a² + b² is an fma for the same reason."""
    square = tl.sum(tl.fma(a, a, b * b), 1)
    if h.rest > 0:
        square += tl.sum(c * c, 1)
    rstd = tl.rsqrt(square / h.d + eps)[:, None]
    return a * rstd, b * rstd, c * rstd, rstd


@triton.jit
def _offsets(rows, heads, tokens, strides, VEC: tl.constexpr):
    """Return where rows of (batch, tokens, heads, d) begin; strides are in units of VEC elements."""
    # division in 32 bits takes a third of the instructions
    token = rows // heads
    batch, head = (token // tokens).to(tl.int64), (rows % heads).to(tl.int64)
    return (batch * strides[0] + (token % tokens).to(tl.int64) * strides[1] + head * strides[2]) * VEC


@triton.jit
def _forward_rows(x_ptr, w_ptr, y_ptr, tile, n_rows, heads, tokens, strides, angles, eps, offset, h):
    rows = tile * h.rows + tl.arange(0, h.rows)
    ok = rows < n_rows
    a, b, c = _load_parts(x_ptr, _offsets(rows, heads, tokens, strides, h.vec), ok, h)
    cos, sin = _angles(rows, ok, heads, tokens, h, *angles)
    a, b, c, _ = _normed(a, b, c, eps, h)
    if w_ptr is not None:
        wa, wb, wc = _load_weight(w_ptr, ok, h)
        a, b = a * (wa + offset), b * (wb + offset)
        if h.rest > 0:
            c = c * (wc + offset)
    a, b = _rotate(a, b, cos, sin)
    _store_parts(y_ptr, rows.to(tl.int64) * h.d, a, b, c, ok, h)


@triton.jit(do_not_specialize=SIZES)
def rope_forward_kernel(
    q_ptr,  # (batch, tokens, q_heads, D), unit column stride
    k_ptr,  # (batch, tokens, k_heads, D), unit column stride
    qw_ptr,  # (D,) or None
    kw_ptr,  # (D,) or None
    cos_ptr,  # (n_positions, ROTARY / 2), unit column stride
    sin_ptr,  # like cos_ptr
    positions_ptr,  # (batch, tokens) integers; None: the tokens are at 0, 1, 2, …
    q_out_ptr,  # contiguous, like q_ptr
    k_out_ptr,  # contiguous, like k_ptr
    q_rows,
    k_rows,
    q_heads,
    k_heads,
    tokens,
    q_batch_stride,  # strides of q and k in units of VEC elements
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    n_positions,
    cos_stride,  # strides of cos and sin in units of TABLE_VEC elements
    sin_stride,
    positions_batch_stride,
    positions_stride,
    q_tiles,
    eps,
    offset,
    D: tl.constexpr,
    VEC: tl.constexpr,
    TABLE_VEC: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Norm and rotate one tile of rows, of q in the first programs and of k in the others."""
    angles = (
        cos_ptr, sin_ptr, positions_ptr, n_positions, cos_stride, sin_stride, positions_batch_stride, positions_stride
    )  # fmt: skip
    program = tl.program_id(0)
    if program < q_tiles:
        _forward_rows(
            q_ptr, qw_ptr, q_out_ptr, program, q_rows, q_heads, tokens, (q_batch_stride, q_token_stride, q_head_stride),
            angles, eps, offset, Heads(D, VEC, TABLE_VEC, ROTARY, HALF, REST, INTERLEAVED, BLOCK_R),
        )  # fmt: skip
    else:
        _forward_rows(
            k_ptr, kw_ptr, k_out_ptr, program - q_tiles, k_rows, k_heads, tokens,
            (k_batch_stride, k_token_stride, k_head_stride), angles, eps, offset,
            Heads(D, VEC, TABLE_VEC, ROTARY, HALF, REST, INTERLEAVED, BLOCK_R),
        )  # fmt: skip


@triton.jit
def _backward_rows(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, n_rows, heads, tokens, dy_strides, strides, angles, eps, offset, h,
    STAGES: tl.constexpr,
):  # fmt: skip
    if w_ptr is not None:
        wa, wb, wc = _load_weight(w_ptr, tl.arange(0, h.rows) >= 0, h)
    dwa = tl.zeros((h.rows, h.half), tl.float32)
    dwb = tl.zeros((h.rows, h.half), tl.float32)
    dwc = tl.zeros((h.rows, h.rest if h.rest > 0 else h.half), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, h.rows), tl.num_programs(0), num_stages=STAGES):
        rows = tile * h.rows + tl.arange(0, h.rows)
        ok = rows < n_rows
        x_offsets = _offsets(rows, heads, tokens, strides, h.vec)
        dy_offsets = _offsets(rows, heads, tokens, dy_strides, h.vec)
        a, b, c = _load_parts(x_ptr, x_offsets, ok, h)
        da, db, gc = _load_parts(dy_ptr, dy_offsets, ok, h)
        cos, sin = _angles(rows, ok, heads, tokens, h, *angles)
        ga, gb = _rotate(da, db, cos, -sin)
        a, b, c, rstd = _normed(a, b, c, eps, h)
        if dw_ptr is not None:
            dwa += ga * a
            dwb += gb * b
            if h.rest > 0:
                dwc += gc * c
        if dx_ptr is not None:
            if w_ptr is not None:
                ga, gb = ga * (wa + offset), gb * (wb + offset)
                if h.rest > 0:
                    gc = gc * (wc + offset)
            along = tl.sum(ga * a + gb * b, 1)
            if h.rest > 0:
                along += tl.sum(gc * c, 1)
            along = (along / h.d)[:, None]
            a, b, c = (ga - a * along) * rstd, (gb - b * along) * rstd, (gc - c * along) * rstd
            _store_parts(dx_ptr, rows.to(tl.int64) * h.d, a, b, c, ok, h)
    if dw_ptr is not None:
        zero = tl.zeros((1,), tl.int64) + tl.program_id(0).to(tl.int64) * h.d
        sums = tl.sum(dwa, 0)[None, :], tl.sum(dwb, 0)[None, :], tl.sum(dwc, 0)[None, :]
        _store_parts(dw_ptr, zero, sums[0], sums[1], sums[2], zero >= 0, h)


@triton.jit(do_not_specialize=SIZES)
def rope_backward_kernel(
    dq_out_ptr,  # (batch, tokens, q_heads, D), unit column stride
    dk_out_ptr,  # (batch, tokens, k_heads, D), unit column stride
    q_ptr,  # like dq_out_ptr
    k_ptr,  # like dk_out_ptr
    qw_ptr,  # (D,) or None
    kw_ptr,  # (D,) or None
    cos_ptr,  # (n_positions, ROTARY / 2), unit column stride
    sin_ptr,  # like cos_ptr
    positions_ptr,  # (batch, tokens) integers; None: the tokens are at 0, 1, 2, …
    dq_ptr,  # contiguous; None: not needed
    dk_ptr,  # contiguous; None: not needed
    dqw_ptr,  # (programs, D) fp32: partials; None: not needed
    dkw_ptr,  # (programs, D) fp32: partials; None: not needed
    q_rows,
    k_rows,
    q_heads,
    k_heads,
    tokens,
    dq_batch_stride,  # strides of dq_out, dk_out, q and k in units of VEC elements
    dq_token_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    n_positions,
    cos_stride,  # strides of cos and sin in units of TABLE_VEC elements
    sin_stride,
    positions_batch_stride,
    positions_stride,
    eps,
    offset,
    D: tl.constexpr,
    VEC: tl.constexpr,
    TABLE_VEC: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rotate the gradients back and take them through the norms; each of P programs takes every P-th tile of q and k.

    1/rms is computed again from the row, which is in registers, so forward keeps nothing but q and k.
    """
    angles = (
        cos_ptr, sin_ptr, positions_ptr, n_positions, cos_stride, sin_stride, positions_batch_stride, positions_stride
    )  # fmt: skip
    if dq_ptr is not None or dqw_ptr is not None:
        _backward_rows(
            dq_out_ptr, q_ptr, qw_ptr, dq_ptr, dqw_ptr, q_rows, q_heads, tokens,
            (dq_batch_stride, dq_token_stride, dq_head_stride), (q_batch_stride, q_token_stride, q_head_stride), angles,
            eps, offset, Heads(D, VEC, TABLE_VEC, ROTARY, HALF, REST, INTERLEAVED, BLOCK_R), STAGES,
        )  # fmt: skip
    if dk_ptr is not None or dkw_ptr is not None:
        _backward_rows(
            dk_out_ptr, k_ptr, kw_ptr, dk_ptr, dkw_ptr, k_rows, k_heads, tokens,
            (dk_batch_stride, dk_token_stride, dk_head_stride), (k_batch_stride, k_token_stride, k_head_stride), angles,
            eps, offset, Heads(D, VEC, TABLE_VEC, ROTARY, HALF, REST, INTERLEAVED, BLOCK_R), STAGES,
        )  # fmt: skip


def _heads(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x as (batch, tokens, heads, D) whose rows are aligned as a contiguous tensor's, and its strides in VEC."""
    x = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    x = even_rows(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous(), 8)
    vec = math.gcd(8, x.shape[-1])
    a, b, c = (s if size > 1 else 0 for s, size in zip(x.stride()[:3], x.shape[:3], strict=True))
    return x, (a // vec, b // vec, c // vec)


def _vectors(*weights: Tensor | None) -> list[Tensor | None]:
    return [w if w is None else w.contiguous() for w in weights]


def _tables(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Return cos, sin and positions (batch, tokens) as the kernels read them; number of positions and strides."""
    cos, sin = (even_rows(t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous(), 8) for t in (cos, sin))
    vec = math.gcd(8, cos.shape[-1])
    strides = [0, 0]
    if positions is not None:
        positions = positions.expand(q.shape[:-2]).reshape(math.prod(q.shape[:-3]), q.shape[-3])
        strides = list(positions.stride())
    return [cos, sin, positions], [cos.shape[0], cos.stride(0) // vec, sin.stride(0) // vec, *strides]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """Return rows of q and k, their heads, tokens."""
    return q.numel() // q.shape[-1], k.numel() // k.shape[-1], q.shape[-2], k.shape[-2], q.shape[-3]


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    positions: Tensor | None, eps: float, offset: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k, normed and rotated, contiguous."""
    new_q, new_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    heads = heads_of(q.shape[-1], 2 * cos.shape[-1], interleaved, FORWARD_TILE)
    tables, table_sizes = _tables(q, cos, sin, positions)
    sizes = _sizes(q, k)
    tiles = [cdiv(rows, heads.rows) for rows in sizes[:2]]
    (q, q_strides), (k, k_strides) = _heads(q), _heads(k)
    launch(
        rope_forward_kernel, (sum(tiles), 1, 1), (q, k, *_vectors(q_weight, k_weight), *tables, new_q, new_k),
        (*sizes, *q_strides, *k_strides, *table_sizes, tiles[0], float(eps), float(offset)), heads,
        num_warps=WARPS,
    )  # fmt: skip
    return new_q, new_k


def backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, positions: Tensor | None, eps: float, offset: float, interleaved: bool,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k and both weights, contiguous and in their dtypes; None for those not needed."""
    dq_in, dk_in, dq_weight, dk_weight = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need and t is not None else None
        for t, need in zip((q, k, q_weight, k_weight), needs, strict=True)
    )
    itemsize = max(q.element_size(), dq.element_size())
    heads = heads_of(q.shape[-1], 2 * cos.shape[-1], interleaved, BACKWARD_BYTES // itemsize)
    tables, table_sizes = _tables(q, cos, sin, positions)
    sizes = _sizes(q, k)
    # masks and columns that are not rotated take registers: fewer programs fit a multiprocessor
    per_sm = 4 if heads.rotary == heads.d and heads.d & (heads.d - 1) == 0 else 3
    programs = min(per_sm * sm_count(q), cdiv(max(sizes[:2]), heads.rows))
    rows = [_heads(t) for t in (dq, dk, q, k)]
    strides = [s for _, of_tensor in rows for s in of_tensor]
    n_weights = needs[2] + needs[3]
    q_partials = k_partials = None
    if n_weights:
        partials = torch.empty((n_weights, programs, q.shape[-1]), dtype=torch.float32, device=q.device)
        q_partials, k_partials = partials[0] if needs[2] else None, partials[-1] if needs[3] else None
    launch(
        rope_backward_kernel, (programs, 1, 1),
        (*(t for t, _ in rows), *_vectors(q_weight, k_weight), *tables, dq_in, dk_in, q_partials, k_partials),
        (*sizes, *strides, *table_sizes, float(eps), float(offset)), (*heads, BACKWARD_STAGES),
        num_warps=WARPS,
    )  # fmt: skip
    if n_weights:
        add_vector_partials(partials, dq_weight, dk_weight, programs, 1)
    return dq_in, dk_in, dq_weight, dk_weight
