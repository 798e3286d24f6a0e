"""The norms' options by torch's operators: on a CPU, in float64, without Triton, and for rows too wide for one program.

On a GPU such rows are normalised by the kernels of plain calls, so that the bits of a row depend on this row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.launch import uses_triton

from . import torch_path
from .reference import quantize
from .torch_path import rows_formula, wide_dtype, wide_weight


def _sigmoid(z: Tensor) -> Tensor:
    """Return sigmoid(z), whose bits depend on z alone: torch's and its silu have others where a vector is not full."""
    return z.contiguous().neg().exp_().add_(1).reciprocal_()


def _normalised(f: Tensor, eps: float, has_mean: bool, stable: bool) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of f, contiguous and in fp32 or wider, and the statistics (1 to 3, ...)."""
    if not uses_triton(f):
        return torch_path.normalised(f, eps, has_mean, stable)
    from . import launch

    n, _, kept = launch.forward(f, None, None, None, eps, 0.0, has_mean, stable)
    assert kept is not None
    return n, kept


def _gradient(g: Tensor, f: Tensor, stats: Tensor, eps: float, has_mean: bool, stable: bool) -> Tensor:
    """Return the gradient of f, given that of the normalised rows."""
    df: Tensor | None = None
    if uses_triton(f):
        from . import launch

        if launch.has_backward(f, g, stable):
            needs = True, False, False
            df, *_ = launch.backward(g, None, f, stats, None, f.dtype, eps, 0.0, has_mean, stable, *needs)
    if df is None:
        rows = g.reshape(-1, g.shape[-1]), f.reshape(-1, f.shape[-1])
        df, *_ = rows_formula(*rows, stats.reshape(len(stats), -1), None, eps, has_mean, stable, (True, False, False))
    assert df is not None
    return df.view(f.shape)


def forward(
    x: Tensor, s: Tensor, gate: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool, twice: bool, gate_first: bool, quant: int, dtype: torch.dtype,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor]:  # fmt: skip
    """Return y of `dtype`, (e4m3 values, scales) where `quant` asks for them, and statistics (1 to 3, ...).

    s is x, or x + residual.
    """
    n_cols = s.shape[-1]
    one_weight = all(v is None or v.dim() == 1 for v in (weight, bias)) and not (has_mean and offset)
    # the plain call rounds a 16-bit layer norm to its own dtype first
    if one_weight and gate is None and not twice and (dtype == s.dtype or s.element_size() > 2):
        if uses_triton(s):
            from . import launch

            y, _, kept = launch.forward(s, None, weight, bias, eps, offset, has_mean, stable, dtype=dtype)
            assert kept is not None
            stats = kept
        else:
            y, stats = torch_path.forward(s, weight, bias, eps, offset, has_mean, stable, dtype)
        return y, quantize(y, 128 if quant == 2 else n_cols) if quant else None, stats
    wide = wide_dtype(s)
    f = s.to(wide).contiguous()
    z = None if gate is None else gate.to(wide)
    z = None if z is None else z * _sigmoid(z)
    if z is not None and gate_first:
        f = f * z
    n, stats = _normalised(f, eps, has_mean, stable)
    w, b = wide_weight(weight, offset, wide), wide_weight(bias, 0.0, wide)
    if twice:
        n = n.to(x.dtype).to(wide)
    if w is not None:
        n = n * w
        if twice and weight is not None:
            n = n.to(torch.promote_types(x.dtype, weight.dtype)).to(wide)
    if b is not None:
        n = n + b
    if z is not None and not gate_first:
        n = n * z
    y = n.to(dtype)
    # autograd forbids in-place changes of a view that a Function returns, and of an argument
    y = y.clone() if y.data_ptr() in (x.data_ptr(), s.data_ptr()) or y._is_view() else y
    return y, quantize(y, 128 if quant == 2 else n_cols) if quant else None, stats


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, gate: Tensor | None, stats: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool, gate_first: bool, need_x: bool,
    need_z: bool, need_w: bool, need_b: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx, dz, dw and db in the dtypes of x, gate, weight and bias, contiguous; None for those not needed."""
    wide = wide_dtype(x)
    f, g, w = x.to(wide), dy.to(wide), wide_weight(weight, offset, wide)
    silu = slope = dz = dw = None
    if gate is not None:
        z = gate.to(wide)
        sigmoid = _sigmoid(z)
        silu, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    scaled = f * silu if silu is not None and slope is not None and gate_first else f
    n = scaled if not has_mean else scaled - stats[1, ..., None]
    n = n * stats[0, ..., None]
    if silu is not None and slope is not None and not gate_first:
        if need_z:
            t = n if w is None else n * w
            t = t if bias is None else t + bias.to(wide)
            dz = g * t * slope
        g = g * silu
    if need_w and weight is not None:
        dw = (g * n).sum_to_size(weight.shape)
    db = g.sum_to_size(bias.shape) if need_b and bias is not None else None
    dx = None
    if need_x or (need_z and gate_first):
        g = g if w is None else g * w
        dx = _gradient(g, scaled, stats, eps, has_mean, stable)
        if silu is not None and slope is not None and gate_first:
            dz = dx * f * slope if need_z else None
            dx = dx * silu
        dx = (dx if ds is None else dx + ds) if need_x else None
    found = zip((dx, dz, dw, db), (x, gate, weight, bias), strict=True)
    dx, dz, dw, db = (None if d is None or t is None else d.to(t.dtype).contiguous() for d, t in found)
    return dx, dz, dw, db
