"""The definition of qk_norm_rope: the tests' oracle, and what runs on a CPU and in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import recording
from onepass.ops.norm.definition import normalised


def _norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, eps: float, offset: float,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Return x (..., T, heads, D), heads normed, pairs of their first columns rotated; NaN beyond the table."""
    n = normalised(x.to(torch.promote_types(x.dtype, torch.float32)).contiguous(), eps, has_mean=False)
    n = n if weight is None else n * (weight.to(n.dtype) + offset)
    half = cos.shape[-1]
    position = torch.arange(n.shape[-3], device=n.device) if positions is None else positions
    inside = (position >= 0) & (position < len(cos))
    tables = (t.detach().to(n.dtype)[torch.where(inside, position, 0)] for t in (cos, sin))
    c, s = (torch.where(inside[..., None], t, torch.nan)[..., None, :] for t in tables)
    if interleaved:
        a, b = n[..., : 2 * half : 2], n[..., 1 : 2 * half : 2]
        rotated = [torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)]
    else:
        a, b = n[..., :half], n[..., half : 2 * half]
        rotated = [a * c - b * s, b * c + a * s]
    return torch.cat((*rotated, n[..., 2 * half :]), -1).to(x.dtype)


def forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None, cos: Any = None,
    sin: Any = None, positions: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k, normed and rotated."""
    rest = cos, sin, positions, eps, offset, interleaved
    return _norm_rope(q, q_weight, *rest), _norm_rope(k, k_weight, *rest)


def backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and both weights by autograd, in their dtypes; None for those not needed."""
    *options, needs = rest
    inputs: list[Any] = [t if t is None else t.detach() for t in (q, k, q_weight, k_weight)]
    for t, need in zip(inputs, needs, strict=True):
        if need:
            t.requires_grad_()
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    with recording():
        results = zip(forward(*inputs, *options), (dq, dk), strict=True)
        pairs = [(y, dy) for y, dy in results if y.requires_grad]
        grads = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]) if wanted else ())
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in inputs)
