"""The definition of qk_norm_rope, and its torch path: of a CPU, float64 and heads too wide for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops.norm.definition import rms_norm


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q and k (..., T, heads, D), each head normed by its root mean square, its first columns rotated.

    Column i of 2·cos.shape[-1] columns is rotated with i + half of them, or, if interleaved, 2i with 2i + 1.
    """

    def one(x: Tensor, weight: Tensor | None) -> Tensor:
        n = rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps=eps, offset=offset)
        rotated, rest = n[..., : 2 * half], n[..., 2 * half :]
        a, b = rotated.reshape(*x.shape[:-1], *pairs).unbind(-1 if interleaved else -2)
        c, s = (t.detach().to(n.dtype)[at][..., None, :] for t in (cos, sin))
        turned = torch.stack((a * c - b * s, b * c + a * s), -1 if interleaved else -2)
        return torch.cat((turned.reshape(rotated.shape), rest), -1).to(x.dtype)

    half = cos.shape[-1]
    pairs = (half, 2) if interleaved else (2, half)
    at = torch.arange(q.shape[-3], device=q.device) if positions is None else positions
    return one(q, q_weight), one(k, k_weight)


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
