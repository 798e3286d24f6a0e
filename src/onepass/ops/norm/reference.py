"""Define the norms in plain torch: accumulated in fp32 or wider, differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def _accumulate(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def stable_scale(x: Tensor) -> Tensor:
    """Return m of `stable=True`, (..., 1): max(x) where that is positive, else max|x|, and 1 for a row of zeros."""
    largest, magnitude = x.amax(-1, keepdim=True), x.abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest, torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude)))


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    stable: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y = w·(s − mean)/sqrt(var + eps·m²) + b with s = x (+ residual), m = 1 unless stable.

    With residual: (y, s).
    """
    s = x if residual is None else x + residual
    f = s.to(_accumulate(s))
    d = f - f.mean(-1, keepdim=True)
    eps_row = eps * stable_scale(f) ** 2 if stable and f.numel() else eps
    y = d * (d.square().mean(-1, keepdim=True) + eps_row).rsqrt()
    if weight is not None:
        y = y * weight.to(f.dtype)
    if bias is not None:
        y = y + bias.to(f.dtype)
    y = y.to(x.dtype)
    return y if residual is None else (y, s)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y = (offset + w)·s/sqrt(mean(s²) + eps) with s = x (+ residual). With residual: (y, s)."""
    s = x if residual is None else x + residual
    f = s.to(_accumulate(s))
    y = f * (f.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * (weight.to(f.dtype) + offset)
    y = y.to(x.dtype)
    return y if residual is None else (y, s)
