"""Triton backward of soft_topk where only some entries of a row have an upstream gradient, as the chosen ones of topk.

No row of gy is stored or read: Σ gy·w is a sum over the chosen entries, -q·w/eps goes to the whole row, and then the
chosen entries get their own gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, next_power_of_2
from onepass.ops._shared.kernels_gates import gates_and_slopes, offsets
from onepass.ops._shared.kernels_rows import load_option, pair_sum, scratch, stride, tile_cols, tile_rows, within

from . import kernels_backward

# chosen entries of a program at a time, and of a warp
BLOCK = 1024
PER_WARP = 256
SIZES = ("g_row_stride", "g_col_stride", "s_row_stride", "eps_stride", "n_rows", "n_cols", "k")


@triton.jit
def weigh(index_ptr, g_ptr, s_ptr, at, rows, here, inside, strides, base, c, eps, KIND: tl.constexpr):
    """Return columns of chosen entries, which of them exist, their φ', gy·φ', and offsets (0 where φ' is 0)."""
    index = tl.load(index_ptr + at, mask=inside, other=-1)
    found = index >= 0
    s = tl.load(s_ptr + rows * strides[2] + index, mask=found, other=-float("inf")).to(tl.float32)
    g = tl.load(g_ptr + rows * strides[0] + here * strides[1], mask=found, other=0.0).to(tl.float32)
    x = offsets(s, base, eps) - c
    _, w = gates_and_slopes(x, KIND)
    return index, found, w, tl.where(w > 0, g * w, 0.0), tl.where(w > 0, x, 0.0)


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(
    index_ptr,  # (n_rows, k) int32 or int64, contiguous: columns, distinct within a row, or -1
    g_ptr,  # (n_rows, k) gradients of the chosen entries, any float
    s_ptr,  # (n_rows, n_cols) any float, unit column stride
    eps_ptr,  # (n_rows,) any float, or None
    solution_ptr,  # (n_rows, 2) fp32: base and c
    sums_ptr,  # (n_rows, 2) fp32: Σ gy·w, Σ gy·w·x
    g_row_stride,
    g_col_stride,
    s_row_stride,
    eps_stride,
    n_rows,
    k,
    eps_value,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Whole rows: the sums over their chosen entries."""
    rows = tile_rows(BLOCK_R)
    in_rows = rows < n_rows
    eps = load_option(eps_ptr, eps_stride, eps_value, rows, n_rows)
    base = tl.load(solution_ptr + rows * 2, mask=in_rows, other=0.0)
    c = tl.load(solution_ptr + rows * 2 + 1, mask=in_rows, other=0.0)
    sum_gw = tl.zeros_like(base)
    sum_gwx = tl.zeros_like(base)
    for first in range(0, k, BLOCK_K):
        here = tile_cols(first, BLOCK_R, BLOCK_K)
        _, _, _, gw, x = weigh(
            index_ptr, g_ptr, s_ptr, rows * k + here, rows, here, within(rows, here, n_rows, k, BLOCK_R),
            (g_row_stride, g_col_stride, s_row_stride), base, c, eps, KIND,
        )  # fmt: skip
        a, b = pair_sum(gw, gw * x, BLOCK_R)
        sum_gw += a
        sum_gwx += b
    tl.store(sums_ptr + rows * 2, sum_gw, mask=in_rows)
    tl.store(sums_ptr + rows * 2 + 1, sum_gwx, mask=in_rows)


@triton.jit(do_not_specialize=SIZES)
def chosen_kernel(
    index_ptr,  # as for sums_kernel
    g_ptr,
    s_ptr,
    eps_ptr,
    solution_ptr,
    q_ptr,  # (n_rows,) fp32: Σ gy·w / Σ w
    ds_ptr,  # (n_rows, n_cols) like s, contiguous
    g_row_stride,
    g_col_stride,
    s_row_stride,
    eps_stride,
    n_rows,
    n_cols,
    k,
    eps_value,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite the gradient of the chosen entries."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // k
    inside = row < n_rows
    eps = load_option(eps_ptr, eps_stride, eps_value, row, n_rows)
    base = tl.load(solution_ptr + row * 2, mask=inside, other=0.0)
    c = tl.load(solution_ptr + row * 2 + 1, mask=inside, other=0.0)
    q = tl.load(q_ptr + row, mask=inside, other=0.0)
    index, found, w, gw, _ = weigh(
        index_ptr, g_ptr, s_ptr, at, row, at - row * k, inside, (g_row_stride, g_col_stride, s_row_stride), base, c,
        eps, KIND,
    )  # fmt: skip
    ds = (gw - q * w) * (1.0 / eps)
    tl.store(ds_ptr + row * n_cols + index, ds.to(ds_ptr.dtype.element_ty), mask=found)


def shape_of_sums(k: int) -> tuple[int, int, int]:
    """Return rows and entries of a program of sums_kernel, and its warps, by k alone: so are a row's bits."""
    block_k = min(BLOCK, max(8, next_power_of_2(k)))
    return max(1, PER_WARP // 2 // block_k), block_k, max(1, block_k // PER_WARP)


def backward(
    g: Tensor, indices: Tensor, s: Tensor, solution: Tensor, eps: Tensor | None, mask: Tensor | None, eps_value: float,
    kind: int, need_s: bool, need_eps: bool, ds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) in the dtype of s, or empty, and deps (rows, 1) in fp32, empty if not needed.

    g (rows, k) has any strides, indices (rows, k) are contiguous, s (rows, n) has unit column stride. A given ds,
    contiguous, is written to.
    """
    n_rows, k = indices.shape
    sums = scratch(s, n_rows, 2)
    strides = (*g.stride(), s.stride(0), stride(eps))
    with device_guard(s):
        if s.numel():
            block_r, block_k, warps = shape_of_sums(k)
            launch(
                sums_kernel, (cdiv(n_rows, block_r), 1, 1), (indices, g, s, eps, solution, sums),
                (*strides, n_rows, k, eps_value), (kind, block_r, block_k), num_warps=warps,
            )  # fmt: skip
        ds, q, deps = kernels_backward.backward(
            None, s, solution, eps, mask, eps_value, kind, need_s, need_eps, ds, sums
        )
        if s.numel() and need_s:
            launch(
                chosen_kernel, (cdiv(n_rows * k, BLOCK), 1, 1), (indices, g, s, eps, solution, q, ds),
                (*strides, n_rows, s.shape[1], k, eps_value), (kind, BLOCK), num_warps=8,
            )  # fmt: skip
    return ds, deps
