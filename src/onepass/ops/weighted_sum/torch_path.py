"""What runs on a CPU, in float64 and without Triton.

No matrix product forward: which of a BLAS's kernels adds up a row, and in which order, depends on how many rows there
are and where they lie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import row_sum

# products that stay in a core's cache until they are added up
GROUP = 1 << 17


def _wide(x_dtype: torch.dtype, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x_dtype, weight.dtype), torch.float32)


def forward(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """X (..., D), weight (D,) or (R, D) → (...,) or (..., R) of `dtype`, summed in fp32 or wider."""
    wide = _wide(x.dtype, weight)
    rows, vectors = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1]), weight.to(wide)
    height = max(1, GROUP // max(1, weight.numel()))
    # on a GPU a group would be a launch
    if x.is_cuda or len(rows) <= height:
        y = row_sum((rows.to(wide) * vectors).contiguous())
    else:
        room = torch.empty((height, weight.numel() // x.shape[-1], x.shape[-1]), dtype=wide)
        groups = rows.split(height)  # type: ignore[no-untyped-call]
        y = torch.cat([row_sum(torch.mul(some, vectors, out=room[: len(some)])) for some in groups])
    return y.to(dtype).reshape(x.shape[:-1] + weight.shape[:-1])


def backward(dy: Tensor, x: Tensor | None, weight: Tensor, x_dtype: torch.dtype, need_x: bool) -> tuple[Tensor, Tensor]:
    """Dx = Σ_r dy[..., r]·weight[r]; dweight[r] = Σ_rows dy[..., r]·x; rows flattened, weight (R, D).

    x is None when dweight is not needed; what is not needed comes back empty.
    """
    acc = _wide(x_dtype, weight)
    dx, dw = weight.new_empty(0, dtype=x_dtype), weight.new_empty(0)
    if need_x:
        dx = (dy.to(acc) @ weight.to(acc)).to(x_dtype)
    if x is not None:
        dw = (dy.to(acc).mT @ x.to(acc)).to(weight.dtype)
    return dx, dw
