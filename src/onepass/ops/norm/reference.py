"""Define the norms in plain torch: accumulated in fp32 or wider, differentiable by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def stable_scale(x: Tensor) -> Tensor:
    """Return m of `stable=True`, (..., 1): max(x) where that is positive, else max|x|, and 1 for a row of zeros."""
    largest, magnitude = x.amax(-1, keepdim=True), x.abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest, torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude)))


def quantize(y: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Round y (..., N) to e4m3: (values, scales (..., N / columns) in fp32) with y ≈ values·scales.

    So many neighbouring columns share a scale, the largest of them over 448 (the largest number is taken as 2⁻⁴⁰ at
    least). values = y · (448 / the largest), rounded to e4m3.
    """
    blocks = (*y.shape[:-1], y.shape[-1] // max(columns, 1), columns)
    f = y.float().reshape(blocks if y.shape[-1] else (*y.shape, 1))
    largest = f.abs().amax(-1, keepdim=True) if f.numel() else f.new_zeros((*f.shape[:-1], 1))
    largest = largest.clamp(min=2.0**-40)
    # tensors on both sides: torch multiplies by a number's reciprocal, which rounds twice
    most = torch.full_like(largest, 448.0)
    values = (f * (most / largest)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return values.view(y.shape), (largest / most)[..., 0]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def _finish(
    n: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, gate: Tensor | None,
    gate_first: bool, gate_act: str, quantize_by: str | None, out_dtype: torch.dtype | None, twice: bool = False,
) -> Any:  # fmt: skip
    """Return y, or its e4m3 values and scales, from the normalised rows in fp32 or wider."""
    n = n.view(x.shape)
    if twice:
        n = n.to(x.dtype).to(n.dtype)
    if weight is not None:
        n = n * (weight.to(n.dtype) + offset)
        n = n.to(torch.promote_types(x.dtype, weight.dtype)).to(n.dtype) if twice else n
    if bias is not None:
        n = n + bias.to(n.dtype)
    if gate is not None and not gate_first:
        n = n * ACTIVATIONS[gate_act](gate.to(n.dtype))
    y = n.to(out_dtype or x.dtype)
    if quantize_by is None:
        return y
    values, scales = quantize(y, y.shape[-1] if quantize_by == "row" else 128)
    return values, scales, y


def _source(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, gate_first: bool, gate_act: str, groups: int
) -> tuple[Tensor, Tensor]:
    """Return s = x (+ residual), and in fp32 or wider what is normalised: s, times its gate, in groups of columns."""
    s = x if residual is None else x + residual
    f = s.to(torch.promote_types(s.dtype, torch.float32))
    if gate is not None and gate_first:
        f = f * ACTIVATIONS[gate_act](gate.to(f.dtype))
    return s, f.reshape(*f.shape[:-1], groups, f.shape[-1] // groups) if groups > 1 else f


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    offset: float = 0.0,
    stable: bool = False,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    gate_act: str = "silu",
    groups: int = 1,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Return y = (w + offset)·(s − mean)/sqrt(var + eps·m²) + b with s = x (+ residual), m = 1 unless stable.

    With a gate z the norm is that of s·a(z) if gate_first, else y is multiplied by a(z), a = silu or sigmoid.
    With residual: (y, s).
    """
    s, f = _source(x, residual, gate, gate_first, gate_act, groups)
    d = f - f.mean(-1, keepdim=True)
    eps_row = eps * stable_scale(f) ** 2 if stable and f.numel() else eps
    n = d * (d.square().mean(-1, keepdim=True) + eps_row).rsqrt()
    y = _finish(n, x, weight, bias, offset, gate, gate_first, gate_act, quantize, out_dtype)
    return y if residual is None else (y, s)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    rounding: str = "once",
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_first: bool = False,
    gate_act: str = "silu",
    groups: int = 1,
    quantize: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Return y = (w + offset)·s/sqrt(mean(s²) + eps) + b with s = x (+ residual). With residual: (y, s).

    Gate as in `layer_norm`. rounding="twice" rounds the normalised rows to the dtype of x, then their product with w.
    """
    s, f = _source(x, residual, gate, gate_first, gate_act, groups)
    eps = torch.finfo(f.dtype).eps if eps is None else eps
    n = f * (f.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = _finish(n, x, weight, bias, offset, gate, gate_first, gate_act, quantize, out_dtype, rounding == "twice")
    return y if residual is None else (y, s)
