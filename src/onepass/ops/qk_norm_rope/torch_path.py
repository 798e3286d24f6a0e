"""The torch path of qk_norm_rope: on a CPU, in float64, without Triton, and for heads too wide for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first 2·cos.shape[-1] columns of x."""
    half = cos.shape[-1]
    rotated = x.clone()
    if interleaved:
        a, b, new_a, new_b = (t[..., i : 2 * half : 2] for t in (x, rotated) for i in (0, 1))
    else:
        a, b, new_a, new_b = (t[..., i : i + half] for t in (x, rotated) for i in (0, half))
    new_a.copy_(a * cos - b * sin)
    new_b.copy_(b * cos + a * sin)
    return rotated


def _angles(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the tokens, in fp32 or wider, to be broadcast over heads; NaN outside of the table."""
    wide = torch.promote_types(x.dtype, torch.float32)
    at = torch.arange(x.shape[-3], device=x.device) if positions is None else positions
    inside = (at >= 0) & (at < cos.shape[0])
    of_tokens = (t.to(wide)[torch.where(inside, at, 0)] for t in (cos, sin))
    cos, sin = (torch.where(inside[..., None], t, torch.nan)[..., None, :] for t in of_tokens)
    return cos, sin


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    f = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    rstd = row_sum(f.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    return f * rstd, rstd


def forward(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float, offset: float,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Return x (..., T, heads, D) normed and rotated."""
    n, _ = _normed(x, eps)
    n = n if weight is None else n * (weight.to(n.dtype) + offset)
    return rotated(n, cos, sin, positions, interleaved).to(x.dtype)


def rotated(n: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """Return n (..., T, heads, D) rotated."""
    return _rotate(n, *_angles(n, cos, sin, positions), interleaved)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
    offset: float, interleaved: bool, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx and dw in the dtypes of x and weight; None for those not needed."""
    n, rstd = _normed(x, eps)
    cos, sin = _angles(x, cos, sin, positions)
    g = _rotate(dy.to(n.dtype), cos, -sin, interleaved)
    dx = dw = None
    if need_w and weight is not None:
        dw = (g * n).sum_to_size(weight.shape).to(weight.dtype)
    if need_x:
        g = g if weight is None else g * (weight.to(n.dtype) + offset)
        along = torch.linalg.vecdot(g, n)[..., None] / x.shape[-1]
        dx = ((g - n * along) * rstd).to(x.dtype)
    return dx, dw
