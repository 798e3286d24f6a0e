"""The definition of `weighted_sum`: the tests' oracle, and what runs on a CPU, in float64 and without Triton.

Forward avoids matrix products: in a BLAS, the number of rows and their alignment change the order of a row's sum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops._shared.arguments import accumulator

# products at a time: they stay in a core's cache until they are added up
AT_ONCE = 1 << 17


def definition(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return y[..., r] = Σ_d x[..., d]·weight[r, d] (no r for a 1-D weight), added up in fp32 or wider."""
    wide, rows = accumulator(x, weight), x if weight.dim() == 1 else x[..., None, :]
    y = row_sum((rows.to(wide) * weight.to(wide)).contiguous())[..., 0]
    return y.to(out_dtype or torch.promote_types(x.dtype, weight.dtype))


def forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """Return the definition of some rows at a time; on a GPU of all, as each part costs launches."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    height = max(1, len(rows) if x.is_cuda else AT_ONCE // max(1, weight.numel()))
    parts = [definition(part, weight, out_dtype=out_dtype) for part in rows.split(height)]  # type: ignore[no-untyped-call]
    # no view: autograd forbids to change one in place
    return torch.ops.aten._unsafe_view(torch.cat(parts), x.shape[:-1] + weight.shape[:-1])  # type: ignore[no-any-return]


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx = Σ_r dy[:, r]·weight[r] and dweight[r] = Σ_rows dy[:, r]·x; only the latter reads x."""
    wide, shape = accumulator(x, weight), (math.prod(x.shape[:-1]), x.shape[-1])
    vectors = weight if weight.dim() == 2 else weight[None]
    dy = dy.reshape(shape[0], len(vectors)).to(wide)
    dx = (dy @ vectors.to(wide)).to(x.dtype) if need_x else None
    return dx, (dy.mT @ x.reshape(shape).to(wide)).to(weight.dtype).view(weight.shape) if need_w else None
