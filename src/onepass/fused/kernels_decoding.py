"""Triton kernels of one more token through a causal routed block; tensors have fixed places, lengths are on the device.

If no token is chosen, nothing of a heavy branch is read: its programs look at the gates first and return.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops.span_attention.kernels_rotary import cos_sin

INTS = ["numerator", "denominator"]


@triton.jit
def score_of(x, v_ptr, mean_square, eps, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the score of one token, with the same bits in all kernels here, because thresholds are scores."""
    cols = tl.arange(0, BLOCK_C)
    v = tl.load(v_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    return tl.sum(x * v, 0) * tl.rsqrt(mean_square + eps)


@triton.jit
def score_kernel(x_ptr, v_ptr, scores_ptr, eps, D: tl.constexpr, BLOCK_C: tl.constexpr):
    """Score one token of x (tokens, D)."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(scores_ptr + token, score_of(x, v_ptr, tl.sum(x * x, 0) / D, eps, D, BLOCK_C))


@triton.jit(do_not_specialize=INTS)
def choose_kernel(
    x_ptr,  # (batch, D)
    v_ptr,  # (D,): the router's vector
    light_ptr, heavy_ptr,  # (D,): weights of the branches' norms, or None
    position_ptr,  # (batch,) int64: how many tokens came before
    scores_ptr,  # (batch, MEMORY) fp32: ring
    threshold_ptr,  # (batch,) fp32
    taken_ptr,  # (batch,) int64
    tokens_ptr,  # (batch, WINDOW, D): ring; or None
    gates_ptr,  # (batch,) fp32, written: 0 where not chosen
    to_light_ptr, to_heavy_ptr,  # (batch, D), written: x, normed
    numerator, denominator,  # the share
    light_eps, heavy_eps, score_eps, eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens that share a threshold
    MEMORY: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Score, choose and norm one token of a sequence."""
    b = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < D
    token = tl.load(x_ptr + b * D + cols, mask=inside, other=0.0)
    i = tl.load(position_ptr + b)
    if tokens_ptr is not None:
        tl.store(tokens_ptr + (b * WINDOW + i % WINDOW) * D + cols, token, mask=inside)
    x = token.to(tl.float32)
    mean_square = tl.sum(x * x, 0) / D
    light = x * tl.rsqrt(mean_square + light_eps)
    if light_ptr is not None:
        light *= tl.load(light_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_light_ptr + b * D + cols, light.to(token.dtype), mask=inside)
    heavy = x * tl.rsqrt(mean_square + heavy_eps)
    if heavy_ptr is not None:
        heavy *= tl.load(heavy_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_heavy_ptr + b * D + cols, heavy.to(token.dtype), mask=inside)
    score = score_of(x, v_ptr, mean_square, score_eps, D, BLOCK_C)
    threshold = tl.load(threshold_ptr + b)
    taken = tl.load(taken_ptr + b)
    budget = ((i // BLOCK + 1) * BLOCK * numerator + denominator - 1) // denominator
    chosen = (score > threshold) & (taken < budget)
    gate = 1.0 / (1.0 + tl.exp((threshold - score) / eps))
    tl.store(gates_ptr + b, tl.where(chosen, gate, 0.0))
    tl.store(taken_ptr + b, taken + chosen.to(tl.int64))
    tl.store(scores_ptr + b * MEMORY + i % MEMORY, score)


@triton.jit
def gates_of(gates_ptr, ROWS: tl.constexpr, BLOCK_B: tl.constexpr):
    rows = tl.arange(0, BLOCK_B)
    return tl.load(gates_ptr + rows, mask=rows < ROWS, other=0.0)


@triton.jit
def product(
    x_ptr, w_ptr, bias_ptr, cols, real, N: tl.constexpr, K: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return (BLOCK_B, BLOCK_N) in fp32 of x (BLOCK_B, K) times rows `cols` of w (N, K), plus the bias.

    Rows of x that are not `real` count as 0, and are not read.
    """
    rows = tl.arange(0, BLOCK_B)
    acc = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=4):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + (rows * K)[:, None] + k[None, :], mask=real[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + (cols * K)[:, None] + k[None, :], mask=(cols < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def store_rows(y_ptr, y, cols, GELU: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, BLOCK_B: tl.constexpr):
    rows = tl.arange(0, BLOCK_B)
    if GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    mask = (rows < ROWS)[:, None] & (cols < N)[None, :]
    tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def both_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr,  # light: (rows, K), (N, K), (N,) or None, (rows, N)
    heavy_x_ptr, heavy_w_ptr, heavy_bias_ptr, heavy_y_ptr,  # heavy, with N_HEAVY
    gates_ptr,  # (rows,): without a gate > 0 the heavy result is not written
    GELU: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, N_HEAVY: tl.constexpr, K: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Light and heavy linear layers side by side, each with its own output."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, real = tl.program_id(0), tl.arange(0, BLOCK_B) < ROWS
    if tile < TILES:
        cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        y = product(x_ptr, w_ptr, bias_ptr, cols, real, N, K, BLOCK_B, BLOCK_N, BLOCK_K)
        store_rows(y_ptr, y, cols, GELU, ROWS, N, BLOCK_B)
    elif tl.max(gates_of(gates_ptr, ROWS, BLOCK_B), 0) > 0:
        cols = (tile - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
        y = product(heavy_x_ptr, heavy_w_ptr, heavy_bias_ptr, cols, real, N_HEAVY, K, BLOCK_B, BLOCK_N, BLOCK_K)
        store_rows(heavy_y_ptr, y, cols, GELU, ROWS, N_HEAVY, BLOCK_B)


@triton.jit
def sum_kernel(
    x_ptr, w_ptr, bias_ptr,  # light: (rows, K), (N, K), (N,) or None
    heavy_x_ptr, heavy_w_ptr, heavy_bias_ptr,  # heavy, with K_HEAVY
    gates_ptr,  # (rows,)
    null_ptr,  # (N,): added to tokens that are not chosen; or None
    residual_ptr,  # (rows, N)
    y_ptr,  # (rows, N)
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_HEAVY: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Residual + light + null + gate·(heavy − null)."""
    rows = tl.arange(0, BLOCK_B)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < ROWS)[:, None] & (cols < N)[None, :]
    gates = gates_of(gates_ptr, ROWS, BLOCK_B)
    y = product(x_ptr, w_ptr, bias_ptr, cols, rows < ROWS, N, K, BLOCK_B, BLOCK_N, BLOCK_K)
    y += tl.load(residual_ptr + (rows * N)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if null_ptr is not None:
        y += tl.load(null_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :] * (1.0 - gates)[:, None]
    if tl.max(gates, 0) > 0:
        # rows that are not chosen were not written: don't read them
        chosen = gates > 0
        heavy = product(heavy_x_ptr, heavy_w_ptr, heavy_bias_ptr, cols, chosen, N, K_HEAVY, BLOCK_B, BLOCK_N, BLOCK_K)
        y += tl.where(chosen[:, None], gates[:, None] * heavy, 0.0)
    store_rows(y_ptr, y, cols, False, ROWS, N, BLOCK_B)


@triton.jit
def turned(x_ptr, weight_ptr, channel, cos, sin, eps, HALF: tl.constexpr):
    """Return both halves of a head's rotated channels, rounded as memory holds them; with a weight, normed before."""
    left = tl.load(x_ptr + channel, mask=channel < HALF, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * HALF) + eps)
        left *= scale * tl.load(weight_ptr + channel, mask=channel < HALF, other=0.0).to(tl.float32)
        right *= scale * tl.load(weight_ptr + HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    return (left * cos - right * sin).to(kind), (left * sin + right * cos).to(kind)


@triton.jit
def more_keys(
    m, weight, acc, left, right, keys_ptr, values_ptr, rows, visible, scale, HALF: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Return the running maximum, sum of weights and weighted sum of values, with the keys at `rows` added."""
    channel, wide = tl.arange(0, BLOCK_H), tl.arange(0, 2 * BLOCK_H)
    mask = visible[:, None] & (channel < HALF)[None, :]
    at = keys_ptr + rows[:, None] + channel[None, :]
    logits = tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * left.to(tl.float32)[None, :], 1)
    logits += tl.sum(tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32) * right.to(tl.float32)[None, :], 1)
    logits = tl.where(visible, logits * scale, float("-inf"))
    top = tl.maximum(m, tl.max(logits, 0))
    # while no key is seen, −∞ − −∞ would be NaN
    base = tl.where(top > float("-inf"), top, 0.0)
    p = tl.where(visible, tl.exp(logits - base), 0.0)
    mask = visible[:, None] & (wide < 2 * HALF)[None, :]
    values = tl.load(values_ptr + rows[:, None] + wide[None, :], mask=mask, other=0.0).to(tl.float32)
    before = tl.exp(m - base)
    return top, weight * before + tl.sum(p, 0), acc * before + tl.sum(values * p[:, None], 0)


@triton.jit
def store_part(m, weight, acc, sums_ptr, weights_ptr, tops_ptr, at, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr):
    """Store the sums and the maximum of one part of the keys, for `merge_kernel`."""
    wide = tl.arange(0, 2 * BLOCK_H)
    tl.store(weights_ptr + at, weight)
    tl.store(tops_ptr + at, m)
    tl.store(sums_ptr + at * WIDTH + wide, acc, mask=wide < WIDTH)


@triton.jit
def near_kernel(
    qkv_ptr,  # (batch, 3, HEADS, 2·HALF)
    q_weight_ptr, k_weight_ptr,  # (2·HALF,): of the heads' norms, or None
    position_ptr,  # (batch,) int64
    keys_ptr, values_ptr,  # (batch, PLACES, HEADS, 2·HALF): rings; this token's key and value are written
    out_ptr,  # (batch, HEADS, 2·HALF), written where there is one part
    sums_ptr,  # (batch, HEADS, PARTS, 2·HALF) fp32, written where there are several: see `merge_kernel`
    weights_ptr, tops_ptr,  # (batch, HEADS, PARTS) fp32, likewise
    scale, eps, log2_base_high, log2_base_low,
    HEADS: tl.constexpr, HALF: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: every token is seen, and has a place of its own
    PLACES: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with one head to one part of the places: this window's tokens and those of the window before, or all."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    WIDTH: tl.constexpr = 2 * HALF
    PART: tl.constexpr = ((PLACES + PARTS - 1) // PARTS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    i = tl.load(position_ptr + b)
    channel, wide = tl.arange(0, BLOCK_H), tl.arange(0, 2 * BLOCK_H)
    cos, sin = cos_sin(i, channel, log2_base_high, log2_base_low, HALF)
    qkv_ptr += (b * (3 * HEADS) + h) * WIDTH
    q_left, q_right = turned(qkv_ptr, q_weight_ptr, channel, cos, sin, eps, HALF)
    first, at = part * PART, (i % PLACES).to(tl.int32)
    m, weight, acc = float("-inf"), 0.0, tl.zeros((2 * BLOCK_H,), tl.float32)
    if (at >= first) & (at < first + PART):
        # the token itself comes from registers, because other threads may not see it in memory yet
        k_left, k_right = turned(qkv_ptr + HEADS * WIDTH, k_weight_ptr, channel, cos, sin, eps, HALF)
        value = tl.load(qkv_ptr + 2 * HEADS * WIDTH + wide, mask=wide < WIDTH, other=0.0)
        row = ((b * PLACES + at) * HEADS + h) * WIDTH
        tl.store(keys_ptr + row + channel, k_left, mask=channel < HALF)
        tl.store(keys_ptr + row + HALF + channel, k_right, mask=channel < HALF)
        tl.store(values_ptr + row + wide, value, mask=wide < WIDTH)
        m = scale * tl.sum(
            q_left.to(tl.float32) * k_left.to(tl.float32) + q_right.to(tl.float32) * k_right.to(tl.float32), 0
        )
        weight, acc = 1.0, value.to(tl.float32)
    max_age = i
    if WINDOW:
        max_age = tl.minimum(i, i % WINDOW + WINDOW)
    end = tl.minimum(tl.minimum(i + 1, PLACES).to(tl.int32), first + PART)
    for start in tl.range(first, end, BLOCK_N, num_stages=2):
        place = start + tl.arange(0, BLOCK_N)
        age = tl.where(place <= at, at - place, at - place + PLACES)
        visible = (place < end) & (age > 0) & (age <= max_age)
        rows = ((b * PLACES + place) * HEADS + h) * WIDTH
        m, weight, acc = more_keys(
            m, weight, acc, q_left, q_right, keys_ptr, values_ptr, rows, visible, scale, HALF, BLOCK_H
        )
    if PARTS == 1:
        kind = out_ptr.dtype.element_ty
        tl.store(out_ptr + (b * HEADS + h) * WIDTH + wide, (acc / weight).to(kind), mask=wide < WIDTH)
    else:
        at_part = (b * HEADS + h) * PARTS + part
        store_part(m, weight, acc, sums_ptr, weights_ptr, tops_ptr, at_part, WIDTH, BLOCK_H)


@triton.jit
def far_kernel(
    q_ptr,  # (batch, HEADS, 2·HALF)
    position_ptr,  # (batch,) int64
    gates_ptr,  # (batch,)
    keys_ptr, values_ptr,  # (batch, PLACES, HEADS, 2·HALF): what earlier windows gave, QUOTA each
    sums_ptr,  # (batch, HEADS, PARTS, 2·HALF) fp32, written: sums of values, of weights and maxima, of each part
    weights_ptr, tops_ptr,  # (batch, HEADS, PARTS) fp32
    scale, log2_base_high, log2_base_low,
    HEADS: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, QUOTA: tl.constexpr, PLACES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with one head of a chosen token to one part of the keys."""
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if tl.load(gates_ptr + b) > 0:
        WIDTH: tl.constexpr = 2 * HALF
        PART: tl.constexpr = ((PLACES + PARTS - 1) // PARTS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        i = tl.load(position_ptr + b)
        channel = tl.arange(0, BLOCK_H)
        cos, sin = cos_sin(i, channel, log2_base_high, log2_base_low, HALF)
        left, right = turned(q_ptr + (b * HEADS + h) * WIDTH, None, channel, cos, sin, 0.0, HALF)
        first = part * PART
        end = tl.minimum((i // WINDOW * QUOTA).to(tl.int32), first + PART)
        m, weight, acc = float("-inf"), 0.0, tl.zeros((2 * BLOCK_H,), tl.float32)
        for start in tl.range(first, end, BLOCK_N, num_stages=2):
            place = start + tl.arange(0, BLOCK_N)
            rows = ((b * PLACES + place) * HEADS + h) * WIDTH
            m, weight, acc = more_keys(
                m, weight, acc, left, right, keys_ptr, values_ptr, rows, place < end, scale, HALF, BLOCK_H
            )
        at = (b * HEADS + h) * PARTS + part
        store_part(m, weight, acc, sums_ptr, weights_ptr, tops_ptr, at, WIDTH, BLOCK_H)


@triton.jit
def merge_kernel(
    sums_ptr, weights_ptr, tops_ptr,  # as `near_kernel` and `far_kernel` write them
    gates_ptr,  # (batch,); None: all tokens are chosen
    out_ptr,  # (batch, HEADS, 2·HALF)
    HEADS: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a chosen token's head; without any key the result is 0."""
    h, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    gate = 1.0
    if gates_ptr is not None:
        gate = tl.load(gates_ptr + b)
    if gate > 0:
        WIDTH: tl.constexpr = 2 * HALF
        part, wide = tl.arange(0, BLOCK_P), tl.arange(0, 2 * BLOCK_H)
        at = (b * HEADS + h) * PARTS + part
        weights = tl.load(weights_ptr + at, mask=part < PARTS, other=0.0)
        tops = tl.load(tops_ptr + at, mask=part < PARTS, other=float("-inf"))
        scales = tl.where(weights > 0, tl.exp(tops - tl.max(tops, 0)), 0.0)
        mask = (part < PARTS)[:, None] & (wide < WIDTH)[None, :]
        sums = tl.load(sums_ptr + (at * WIDTH)[:, None] + wide[None, :], mask=mask, other=0.0)
        total = tl.sum(scales * weights, 0)
        y = tl.sum(sums * scales[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out_ptr + (b * HEADS + h) * WIDTH + wide, y.to(out_ptr.dtype.element_ty), mask=wide < WIDTH)
