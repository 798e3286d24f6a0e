"""The gradients of chosen entries, added to those of whole rows; the gates' own gradient is soft_topk's."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch

# chosen entries of a program
BLOCK = 1024


@triton.jit(do_not_specialize=["g_row_stride", "g_col_stride", "n_rows", "n_cols", "k"])
def add_kernel(
    index_ptr,  # (n_rows, k) int32 or int64, contiguous: columns, distinct within a row, or -1
    g_ptr,  # (n_rows, k) gradients of the chosen entries, any float
    ds_ptr,  # (n_rows, n_cols) any float, contiguous: they are added here
    g_row_stride,
    g_col_stride,
    n_rows,
    n_cols,
    k,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // k
    index = tl.load(index_ptr + at, mask=row < n_rows, other=-1)
    chosen = index >= 0
    g = tl.load(g_ptr + row * g_row_stride + (at - row * k) * g_col_stride, mask=chosen, other=0.0).to(tl.float32)
    ds = ds_ptr + row * n_cols + index
    g += tl.load(ds, mask=chosen, other=0.0).to(tl.float32)
    tl.store(ds, g.to(ds_ptr.dtype.element_ty), mask=chosen)


def add(ds: Tensor, indices: Tensor, gradient: Tensor) -> None:
    """Add the gradient (rows, k) of chosen entries to ds (rows, n); ds and indices (rows, k) are contiguous."""
    n_rows, k = indices.shape
    if not n_rows:
        return
    with device_guard(ds):
        launch(
            add_kernel, (cdiv(n_rows * k, BLOCK), 1, 1), (indices, gradient, ds),
            (*gradient.stride(), n_rows, ds.shape[1], k), (BLOCK,), num_warps=4,
        )  # fmt: skip
