"""Triton kernels between the products of routed layers, except norms, attention and choices, and their launchers.

Sums over rows (gradients of biases): each program writes its partials to a row of one buffer, and one last kernel adds
up those of a whole backward pass, always in the same order. GELU's gradient; gates on values; positions of keys chosen
per window; a cast of all weights in one launch; the number of tokens in a share; the gradient of `explore`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import as_rows, cdiv, launch, next_power_of_2, replayed, sm_count
from onepass.ops._shared.kernels_partials import add_partials
from onepass.ops._shared.kernels_tokens import WARPS
from onepass.ops._shared.kernels_tokens import tile as tile_of
from onepass.ops.routing.op import as_bytes

# weights and biases of two linear layers in each of two branches
TENSORS = 8
INTS = [
    "v_stride", "dv_stride", "total", "per_window", "windows", "window", "n_places", "n_queries", "partials_stride",
    "mask_row_stride", "n", "k", "numerator", "denominator", "soft_row_stride", "stride", "count", "mask_stride",
    *(f"n{i}" for i in range(TENSORS)),
]  # fmt: skip
# of sums_kernel and gelu_backward_kernel: warps, 16-byte loads in flight per thread and tensor, programs per SM
SUMS_WARPS, SUMS_UNROLL, GELU_UNROLL, PER_SM = 8, 4, 4, 2
# elements of a program of the residual sum: two 16-byte loads of fp32 per thread
RESIDUAL_BLOCK = 1024
CAST_BLOCK = 4096
# chosen tokens of a program; tokens of an iteration over a sequence
PLACES, TOKENS = 256, 1024


@triton.jit(do_not_specialize=INTS)
def sums_kernel(
    x_ptr,  # (total, D), contiguous
    copy_ptr,  # (total, D), contiguous, another dtype: gets x rounded, which the sums then add up; None: not needed
    partials_ptr,  # (programs, ...) fp32; D columns of each row are written
    total,
    partials_stride,
    D: tl.constexpr,
    OFFSET: tl.constexpr,  # first of these columns
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (cols < D)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in tl.range(group, tl.cdiv(total, UNROLL * BLOCK_R), tl.num_programs(1)):
        top = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        xs = ()
        # load the whole tile before the first store, because the compiler can't move a load across a store
        for u in tl.static_range(UNROLL):
            rows = top + u * BLOCK_R
            mask = (rows < total)[:, None] & inside
            xs = xs + (tl.load(x_ptr + (rows * D)[:, None] + cols[None, :], mask=mask, other=0.0),)
        for u in tl.static_range(UNROLL):
            x = xs[u]
            if copy_ptr is not None:
                rows = top + u * BLOCK_R
                x = x.to(copy_ptr.dtype.element_ty)
                tl.store(copy_ptr + (rows * D)[:, None] + cols[None, :], x, mask=(rows < total)[:, None] & inside)
            acc += x.to(tl.float32)
    out = partials_ptr + group.to(tl.int64) * partials_stride + OFFSET
    tl.store(out + cols, tl.sum(acc, 0), mask=cols < D)


@triton.jit(do_not_specialize=INTS)
def gelu_backward_kernel(
    dh_ptr,  # (total, D), contiguous; overwritten with du
    u_ptr,  # (total, D), contiguous
    partials_ptr,  # (programs, ...) fp32; D columns of each row get the sums of du; None: not needed
    total,
    partials_stride,
    D: tl.constexpr,
    OFFSET: tl.constexpr,  # first of these columns
    UNROLL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute du = dh·(Φ(u) + u·φ(u)) with the normal distribution function Φ and its density φ."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (cols < D)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tile in tl.range(group, tl.cdiv(total, UNROLL * BLOCK_R), tl.num_programs(1)):
        top = tl.cast(tile, tl.int64) * (UNROLL * BLOCK_R) + tl.arange(0, BLOCK_R)
        us = ()
        dhs = ()
        # loads first, as in `sums_kernel`
        for i in tl.static_range(UNROLL):
            rows = top + i * BLOCK_R
            mask = (rows < total)[:, None] & inside
            at = (rows * D)[:, None] + cols[None, :]
            us = us + (tl.load(u_ptr + at, mask=mask, other=0.0),)
            dhs = dhs + (tl.load(dh_ptr + at, mask=mask, other=0.0),)
        for i in tl.static_range(UNROLL):
            rows = top + i * BLOCK_R
            mask = (rows < total)[:, None] & inside
            u = us[i].to(tl.float32)
            slope = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476) + u * (0.3989422804014327 * tl.exp(-0.5 * u * u))
            du = (dhs[i].to(tl.float32) * slope).to(dh_ptr.dtype.element_ty)
            tl.store(dh_ptr + (rows * D)[:, None] + cols[None, :], du, mask=mask)
            # sum du as rounded: the matrix products read the same values
            acc += du.to(tl.float32)
    if partials_ptr is not None:
        out = partials_ptr + group.to(tl.int64) * partials_stride + OFFSET
        tl.store(out + cols, tl.sum(acc, 0), mask=cols < D)


@triton.jit(do_not_specialize=INTS)
def residual_kernel(
    x_ptr,  # (total · UNIT,)
    y_ptr,  # (total · UNIT,), of any dtype
    out_ptr,  # (total · UNIT,)
    total,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total.to(tl.int64) * UNIT
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def programs(x: Tensor, rows: int) -> int:
    """Return how many programs share the rows; the buffer of partials has a row for each."""
    return min(PER_SM * sm_count(x), max(1, cdiv(rows, 4)))


def _sums_tile(x: Tensor) -> tuple[int, int]:
    """Return (BLOCK_R, BLOCK_C): one 16-byte load per thread."""
    vector = 16 // x.element_size()
    block_c = min(next_power_of_2(x.shape[1]), 128 * vector)
    return max(1, SUMS_WARPS * 32 * vector // block_c), block_c


@replayed
def column_sums(x: Tensor, partials: Tensor, offset: int, dtype: torch.dtype | None = None) -> tuple[Tensor | None]:
    """Write the partials of the sums over the rows of x (rows, d) to d columns of `partials` from `offset` on.

    With a `dtype`, return x rounded to it, and sum the rounded x.
    """
    rows, d = x.shape
    block_r, block_c = _sums_tile(x)
    copy = None if dtype is None else torch.empty((rows, d), dtype=dtype, device=x.device)
    launch(
        sums_kernel, (cdiv(d, block_c), partials.shape[0], 1), (x, copy, partials), (rows, partials.shape[1]),
        (d, offset, SUMS_UNROLL, block_r, block_c), num_warps=SUMS_WARPS,
    )  # fmt: skip
    return (copy,)


@replayed
def gelu_backward(dh: Tensor, u: Tensor, partials: Tensor | None, offset: int) -> tuple[()]:
    """Overwrite dh (rows, d) with du; write the partials of its sums as :func:`column_sums`, unless None is given."""
    rows, d = u.shape
    block_r, block_c = _sums_tile(u)
    groups = programs(u, rows) if partials is None else partials.shape[0]
    launch(
        gelu_backward_kernel, (cdiv(d, block_c), groups, 1), (dh, u, partials),
        (rows, 0 if partials is None else partials.shape[1]), (d, offset, GELU_UNROLL, block_r, block_c),
        num_warps=SUMS_WARPS,
    )  # fmt: skip
    return ()


@replayed
def total(partials: Tensor) -> Tensor:
    """Return the sums over the rows of `partials`."""
    width = partials.shape[1]
    out = torch.empty(width, dtype=torch.float32, device=partials.device)
    add_partials(partials, out, math.gcd(width, 16))
    return out


def residual_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the shape of x and the wider dtype, for contiguous tensors of as many elements."""
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, y.dtype), device=x.device)
    unit = math.gcd(16, x.numel())
    launch(
        residual_kernel, (cdiv(x.numel(), RESIDUAL_BLOCK), 1, 1), (x, y, out), (x.numel() // unit,),
        (unit, RESIDUAL_BLOCK), num_warps=4,
    )  # fmt: skip
    return out


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
    """Compute positions in the sequence, and how many keys each query sees: of earlier windows; a missing one: all."""
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
    block_r, block_c = tile_of(d)
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
    block_r, block_c = tile_of(d)
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
    launch(
        place_kernel, (cdiv(max(at.numel(), at_q.numel()), PLACES), 1, 1), (within, at_q, at, seen),
        (per_window, windows, window, at.numel(), at_q.numel()), (PLACES,), num_warps=4,
    )  # fmt: skip
    return at, seen


@triton.jit
def copy(from_ptr, to_ptr, n, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    if from_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n * UNIT
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=inside, other=0.0).to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=INTS)
def cast_kernel(
    a0, a1, a2, a3, a4, a5, a6, a7,  # inputs, contiguous; or None
    b0, b1, b2, b3, b4, b5, b6, b7,  # outputs
    n0, n1, n2, n3, n4, n5, n6, n7,  # numbers of elements, in UNITs: multiples of a constant allow wide loads
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        copy(a0, b0, n0, UNIT, BLOCK)
    elif which == 1:
        copy(a1, b1, n1, UNIT, BLOCK)
    elif which == 2:
        copy(a2, b2, n2, UNIT, BLOCK)
    elif which == 3:
        copy(a3, b3, n3, UNIT, BLOCK)
    elif which == 4:
        copy(a4, b4, n4, UNIT, BLOCK)
    elif which == 5:
        copy(a5, b5, n5, UNIT, BLOCK)
    elif which == 6:
        copy(a6, b6, n6, UNIT, BLOCK)
    else:
        copy(a7, b7, n7, UNIT, BLOCK)


@replayed
def cast(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return each tensor (contiguous) of up to eight cast to `dtype`; None stays None."""
    out = [None if t is None else torch.empty(t.shape, dtype=dtype, device=t.device) for t in tensors]
    sizes = [0 if t is None else t.numel() for t in tensors]
    unit, padding = math.gcd(16, *sizes), TENSORS - len(tensors)
    launch(
        cast_kernel, (cdiv(max(sizes), CAST_BLOCK), TENSORS, 1), (*tensors, *[None] * padding, *out, *[None] * padding),
        (*(n // unit for n in sizes), *[0] * padding), (unit, CAST_BLOCK), num_warps=4,
    )  # fmt: skip
    return tuple(out)


@triton.jit(do_not_specialize=INTS)
def count_kernel(
    mask_ptr,  # (rows, n) uint8, unit column stride
    count_ptr,  # (rows,) fp32: max(1, round(share·m)) for the m real tokens of the row
    mask_row_stride,
    n,
    numerator,
    denominator,
    BLOCK: tl.constexpr,
):
    """Round in integers, halves to even, as the host does."""
    row = tl.program_id(0).to(tl.int64)
    real = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        real += (tl.load(mask_ptr + row * mask_row_stride + cols, mask=cols < n, other=0) != 0).to(tl.int32)
    twice = 2 * tl.sum(real, 0).to(tl.int64) * numerator + denominator
    count = twice // (2 * denominator)
    tie = twice % (2 * denominator) == 0
    count = tl.where(tie, count - count % 2, count)
    tl.store(count_ptr + row, tl.maximum(count, 1).to(tl.float32))


@triton.jit(do_not_specialize=INTS)
def cut_kernel(
    index_ptr,  # (rows, k) int64, best first; −1 is written after the first `count` of a row
    gate_ptr,  # (rows, k) fp32 or fp16, contiguous: gates; 0 is written there
    soft_ptr,  # (rows, n) gates of all tokens, copied to gate_ptr; None: gate_ptr keeps its gates
    count_ptr,  # (rows,) fp32
    soft_row_stride,
    k,
    total,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = at // k
    index = tl.load(index_ptr + at, mask=inside, other=-1)
    count = tl.load(count_ptr + row, mask=inside, other=0.0)
    kept = inside & (index >= 0) & ((at - row * k).to(tl.float32) < count)
    if soft_ptr is None:
        gate = tl.load(gate_ptr + at, mask=kept, other=0.0)
    else:
        gate = tl.load(soft_ptr + row * soft_row_stride + index, mask=kept, other=0.0)
    tl.store(index_ptr + at, tl.where(kept, index, -1), mask=inside)
    tl.store(gate_ptr + at, tl.where(kept, gate, 0.0).to(gate_ptr.dtype.element_ty), mask=inside)


def counts(mask: Tensor, share: tuple[int, int]) -> Tensor:
    """Return how many tokens to choose of each row (rows, n) of a mask, at least 1: (rows,) fp32."""
    rows = as_rows(mask.view(torch.uint8))
    out = torch.empty(len(rows), dtype=torch.float32, device=mask.device)
    block = min(TOKENS, next_power_of_2(mask.shape[1]))
    launch(count_kernel, (len(rows), 1, 1), (rows, out), (rows.stride(0), rows.shape[1], *share), (block,), num_warps=4)
    return out


def cut(indices: Tensor, gates: Tensor, soft: Tensor | None, counts: Tensor) -> None:
    """Cut each row (rows, k) after its first `counts`, in place; gates come from `soft` (rows, n) unless it is None."""
    total = indices.numel()
    launch(
        cut_kernel, (cdiv(total, PLACES), 1, 1), (indices, gates, soft, counts),
        (0 if soft is None else soft.stride(0), indices.shape[1], total), (PLACES,), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=INTS)
def length_kernel(
    dy_ptr,  # (batch, n, D), contiguous
    length_ptr,  # (batch, count) fp32
    n,
    stride,
    count,  # ⌈n / stride⌉
    total,  # batch·count
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < total
    tokens = (rows // count) * n + (rows % count) * stride
    square = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, D, BLOCK_C):
        cols = (start + tl.arange(0, BLOCK_C))[None, :]
        mask = inside[:, None] & (cols < D)
        dy = tl.load(dy_ptr + (tokens * D)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        square += dy * dy
    tl.store(length_ptr + rows, tl.sqrt(tl.sum(square, 1)), mask=inside)


@triton.jit(do_not_specialize=INTS)
def centre_kernel(
    length_ptr,  # (batch, count) fp32
    mask_ptr,  # (batch, n) bool as uint8, unit stride; None: all tokens are real
    explore_grad_ptr,  # (batch, count) fp32
    stride,
    count,
    mask_stride,
    scale,
    BLOCK: tl.constexpr,
):
    """Compute explore_grad = scale·(length − its mean over the sequence's real tokens), 0 at masked tokens."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    real = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        taken = at < count
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + row * mask_stride + at * stride, mask=taken, other=0) != 0)
        total += tl.load(length_ptr + row * count + at, mask=taken, other=0.0)
        real += taken.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(real, 0), 1.0)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        taken = at < count
        if mask_ptr is not None:
            taken = taken & (tl.load(mask_ptr + row * mask_stride + at * stride, mask=taken, other=0) != 0)
        length = tl.load(length_ptr + row * count + at, mask=taken, other=0.0)
        tl.store(explore_grad_ptr + row * count + at, tl.where(taken, scale * (length - mean), 0.0), mask=at < count)


@replayed
def explore_gradient(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return explore_grad (batch, ⌈n / stride⌉) for dy (batch, n, d), contiguous, and a mask (batch, n) or None."""
    (batch, n, d), mask = dy.shape, as_bytes(mask)
    count = cdiv(n, stride)
    block_r, block_c = tile_of(d)
    lengths = torch.empty((batch, count), dtype=torch.float32, device=dy.device)
    explore_grad = torch.empty_like(lengths)
    launch(
        length_kernel, (cdiv(batch * count, block_r), 1, 1), (dy, lengths),
        (n, stride, count, batch * count), (d, block_r, block_c), num_warps=WARPS,
    )  # fmt: skip
    launch(
        centre_kernel, (batch, 1, 1), (lengths, mask, explore_grad),
        (stride, count, 0 if mask is None else mask.stride(0), float(scale)), (TOKENS,), num_warps=WARPS,
    )  # fmt: skip
    return explore_grad
