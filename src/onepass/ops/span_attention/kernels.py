"""Triton kernels of attention over runs of keys, and their launchers: one pass forward, two backward, no atomics."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, launch, next_power_of_2

from .definition import scale_of

# queries, keys, warps, stages of (forward, queries, keys), for heads up to 64 wide
_16_BITS = ((128, 64, 8, 2), (64, 64, 4, 3), (32, 64, 4, 1))
# within the 99 KB of shared memory of smaller GPUs; forward spills registers on sm_90, yet larger tiles are faster
_TF32 = ((128, 64, 4, 1), (128, 32, 4, 2), (32, 64, 4, 1))
# a product in three TF32 parts takes three times the registers
_FP32 = ((32, 32, 4, 2), (16, 32, 4, 1), (32, 32, 8, 1))
# for wider heads
_WIDE_16_BITS = ((64, 64, 8, 2),) * 3
_WIDE = ((32, 32, 8, 1),) * 3
KERNELS = ("forward", "queries", "keys")


def shape(kernel: str, width: int, dtype: torch.dtype, precision: str) -> tuple[int, int, int, int, int]:
    """Return queries, keys and padded width of a tile, warps and stages, for one of `KERNELS`."""
    block_d = max(16, next_power_of_2(width))
    if dtype == torch.float32:
        table = _WIDE if block_d > 64 else _TF32 if precision == "tf32" else _FP32
    else:
        table = _16_BITS if block_d <= 64 else _WIDE_16_BITS if block_d == 128 else _WIDE
    block_q, block_k, warps, stages = table[KERNELS.index(kernel)]
    return block_q, block_k, block_d, warps, stages


STRIDES = [f"{t}_{d}" for t in "qkv" for d in ("batch", "row", "head")]
INTS = [*STRIDES, "dq_row", "dkv_row", "span_batch", "tile_batch", "n", "m", "heads"]
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(ptr, start, rows, row_stride, cols, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, FULL: tl.constexpr):
    """Load a tile (rows, BLOCK_D) of the head at ptr + start; zeros beyond the width and, unless FULL, not `inside`."""
    at = ptr + start + rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
    if FULL and D == BLOCK_D:
        return tl.load(at)
    if FULL:
        return tl.load(at, mask=(cols < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at, mask=inside[:, None] & (cols < D)[None, :], other=0.0)


@triton.jit
def _keep(mask_ptr, b, keys, n_keys, HAS_MASK: tl.constexpr):
    """Return which keys exist and are not masked."""
    if HAS_MASK:
        return tl.load(mask_ptr + b * n_keys + keys, mask=keys < n_keys, other=0) != 0
    return keys < n_keys


@triton.jit
def _thirds(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Split [low, high) in three: return the ends of the middle part, whose tiles are seen whole and need no mask.

    Tiles lie on a grid and keep their order, so that the runs of other queries never change the order of a query's sum.
    """
    full_low = tl.minimum(tl.maximum(tl.cdiv(full_low, BLOCK) * BLOCK, low), high)
    full_high = tl.maximum(tl.minimum(full_high // BLOCK * BLOCK, high), full_low)
    return full_low, full_high


@triton.jit
def _runs(first_ptr, last_ptr, start, queries, n, m, BLOCK: tl.constexpr):
    """Return first and last of a tile of queries; low, full_low, full_high, high of the three parts of their keys."""
    real = queries < n
    first = tl.load(first_ptr + start + queries, mask=real, other=2147483647)
    last = tl.load(last_ptr + start + queries, mask=real, other=0)
    low = tl.maximum(tl.min(first, 0), 0) // BLOCK * BLOCK
    high = tl.minimum(tl.max(last, 0), m)
    seen_by_all = tl.max(tl.where(real, first, 0), 0), tl.minimum(tl.min(tl.where(real, last, m), 0), m)
    full_low, full_high = _thirds(low, seen_by_all[0], seen_by_all[1], high, BLOCK)
    return first, last, low, full_low, full_high, high


@triton.jit(do_not_specialize=INTS)
def forward_kernel(
    q_ptr,  # (batch, n, heads, width), unit stride in width
    k_ptr,  # (batch, m, heads, width), likewise
    v_ptr,  # (batch, m, heads, width), likewise
    first_ptr,  # (batch or 1, n) int32
    last_ptr,  # (batch or 1, n) int32
    mask_ptr,  # (batch, m) uint8, or None
    out_ptr,  # (batch, n, heads, width), contiguous
    lse_ptr,  # (batch, heads, n) fp32, in units of log 2
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,  # strides
    span_batch,  # stride of first and last, 0 when shared
    n, m, heads, scale,
    UNIT: tl.constexpr,  # strides are given in this many elements
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,  # of fp32 products, see tl.dot
):  # fmt: skip
    """Compute one tile of queries of one head: a running softmax over the tiles of keys that any of them sees."""
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1) % heads
    b = (tl.program_id(1) // heads).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    real = queries < n
    first, last, low, full_low, full_high, high = _runs(first_ptr, last_ptr, b * span_batch, queries, n, m, BLOCK_K)
    q = _load(q_ptr, (b * q_batch + head * q_head) * UNIT, queries, q_row * UNIT, cols, real, D, BLOCK_D, False)
    k_start = (b * k_batch + head * k_head) * UNIT
    v_start = (b * v_batch + head * v_head) * UNIT
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for part in tl.static_range(3):
        begin = low if part == 0 else (full_low if part == 1 else full_high)
        end = full_low if part == 0 else (full_high if part == 1 else high)
        for start in tl.range(begin, end, BLOCK_K):
            keys = start + tl.arange(0, BLOCK_K)
            keep = _keep(mask_ptr, b, keys, m, HAS_MASK)
            k = _load(k_ptr, k_start, keys, k_row * UNIT, cols, keep, D, BLOCK_D, part == 1 and not HAS_MASK)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if part != 1 or HAS_MASK:
                visible = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & keep[None, :]
                scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # a query's maximum is −inf before the first key that it sees, and −inf − −inf is NaN
            base = tl.where(new_top == float("-inf"), 0.0, new_top) * (scale * LOG2_E)
            p = tl.exp2(scores * (scale * LOG2_E) - base[:, None])
            shrink = tl.exp2(top * (scale * LOG2_E) - base)
            total = total * shrink + tl.sum(p, 1)
            v = _load(v_ptr, v_start, keys, v_row * UNIT, cols, keep, D, BLOCK_D, part == 1 and not HAS_MASK)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    rows = (b * n + queries)[:, None] * heads + head
    inside = real[:, None] & (cols < D)[None, :]
    tl.store(out_ptr + rows.to(tl.int64) * D + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total > 0, top * (scale * LOG2_E) + tl.log2(total), float("inf"))
    tl.store(lse_ptr + (b * heads + head) * n + queries, lse, mask=real)


@triton.jit(do_not_specialize=INTS)
def queries_kernel(
    dout_ptr,  # (batch, n, heads, width), contiguous
    q_ptr,  # (batch, n, heads, width), unit stride in width
    k_ptr,  # (batch, m, heads, width), likewise
    v_ptr,  # (batch, m, heads, width), likewise
    out_ptr,  # (batch, n, heads, width), contiguous
    lse_ptr,  # (batch, heads, n) fp32, in units of log 2
    first_ptr,  # (batch or 1, n) int32
    last_ptr,  # (batch or 1, n) int32
    mask_ptr,  # (batch, m) uint8, or None
    dq_ptr,  # (batch, n, heads, width), rows dq_row apart, otherwise contiguous
    delta_ptr,  # (batch, heads, n) fp32: Σ dout·out, written for keys_kernel
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,  # strides
    dq_row, span_batch,  # more strides; span_batch is 0 when first and last are shared
    n, m, heads, scale,
    UNIT: tl.constexpr,  # strides are given in this many elements
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of one tile of queries: forward's loop, with the denominators of the softmax known."""
    queries = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1) % heads
    b = (tl.program_id(1) // heads).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    real = queries < n
    first, last, low, full_low, full_high, high = _runs(first_ptr, last_ptr, b * span_batch, queries, n, m, BLOCK_K)
    head_start = b * n * heads * D + head * D
    q = _load(q_ptr, (b * q_batch + head * q_head) * UNIT, queries, q_row * UNIT, cols, real, D, BLOCK_D, False)
    dout = _load(dout_ptr, head_start, queries, heads * D, cols, real, D, BLOCK_D, False)
    out = _load(out_ptr, head_start, queries, heads * D, cols, real, D, BLOCK_D, False)
    per_row = (b * heads + head) * n + queries
    lse = tl.load(lse_ptr + per_row, mask=real, other=float("inf"))
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + per_row, delta, mask=real)
    k_start = (b * k_batch + head * k_head) * UNIT
    v_start = (b * v_batch + head * v_head) * UNIT
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for part in tl.static_range(3):
        begin = low if part == 0 else (full_low if part == 1 else full_high)
        end = full_low if part == 0 else (full_high if part == 1 else high)
        for start in tl.range(begin, end, BLOCK_K):
            keys = start + tl.arange(0, BLOCK_K)
            keep = _keep(mask_ptr, b, keys, m, HAS_MASK)
            k = _load(k_ptr, k_start, keys, k_row * UNIT, cols, keep, D, BLOCK_D, part == 1 and not HAS_MASK)
            v = _load(v_ptr, v_start, keys, v_row * UNIT, cols, keep, D, BLOCK_D, part == 1 and not HAS_MASK)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            p = tl.exp2(scores * (scale * LOG2_E) - lse[:, None])
            if part != 1 or HAS_MASK:
                visible = (keys[None, :] >= first[:, None]) & (keys[None, :] < last[:, None]) & keep[None, :]
                p = tl.where(visible, p, 0.0)
            ds = p * (tl.dot(dout, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    inside = real[:, None] & (cols < D)[None, :]
    at = dq_ptr + (b * n + queries)[:, None] * (dq_row * UNIT) + head * D + cols[None, :]
    tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=INTS)
def keys_kernel(
    dout_ptr,  # (batch, n, heads, width), contiguous
    q_ptr,  # (batch, n, heads, width), unit stride in width
    k_ptr,  # (batch, m, heads, width), likewise
    v_ptr,  # (batch, m, heads, width), likewise
    lse_ptr,  # (batch, heads, n) fp32, in units of log 2
    delta_ptr,  # (batch, heads, n) fp32
    first_ptr,  # (batch or 1, n) int32
    last_ptr,  # (batch or 1, n) int32
    mask_ptr,  # (batch, m) uint8, or None
    begin_ptr,  # (batch or 1, 2, tiles of keys) int32: first query that sees some of the tile; that sees its last key
    end_ptr,  # the same: one past the last query that sees the tile's first key; that sees some of the tile
    dk_ptr,  # (batch, m, heads, width), rows dkv_row apart, otherwise contiguous
    dv_ptr,  # likewise
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,  # strides
    dkv_row, span_batch, tile_batch,  # more strides; the last two are 0 when shared
    n, m, heads, scale,
    UNIT: tl.constexpr,  # strides are given in this many elements
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one tile of keys over the tiles of queries that see any of them, which are adjacent."""
    keys = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    head = tl.program_id(1) % heads
    b = (tl.program_id(1) // heads).to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    keep = _keep(mask_ptr, b, keys, m, HAS_MASK)
    k = _load(k_ptr, (b * k_batch + head * k_head) * UNIT, keys, k_row * UNIT, cols, keep, D, BLOCK_D, False)
    v = _load(v_ptr, (b * v_batch + head * v_head) * UNIT, keys, v_row * UNIT, cols, keep, D, BLOCK_D, False)
    tile = b * tile_batch + tl.program_id(0)
    tiles = tl.num_programs(0)
    low = tl.load(begin_ptr + tile) // BLOCK_Q * BLOCK_Q
    high = tl.load(end_ptr + tiles + tile)
    full_low, full_high = _thirds(low, tl.load(begin_ptr + tiles + tile), tl.load(end_ptr + tile), high, BLOCK_Q)
    q_start = (b * q_batch + head * q_head) * UNIT
    dout_start = b * n * heads * D + head * D
    first_ptr += b * span_batch
    last_ptr += b * span_batch
    lse_ptr += (b * heads + head) * n
    delta_ptr += (b * heads + head) * n
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for part in tl.static_range(3):
        begin = low if part == 0 else (full_low if part == 1 else full_high)
        end = full_low if part == 0 else (full_high if part == 1 else high)
        for start in tl.range(begin, end, BLOCK_Q):
            queries = start + tl.arange(0, BLOCK_Q)
            real = queries < n
            lse = tl.load(lse_ptr + queries, mask=real, other=float("inf"))
            delta = tl.load(delta_ptr + queries, mask=real, other=0.0)
            q = _load(q_ptr, q_start, queries, q_row * UNIT, cols, real, D, BLOCK_D, part == 1)
            dout = _load(dout_ptr, dout_start, queries, heads * D, cols, real, D, BLOCK_D, part == 1)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            p = tl.exp2(scores * (scale * LOG2_E) - lse[None, :])
            if HAS_MASK:
                p = tl.where(keep[:, None], p, 0.0)
            if part != 1:
                first = tl.load(first_ptr + queries, mask=real, other=2147483647)
                last = tl.load(last_ptr + queries, mask=real, other=0)
                p = tl.where((keys[:, None] >= first[None, :]) & (keys[:, None] < last[None, :]), p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = p * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    inside = (keys < m)[:, None] & (cols < D)[None, :]
    at = (b * m + keys)[:, None] * (dkv_row * UNIT) + head * D + cols[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "tiles"])
def askers_kernel(
    first_ptr,  # (rows, n) int32, never decreasing
    last_ptr,
    begin_ptr,  # (rows, 2·tiles) int32
    end_ptr,
    n,
    tiles,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the queries whose runs end, and begin, at or before each tile's first key, then its last key.

    The last tile's last key may lie beyond the keys: the tile then counts as seen in part, which is right.
    """
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.where(tile < tiles, tile * BLOCK_K, (tile - tiles + 1) * BLOCK_K - 1)
    first_ptr += tl.program_id(1).to(tl.int64) * n
    last_ptr += tl.program_id(1).to(tl.int64) * n
    begin = tl.zeros((BLOCK,), tl.int32)
    end = begin
    # both bisections advance at once, because each step waits for memory
    step = 1 << 30
    while step > 0:
        if step <= n:
            ended = tl.load(last_ptr + begin + step - 1, mask=begin <= n - step, other=2147483647) <= key
            begun = tl.load(first_ptr + end + step - 1, mask=end <= n - step, other=2147483647) <= key
            begin += tl.where(ended, step, 0)
            end += tl.where(begun, step, 0)
        step //= 2
    at = tl.program_id(1).to(tl.int64) * 2 * tiles + tile
    tl.store(begin_ptr + at, begin, mask=tile < 2 * tiles)
    tl.store(end_ptr + at, end, mask=tile < 2 * tiles)


def precision(dtype: torch.dtype) -> str:
    """Return `input_precision` of tl.dot: that of torch's matrix products, with three TF32 parts for full fp32."""
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _strides(*tensors: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return (UNIT, strides in units of it): strides known as multiples of 16 elements allow 16-byte loads."""
    strides = tuple(s for t in tensors for s in t.stride()[:3])
    unit = 16 if all(s % 16 == 0 for s in strides) else 1
    return unit, tuple(s // unit for s in strides)


def _constants(kernel: str, unit: int, width: int, mask: Tensor | None, dtype: torch.dtype) -> Any:
    """Return queries and keys of a tile, all of a kernel's constants, and its launch options."""
    products = precision(dtype)
    block_q, block_k, block_d, warps, stages = shape(kernel, width, dtype, products)
    constants = unit, block_q, block_k, width, block_d, mask is not None, products
    return block_q, block_k, constants, {"num_warps": warps, "num_stages": stages}


def forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output, and the denominators of the softmax as base-2 logarithms (B, H, N)."""
    batch, n, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, n), dtype=torch.float32, device=q.device)
    unit, strides = _strides(q, k, v)
    block_q, _, constants, options = _constants("forward", unit, width, mask, q.dtype)
    span_batch = first.stride(0) if len(first) > 1 else 0
    launch(
        forward_kernel, (cdiv(n, block_q), batch * heads, 1),
        (q, k, v, first, last, mask, out, lse), (*strides, span_batch, n, k.shape[1], heads, scale_of(q)),
        constants, **options,
    )  # fmt: skip
    return out, lse


def askers(first: Tensor, last: Tensor, m: int, block: int) -> tuple[Tensor, Tensor]:
    """Return begin and end for `keys_kernel`, (rows, 2·tiles) each: which queries see each tile of `block` keys.

    The queries from begin[:tiles] up to end[tiles:] see some of the tile; those from begin[tiles:] up to end[:tiles]
    see all of it.
    """
    (rows, n), tiles = first.shape, cdiv(m, block)
    begin, end = (torch.empty((rows, 2 * tiles), dtype=torch.int32, device=first.device) for _ in range(2))
    launch(askers_kernel, (cdiv(2 * tiles, 128), rows, 1), (first, last, begin, end), (n, tiles), (block, 128))
    return begin, end


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None, grads: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write dq, dk, dv into `grads`: rows of (heads, width) with any row stride, the same for dk and dv."""
    batch, n, heads, width = q.shape
    m = k.shape[1]
    dq, dk, dv = grads
    delta = torch.empty_like(lse)
    unit, (*strides, _, dq_row, _, _, dkv_row, _) = _strides(q, k, v, dq, dk)
    span_batch = first.stride(0) if len(first) > 1 else 0
    sizes = n, m, heads, scale_of(q)
    block_q, _, constants, options = _constants("queries", unit, width, mask, q.dtype)
    launch(
        queries_kernel, (cdiv(n, block_q), batch * heads, 1),
        (dout, q, k, v, out, lse, first, last, mask, dq, delta), (*strides, dq_row, span_batch, *sizes),
        constants, **options,
    )  # fmt: skip
    _, block_k, constants, options = _constants("keys", unit, width, mask, q.dtype)
    begin, end = askers(first, last, m, block_k)
    launch(
        keys_kernel, (cdiv(m, block_k), batch * heads, 1),
        (dout, q, k, v, lse, delta, first, last, mask, begin, end, dk, dv),
        (*strides, dkv_row, span_batch, begin.stride(0) if len(begin) > 1 else 0, *sizes),
        constants, **options,
    )  # fmt: skip
