"""Grouped products of our own, which gather tokens and activate, in the place of `kernels_rows`' steps.

For all dtypes and GPUs but bf16 on sm_90 and sm_100 with large matrices: there torch's products win by more than spread
and activation take. On other GPUs torch's make the host wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, gpu, launch, next_power_of_2, replayed
from onepass.ops._shared.kernels_partials import add_partials

from .kernels_rows import INTS, activation_parts, gather_sum, order

__all__ = ["gather_sum", "hidden", "hidden_backward", "order", "product", "spread", "weight_product"]

# most elements of an expert's `down` for which these products beat torch's
MOST = 1 << 19


@triton.jit(do_not_specialize=INTS)
def rows_kernel(
    a_ptr,  # (n, D) rows in the order of their experts, or for K > 0 their tokens (n / K, D); unit column stride
    b_ptr,  # (n_experts, D, M), any strides
    end_ptr,  # (n_experts,) int32
    row_ptr,  # (n,) int32: a row's choice; None: not needed
    out_ptr,  # (n, M), rows of H_ROW: a · b; with d_weight_ptr the gradient of h, may be h
    h_ptr,  # likewise: hidden units before the activation, or the gate's; None: a · b, or not needed
    weight_ptr,  # (n,) weights of the choices
    unit_ptr,  # (n, M) weighted hidden units; None: the product is all
    d_weight_ptr,  # (tiles of M, n) fp32: parts of the gradient of the weights; None: forward
    n, n_experts, K: tl.constexpr, D: tl.constexpr, M: tl.constexpr, A_ROW: tl.constexpr, B_EXPERT: tl.constexpr,
    B_ROW: tl.constexpr, B_COL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, H_ROW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out[p] = a[p] · b[expert of p], and what follows from it; each expert's rows have tiles of their own.

    GATED: M columns behind those of h, and of out in the backward pass, are the linear part's. Neighbouring programs
    read the same rows; strides are constants, from which Triton proves how rows are aligned.
    """
    dtype = out_ptr.dtype.element_ty
    PARTS: tl.constexpr = (M + BLOCK_C - 1) // BLOCK_C
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    # expert e has the tiles from starts // BLOCK_R + e on: as many as its rows need, or one more
    wide = tl.arange(0, WIDTH)
    starts = tl.load(end_ptr + wide - 1, mask=(wide > 0) & (wide <= n_experts), other=0)
    e = tl.sum(((wide <= n_experts) & (starts // BLOCK_R + wide <= tile)).to(tl.int32), 0) - 1
    # the last "expert" has the rows of none
    start = tl.load(end_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(end_ptr + e, mask=e < n_experts, other=n)
    first = start + (tile - start // BLOCK_R - e) * BLOCK_R
    if first < end:
        # rows beyond the end repeat the last and are not written
        p = first + tl.arange(0, BLOCK_R)
        inside = tl.minimum(p, end - 1)
        row = inside if row_ptr is None else tl.load(row_ptr + inside)
        dot = tl.zeros((BLOCK_R,), tl.float32)
        if e < n_experts:
            source, d = (row // K if K else inside).to(tl.int64), tl.arange(0, BLOCK_D)
            cols = part * BLOCK_C + tl.arange(0, BLOCK_C)
            x_ptr = a_ptr + (source * A_ROW)[:, None] + d[None, :]
            y_ptr = b_ptr + e.to(tl.int64) * B_EXPERT + (d.to(tl.int64) * B_ROW)[:, None]
            y_ptr += (cols.to(tl.int64) * B_COL)[None, :]
            total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            for depth in range(0, D, BLOCK_D):
                deep = d < D - depth
                x = tl.load(x_ptr, mask=deep[None, :], other=0.0)
                y = tl.load(y_ptr, mask=deep[:, None] & (cols < M)[None, :], other=0.0)
                total = tl.dot(x, y, total, input_precision="ieee")
                x_ptr += BLOCK_D
                y_ptr += BLOCK_D * B_ROW
            halves = (total,)
            if SPLIT:
                # half the columns at a time need half the registers
                halves = tl.split(tl.permute(tl.reshape(total, (BLOCK_R, 2, BLOCK_C // 2)), (0, 2, 1)))
            WIDE: tl.constexpr = BLOCK_C // len(halves)
            w = tl.load(weight_ptr + row).to(tl.float32)[:, None] if unit_ptr is not None else 1.0
            for i in tl.static_range(len(halves)):
                cols = part * BLOCK_C + i * WIDE + tl.arange(0, WIDE)
                at, mask = (p.to(tl.int64) * H_ROW)[:, None] + cols[None, :], (p < end)[:, None] & (cols < M)[None, :]
                out = halves[i]
                if d_weight_ptr is None:
                    tl.store(out_ptr + at, out.to(dtype), mask=mask)
                    out = out.to(dtype).to(tl.float32)
                if unit_ptr is not None:
                    h = out if h_ptr is None else tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
                    units, slope = activation_parts(h, not GATED)
                    if GATED:
                        linear = out
                        if d_weight_ptr is not None:
                            linear = tl.load(h_ptr + M + at, mask=mask, other=0.0).to(tl.float32)
                        d_linear = out * units * w
                        units, slope = units * linear, slope * linear
                    if d_weight_ptr is not None:
                        dot += tl.sum(out * units, 1)
                        # other threads may overwrite h than those that read it
                        tl.debug_barrier()
                        if GATED:
                            tl.store(out_ptr + M + at, d_linear.to(dtype), mask=mask)
                        tl.store(out_ptr + at, (out * slope * w).to(dtype), mask=mask)
                    unit_at = (p.to(tl.int64) * M)[:, None] + cols[None, :]
                    tl.store(unit_ptr + unit_at, (units * w).to(dtype), mask=mask)
        if d_weight_ptr is not None:
            # 0 for choices of no expert
            tl.store(d_weight_ptr + part.to(tl.int64) * n + row, dot, mask=p < end)


@triton.jit
def weights_kernel(
    a_ptr,  # (n, P) rows in the order of their experts, or for A_K > 0 their tokens (n / A_K, P); unit column stride
    b_ptr,  # (n, Q) or tokens (n / B_K, Q), likewise
    end_ptr,  # (n_experts,) int32
    row_ptr,  # (n,) int32: a row's choice
    out_ptr,  # (n_experts, P, Q), contiguous
    A_K: tl.constexpr, B_K: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ a[p]ᵀ · b[p] over the rows p of an expert, in their order."""
    Q_TILES: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P * Q_TILES
    e, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    end = tl.load(end_ptr + e)
    start = tl.load(end_ptr + e - 1, mask=e > 0, other=0)
    p = (tile // Q_TILES * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
    q = (tile % Q_TILES * BLOCK_Q + tl.arange(0, BLOCK_Q))[None, :]
    total = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for first in range(start, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row, inside = tl.load(row_ptr + n, mask=n < end, other=0), n < end
        x_ptr = a_ptr + ((row // A_K if A_K else n).to(tl.int64) * A_ROW)[None, :] + p
        y_ptr = b_ptr + ((row // B_K if B_K else n).to(tl.int64) * B_ROW)[:, None] + q
        x = tl.load(x_ptr, mask=inside[None, :] & (p < P), other=0.0)
        y = tl.load(y_ptr, mask=inside[:, None] & (q < Q), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out_ptr + (e * P + p) * Q + q, total.to(out_ptr.dtype.element_ty), mask=(p < P) & (q < Q))


def _shares_much(x: Tensor) -> bool:
    """Return whether a program has 227 KB of shared memory."""
    return gpu(x).shared >= 232448


def takes(x: Tensor, *matrices: Tensor) -> bool:
    """Return whether these products compute the experts' layer, not torch's with `kernels_rows` around them."""
    # on others torch's grouped product of bf16 makes the host wait
    torch_waits = gpu(x).capability[0] not in (9, 10)
    few_elements = matrices[-1].shape[1] * matrices[-1].shape[2] <= MOST
    if torch_waits or x.dtype != torch.bfloat16 or (few_elements and _shares_much(x)):
        return True
    # torch takes matrices that lie row by row or column by column, in rows of whole 16 bytes
    by_row = [m if m.stride(2) == 1 else m.mT for m in matrices]
    fit = (m.stride(2) == 1 and m.stride(1) >= m.shape[2] and m.stride(0) > 0 for m in by_row)
    return not all(fit) or any(m.data_ptr() % 16 or m.stride(0) % 8 or m.stride(1) % 8 for m in by_row)


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Return tokens x with unit column stride: these products find the tokens of their rows by themselves."""
    return x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()


def _rows_tile(x: Tensor, m: int, follows: str = "", gated: bool = False) -> tuple[int, int, int, int, int, bool]:
    """Return rows, columns and depth of a tile, warps, stages, and whether what follows takes half of the columns."""
    if x.element_size() > 2:
        return 64, 64, 32, 4, 3, False
    if follows == "forward" or not _shares_much(x):
        return 128, 128, 64, 8, 3, follows == "backward"
    # wide tiles where there are enough of them for all multiprocessors
    is_wide = not follows and m % 256 == 0 and m >= 512
    return (128, 256, 64, 8, 3, False) if is_wide else (64, 128, 64, 8 if gated else 4, 3, follows == "backward")


def _rows(
    tile: tuple[int, int, int, int, int, bool], a: Tensor, k: int, b: Tensor, ends: Tensor, rows: Tensor | None,
    out: Tensor, *others: Tensor | None, gated: bool = False,
) -> None:  # fmt: skip
    """Launch `rows_kernel`; the last tensors that are None may be left out."""
    (experts, d, m), n, (block_r, block_c, block_d, warps, stages, split) = b.shape, len(out), tile
    programs, width = (n // block_r + experts + 1) * cdiv(m, block_c), next_power_of_2(experts + 1)
    tensors = (a, b, ends, rows, out, *others, *(None,) * (4 - len(others)))
    constants = (k, d, m, a.stride(0), *b.stride(), width, block_r, block_c, block_d, split, out.stride(0), gated)
    launch(rows_kernel, (programs, 1, 1), tensors, (n, experts), constants, num_warps=warps, num_stages=stages)


@replayed
def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a[p] · b[expert of p] for rows a (N, D) and b (E, D, M); rows of no expert are undefined."""
    out = torch.empty((len(a), b.shape[2]), dtype=a.dtype, device=a.device)
    _rows(_rows_tile(a, b.shape[2]), a, 0, b, ends, None, out)
    return out


@replayed
def hidden(
    x: Tensor, up: Tensor, weights: Tensor, places: Tensor, rows: Tensor, ends: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return what the activation takes, and the weighted hidden units (N, width)."""
    x, k, gated = spread(x, places), places.shape[1], up.shape[2] > width
    h, units = (torch.empty((len(rows), m), dtype=x.dtype, device=x.device) for m in (up.shape[2], width))
    out = h
    if gated:
        gate, up, out = up[..., :width], up[..., width:], h[:, width:]
        _rows(_rows_tile(x, width), x, k, gate, ends, rows, h)
    _rows(_rows_tile(x, width, "forward"), x, k, up, ends, rows, out, h if gated else None, weights, units, gated=gated)
    return h, units


@replayed
def hidden_backward(
    dy: Tensor, down: Tensor, h: Tensor, weights: Tensor, rows: Tensor, ends: Tensor, spare: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradient of h (None: h became it), the weighted hidden units and the gradient of the weights."""
    width, dh, d_weights = down.shape[1], None if spare else torch.empty_like(h), torch.empty_like(weights)
    gated = h.shape[1] > width
    tile = _rows_tile(dy, width, "backward", gated)
    units = torch.empty((len(h), width), dtype=h.dtype, device=h.device)
    parts = torch.empty((cdiv(width, tile[1]), len(h)), dtype=torch.float32, device=h.device)
    outputs = h if dh is None else dh, h, weights, units, parts
    _rows(tile, dy, weights.shape[1], down.mT, ends, rows, *outputs, gated=gated)
    add_partials(parts, d_weights, 1)
    return dh, units, d_weights


@replayed
def weight_product(tokens: Tensor, hidden: Tensor, rows: Tensor, ends: Tensor, by_hidden: bool) -> Tensor:
    """Return tokensᵀ · hidden over each expert's rows (E, dim, hidden), or for `by_hidden` (E, hidden, dim)."""
    experts, k = len(ends), len(rows) // len(tokens)
    a, b, *ks = (hidden, tokens, 0, k) if by_hidden else (tokens, hidden, k, 0)
    p, q = a.shape[1], b.shape[1]
    out = torch.empty((experts, p, q), dtype=a.dtype, device=a.device)
    block_n, block_p, block_q, warps, stages = 32, 64, 64, 4, 5
    if a.element_size() == 2 and _shares_much(a):
        block_n, block_p, block_q, warps = 64, 128, 128 if p % 256 or q % 256 else 256, 8
    constants = (*ks, p, q, a.stride(0), b.stride(0), block_n, block_p, block_q)
    grid = experts * cdiv(p, block_p) * cdiv(q, block_q), 1, 1
    launch(weights_kernel, grid, (a, b, ends, rows, out), (), constants, num_warps=warps, num_stages=stages)
    return out
