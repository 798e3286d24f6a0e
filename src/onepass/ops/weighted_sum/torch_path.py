"""The torch path: on a CPU, in float64 and without Triton.

Forward avoids matrix products: in a BLAS, the number of rows and their alignment change the order of a row's sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import row_sum

# number of products per group: they stay in a core's cache until they are added up
GROUP = 1 << 17


def _wide(x_dtype: torch.dtype, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x_dtype, weight.dtype), torch.float32)


def forward(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (...,) or (..., R) of `dtype` from x (..., D) and weight (D,) or (R, D), summed in fp32 or wider."""
    wide = _wide(x.dtype, weight)
    rows, vectors = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1]), weight.to(wide)
    height = max(1, GROUP // max(1, weight.numel()))
    # on a GPU all rows are one group: each group costs launches
    if x.is_cuda or len(rows) <= height:
        y = row_sum((rows.to(wide) * vectors).contiguous())
    else:
        room = torch.empty((height, weight.numel() // x.shape[-1], x.shape[-1]), dtype=wide, device=x.device)
        groups = rows.split(height)  # type: ignore[no-untyped-call]
        y = torch.cat([row_sum(torch.mul(some, vectors, out=room[: len(some)])) for some in groups])
    return y.to(dtype).reshape(x.shape[:-1] + weight.shape[:-1])


def backward(dy: Tensor, x: Tensor | None, weight: Tensor, x_dtype: torch.dtype, need_x: bool) -> tuple[Tensor, Tensor]:
    """Return dx = Σ_r dy[:, r]·weight[r] and dweight[r] = Σ_rows dy[:, r]·x.

    dy is (rows, R), x and dx (rows, D), weight (R, D). Without need_x, dx is empty. If x is None, dweight is empty.
    """
    acc = _wide(x_dtype, weight)
    dx, dw = weight.new_empty(0, dtype=x_dtype), weight.new_empty(0)
    if need_x:
        dx = (dy.to(acc) @ weight.to(acc)).to(x_dtype)
    if x is not None:
        dw = (dy.to(acc).mT @ x.to(acc)).to(weight.dtype)
    return dx, dw
