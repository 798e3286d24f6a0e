"""Triton kernel for wide 16-bit rows: a register holds two values, which are widened at each use.

Registers hold twice as many 16-bit values as fp32 ones, so several programs share a multiprocessor, and one loads while
another reduces or stores. A team shares a row of more than 32768 columns. Each member publishes its mean and sum of
squares in one 64-bit word of the mailbox (see kernels_team.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from onepass.ops._shared.kernels_memory import load, store

from .kernels_team import await_words, high_half, low_half, pair, with_parity


@triton.jit
def merge(count_a, mean_a, squares_a, count_b, mean_b, squares_b):
    """Merge (count, mean, sum of squares about the mean) of two sets: right in any order, without cancellation."""
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    step = mean_b - mean_a
    return count, mean_a + step * share, squares_a + squares_b + step * step * (count_a * share)


@triton.jit
def as_bits(ptr):
    """Return a pointer to 16-bit values as a pointer to 32-bit words of two neighbours."""
    return ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def widen(bits, zero, dtype: tl.constexpr):
    """Return the two values of each word in fp32. XOR with an opaque runtime 0 forces re-widening: saves registers."""
    bits ^= zero
    if dtype == tl.bfloat16:
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & -65536).to(tl.float32, bitcast=True)
    else:
        low = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def narrow(low, high, dtype: tl.constexpr):
    """Round two fp32 values into one word with one instruction; Triton's own conversion takes more."""
    if dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits


@triton.jit
def load_bits(ptr, words, PART: tl.constexpr, MASKED: tl.constexpr):
    return load(as_bits(ptr), words, words < PART // 2, MASKED)


@triton.jit
def store_bits(ptr, words, bits, PART: tl.constexpr, MASKED: tl.constexpr):
    store(as_bits(ptr), words, bits, words < PART // 2, MASKED)


@triton.jit(do_not_specialize=["x_row_stride", "r_row_stride", "n_rows", "zero"])
def packed_forward_kernel(
    x_ptr,  # (n_rows, N_COLS), 16-bit, unit column stride
    r_ptr,  # (n_rows, N_COLS), dtype of x, unit column stride; None: no residual
    w_ptr,  # (N_COLS,), 16-bit, or None
    b_ptr,  # (N_COLS,), 16-bit, or None
    y_ptr,  # (n_rows, N_COLS), dtype of x, contiguous
    s_ptr,  # (n_rows, N_COLS), dtype of x, contiguous; None without residual
    stats_ptr,  # (1 or 2, n_rows) fp32: 1/σ, mean
    words_ptr,  # (n_rows, TEAM) int64 zeros, the mailbox; None: one program per row
    x_row_stride,  # in units of VEC elements
    r_row_stride,
    n_rows,
    zero,  # 0, see `widen`
    eps,
    offset,
    N_COLS: tl.constexpr,  # a multiple of 8 · TEAM
    VEC: tl.constexpr,  # even
    HAS_MEAN: tl.constexpr,
    BLOCK_C: tl.constexpr,  # 8 columns for each thread
    TEAM: tl.constexpr,
    WIDTH: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Normalise one part of a row per program; a team's programs are neighbours in the grid, which starts in order.

    WAITS: the kernel starts before the previous one, `zeros_kernel`, ends, and waits for its zeros before it publishes.
    """
    THREADS: tl.constexpr = BLOCK_C // 8
    PART: tl.constexpr = N_COLS // TEAM
    CHUNKS: tl.constexpr = (PART + BLOCK_C - 1) // BLOCK_C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    member = tl.program_id(0) % TEAM
    row = (tl.program_id(0) // TEAM).to(tl.int64)
    words = (tl.arange(0, THREADS) * 4)[:, None] + tl.arange(0, 4)[None, :]
    x_ptr += row * x_row_stride * VEC + member * PART
    y_ptr += row * N_COLS + member * PART
    if r_ptr is not None:
        r_ptr += row * r_row_stride * VEC + member * PART
        s_ptr += row * N_COLS + member * PART

    xs = ()
    for i in tl.static_range(CHUNKS):
        at = words + i * (BLOCK_C // 2)
        x = load_bits(x_ptr, at, PART, (i + 1) * BLOCK_C > PART)
        if r_ptr is not None:
            r = load_bits(r_ptr, at, PART, (i + 1) * BLOCK_C > PART)
            x_low, x_high = widen(x, 0, dtype)
            r_low, r_high = widen(r, 0, dtype)
            x = narrow(x_low + r_low, x_high + r_high, dtype)
            store_bits(s_ptr, at, x, PART, (i + 1) * BLOCK_C > PART)
        xs = xs + (x,)

    if HAS_MEAN:
        # take each thread's own mean first: one merge over threads, and one over the team, then give mean and variance
        total = tl.zeros((THREADS, 4), tl.float32)
        for i in tl.static_range(CHUNKS):
            low, high = widen(xs[i], 0, dtype)
            total += low + high
        missing = tl.arange(0, THREADS) * 8 >= PART - (CHUNKS - 1) * BLOCK_C
        count = tl.where(missing, (CHUNKS - 1) * 8, CHUNKS * 8).to(tl.float32)
        mean = tl.sum(total, 1) / tl.maximum(count, 1.0)
    square = tl.zeros((THREADS, 4), tl.float32)
    for i in tl.static_range(CHUNKS):
        low, high = widen(xs[i], zero, dtype)
        if HAS_MEAN:
            low -= mean[:, None]
            high -= mean[:, None]
            if (i + 1) * BLOCK_C > PART:
                low = tl.where(missing[:, None], 0.0, low)
                high = tl.where(missing[:, None], 0.0, high)
        square += low * low
        square += high * high
    if HAS_MEAN:
        count, mean, squares = tl.reduce((count, mean, tl.sum(square, 1)), 0, merge)
    else:
        squares = tl.sum(tl.sum(square, 1), 0)
        mean = squares
    if TEAM > 1:
        if WAITS:
            gdc_wait()
        slot = words_ptr + row * TEAM
        one = tl.full((), 1, tl.int32)
        tl.atomic_xchg(slot + member, pair(with_parity(squares, one), mean), sem="relaxed")
        gathered = await_words(slot, one, TEAM, WIDTH)
        in_team = tl.arange(0, WIDTH) < TEAM
        parts = tl.where(in_team, low_half(gathered), 0.0)
        if HAS_MEAN:
            count, mean, squares = tl.reduce(
                (tl.where(in_team, PART, 0).to(tl.float32), high_half(gathered), parts), 0, merge
            )
        else:
            squares = tl.sum(parts, 0)
    rstd = tl.rsqrt(squares / N_COLS + eps)

    for i in tl.static_range(CHUNKS):
        at = words + i * (BLOCK_C // 2)
        low, high = widen(xs[i], zero * 2, dtype)
        if HAS_MEAN:
            low -= mean
            high -= mean
        low *= rstd
        high *= rstd
        if w_ptr is not None:
            w = load_bits(w_ptr + member * PART, at, PART, (i + 1) * BLOCK_C > PART)
            w_low, w_high = widen(w, 0, w_ptr.dtype.element_ty)
            if not HAS_MEAN:
                w_low += offset
                w_high += offset
            low *= w_low
            high *= w_high
        if b_ptr is not None:
            b = load_bits(b_ptr + member * PART, at, PART, (i + 1) * BLOCK_C > PART)
            b_low, b_high = widen(b, 0, b_ptr.dtype.element_ty)
            low += b_low
            high += b_high
        store_bits(y_ptr, at, narrow(low, high, dtype), PART, (i + 1) * BLOCK_C > PART)
    if member == 0:
        tl.store(stats_ptr + row, rstd)
        if HAS_MEAN:
            tl.store(stats_ptr + n_rows + row, mean)


@triton.jit(do_not_specialize=["n_words"])
def zeros_kernel(
    words_ptr,  # (n_words,) int64
    n_words,
    BLOCK: tl.constexpr,
):
    """Zero the mailbox by a kernel: the next kernel can wait for it inside, which does not work with a memset."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=at < n_words)
