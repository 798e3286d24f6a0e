"""The definition of qk_norm_rope: the tests' oracle; what runs on a CPU, in float64 and for the widest heads."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.eager import recording
from onepass.ops.norm.definition import normalised


def rotated(n: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """Return n (..., T, heads, D) with the pairs of its first 2·cos.shape[-1] columns rotated; NaN beyond the table."""
    half = cos.shape[-1]
    at = torch.arange(n.shape[-3], device=n.device) if positions is None else positions
    inside = (at >= 0) & (at < len(cos))
    of_tokens = (t.detach().to(n.dtype)[torch.where(inside, at, 0)] for t in (cos, sin))
    c, s = (torch.where(inside[..., None], t, torch.nan)[..., None, :] for t in of_tokens)
    if interleaved:
        a, b = n[..., : 2 * half : 2], n[..., 1 : 2 * half : 2]
        turned = [torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)]
    else:
        a, b = n[..., :half], n[..., half : 2 * half]
        turned = [a * c - b * s, b * c + a * s]
    return torch.cat((*turned, n[..., 2 * half :]), -1)


def one(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float, offset: float,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Return x (..., T, heads, D), each head normed by its root mean square and rotated."""
    n = normalised(x.to(torch.promote_types(x.dtype, torch.float32)).contiguous(), eps, has_mean=False)
    n = n if weight is None else n * (weight.to(n.dtype) + offset)
    return rotated(n, cos, sin, positions, interleaved).to(x.dtype)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, *, cos: Tensor, sin: Tensor,
    positions: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k, normed and rotated."""
    rest = cos, sin, positions, eps, offset, interleaved
    return one(q, q_weight, *rest), one(k, k_weight, *rest)


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float,
    offset: float, interleaved: bool, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx and dw in the dtypes of x and weight, by autograd; None for those not needed."""
    wide = torch.promote_types(x.dtype, torch.float32)
    of_x, of_w = x.to(wide).detach(), None if weight is None else weight.to(wide).detach()
    leaves = [t for t, need in ((of_x, need_x), (of_w, need_w)) if need and t is not None]
    if not leaves:
        return None, None
    with recording():
        for t in leaves:
            t.requires_grad_()
        y = one(of_x, of_w, cos, sin, positions, eps, offset, interleaved)
        found = iter(torch.autograd.grad(y, leaves, dy.to(wide)))
    dx = next(found).to(x.dtype) if need_x else None
    return dx, next(found).to(weight.dtype) if need_w and weight is not None else None
