"""Rotary embedding in torch: the definition, and the torch path (CPU, float64, no Triton)."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import reference as span_reference


def rotate(x: Tensor, positions: Tensor | None, base: float, inverse: bool = False) -> Tensor:
    """Rotate the pairs (x_c, x_{c + width/2}) of x (batch, n, heads, width) by position·base^(−2c/width)."""
    width = x.shape[-1]
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    speeds = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width)
    acc = torch.promote_types(x.dtype, torch.float32)
    angle = (positions[..., None] * speeds)[..., None, :]
    cos, sin = angle.cos().to(acc), angle.sin().to(acc)
    if inverse:
        sin = -sin
    a, b = x.to(acc).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def reference(x: Tensor, positions: Tensor | None = None, *, base: float = 10_000.0) -> Tensor:
    """Return the result of `rotary` by its definition."""
    return rotate(x, positions, base)


def attention_reference(
    qkv: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    mask: Tensor | None = None,
    base: float = 10_000.0,
    scale: float | None = None,
) -> Tensor:
    """Return the result of `rotary_attention` by its definition."""
    q, k, v = qkv.unbind(2)
    return span_reference(rotate(q, None, base), rotate(k, None, base), v, first, last, mask=mask, scale=scale)
