"""Order the survivors of a selection, and deliver their scores and gates."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .kernels_keys import COUNTERS, EMPTY, LOW, is_nan, ordered, to_column


class Results(NamedTuple):
    """Where a kernel takes values and gates from, and where its results go."""

    s_ptr: Any  # scores
    y_ptr: Any  # soft gates like s; None: the gates are 1
    index_ptr: Any  # int32 or int64: columns, then -1
    value_ptr: Any  # like s
    gate_ptr: Any  # like s, or None


@triton.jit
def deliver(to, index, at, wanted, nan, s_row, y_row, LARGEST: tl.constexpr):
    """Store columns, their scores and gates; -inf (of the smallest: inf) and 0 where the column is -1."""
    tl.store(to.index_ptr + at, index.to(to.index_ptr.dtype.element_ty), mask=wanted)
    found = wanted & (index >= 0)
    score = tl.load(to.s_ptr + s_row + index, mask=found, other=-float("inf") if LARGEST else float("inf"))
    tl.store(to.value_ptr + at, score, mask=wanted)
    if to.gate_ptr is not None:
        if to.y_ptr is None:
            # the gates of a row with a NaN are NaN
            gate = tl.where(found, tl.where(nan, float("nan"), 1.0), 0.0)
        else:
            gate = tl.load(to.y_ptr + y_row + index, mask=found, other=0.0)
        tl.store(to.gate_ptr + at, gate.to(to.gate_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def by_column(index):
    """Return columns (…, k) in ascending order, those that are -1 last."""
    index = tl.sort(tl.where(index < 0, 0x7FFFFFFF, index))
    return tl.where(index == 0x7FFFFFFF, -1, index)


@triton.jit(do_not_specialize=["s_row_stride", "n_rows", "n_cols", "k"])
def sort_kernel(
    packed_ptr,  # (n_rows, k) int64: packed survivors
    state_ptr,  # (n_rows, COUNTERS) int32: the third says whether the survivors' order is not that of columns
    index_ptr,  # (n_rows, k) int32 or int64: columns, then -1
    s_ptr,  # (n_rows, n_cols) scores
    y_ptr,  # (n_rows, n_cols) soft gates, like s, or None
    value_ptr,  # (n_rows, k) scores of the survivors, like s
    gate_ptr,  # (n_rows, k) gates of the survivors, like s, or None
    s_row_stride,
    n_rows,
    n_cols,
    k,
    SORTED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Order whole rows of survivors, best score first, or by column."""
    rows = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_K)[None, :]
    wanted = (rows < n_rows) & (cols < k)
    at = rows * k + cols
    packed = tl.load(packed_ptr + at, mask=wanted, other=EMPTY)
    nan = (tl.max(is_nan(packed).to(tl.int32), 1) > 0)[:, None]
    if SORTED:
        index = to_column(tl.sort(ordered(packed), 1, descending=True))
    else:
        low = (packed & LOW).to(tl.int32)
        disordered = tl.load(state_ptr + rows * COUNTERS + 2, mask=rows < n_rows, other=0)
        if tl.max(tl.max(disordered, 1), 0) > 0:
            low = tl.sort(low, 1, descending=True)
        index = to_column(low.to(tl.int64))
    to = Results(s_ptr, y_ptr, index_ptr, value_ptr, gate_ptr)
    deliver(to, index, at, wanted, nan, rows * s_row_stride, rows * n_cols, LARGEST)
