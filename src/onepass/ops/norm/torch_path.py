"""The torch path: torch's own operators where they keep the contract, else the formulas in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.launch import INTERPRET
from onepass.core.sums import BLOCK, row_sum

from .reference import stable_scale

# standard deviations from zero up to which torch's backward is exact: 2⁻¹⁴ over half an ulp
FAR_ROWS = {torch.float32: 2.0**10, torch.float64: 2.0**39}

Needs = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool
) -> Tensor | None:
    """Return the norm of a plain eager call by torch's operator on a CPU, differentiable; None where it is less exact.

    None for 16-bit layer norms, whose statistics and sums torch keeps in 16 bits (dw is 12 % off after 4096 rows), for
    layer norms with rows far from zero whose gradients are wanted, and for RMS norms with gradients: torch's takes the
    cube of 1/rms, which underflows from |x| of about 1e13 on.
    """
    if INTERPRET or not x.is_cpu or stable or torch._C._is_any_autocast_enabled():
        return None
    if not isinstance(eps, (float, int)) or not eps >= 0:
        return None
    if not x.numel() or not x.dim() or x.dtype not in check.FLOATS:
        return None
    dtype, n_cols = x.dtype, x.shape[-1]
    for v in (weight, bias):
        if v is not None and not (isinstance(v, Tensor) and v.dtype == dtype and v.shape == (n_cols,) and v.is_cpu):
            return None
    if has_mean:
        # torch's second derivative fails for a bias without a weight, with an error that names neither
        if dtype.itemsize == 2 or (weight is None and bias is not None):
            return None
        y, mean, rstd = torch.native_layer_norm(x, (n_cols,), weight, bias, eps)
        return None if y.requires_grad and _any_far(mean, rstd) else y
    # above BLOCK columns torch's order of a sum depends on the number of rows and threads
    if bias is not None or n_cols > BLOCK or (offset and weight is not None):
        return None
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return None
    return torch.rms_norm(x.contiguous(), (n_cols,), weight, eps)


def _any_far(mean: Tensor, rstd: Tensor) -> bool:
    """Return whether a row lies too far from zero for the backward of torch's layer norm.

    Torch computes dx = r·g + b·x + c, where b is a difference of row sums and c is about −b·mean. With M = |mean|·r
    standard deviations to zero both differences cancel: u·M of b is lost, and u·M of that in b·x + c, where u is half
    an ulp: (M·u)² of dx. That is 2⁻²⁸ at the limit; a row of one value 10⁶ has M·u = 19, and no digit is right.
    """
    return bool(((mean * rstd).abs() > FAR_ROWS[mean.dtype]).any())


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return fp64 for fp64 x, fp32 for all others."""
    return torch.promote_types(x.dtype, torch.float32)


def wide_weight(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """Return weight + offset in `dtype`; None for None."""
    if weight is None:
        return None
    weight = weight.to(dtype)
    return weight + offset if offset else weight


def forward(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, has_mean: bool, stable: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y of `dtype`, contiguous, and statistics (1 to 3, ...): 1/σ, mean, ±m; s (..., n) is not empty."""
    wide = wide_dtype(s)
    w, b = wide_weight(weight, offset, wide), None if bias is None else bias.to(wide)
    if has_mean and not stable:
        # the operator that `native` calls: both give the same bits
        y, mean, rstd = torch.native_layer_norm(s.to(wide), s.shape[-1:], w, b, eps)
        return y.to(dtype), torch.stack((rstd[..., 0], mean[..., 0]))
    y, stats = normalised(s.to(wide).contiguous(), eps, has_mean, stable)
    y = y if w is None else y.mul_(w)
    y = y if b is None else y.add_(b)
    return y.to(dtype), stats


def normalised(f: Tensor, eps: float, has_mean: bool, stable: bool) -> tuple[Tensor, Tensor]:
    """Return the normalised rows of f (..., n), contiguous and in fp32 or wider, and the statistics (1 to 3, ...)."""
    n_cols = f.shape[-1]
    kept = []
    if stable:
        m, magnitude = stable_scale(f), f.abs().amax(-1, keepdim=True)
        # work in units of max|x|: then no row overflows or underflows
        unit = torch.where(magnitude > 0, magnitude, torch.ones_like(magnitude))
        signed = torch.where(f.amax(-1, keepdim=True) > 0, m, -m)
        f = f / unit
    if has_mean:
        mean = row_sum(f).div_(n_cols)
        f = f - mean
        kept = [mean]
    # the operations of torch.rms_norm, which `native` calls: both give the same bits
    var = row_sum(f.square()).div_(n_cols)
    rstd = var.add_(eps * (m / unit).square() if stable else eps).rsqrt_()
    n = f * rstd
    stats = [rstd / unit, mean * unit, signed] if stable else [rstd, *kept]
    return n, torch.stack([t[..., 0] for t in stats])


def backward(
    dy: Tensor, ds: Tensor | None, x: Tensor, stats: Tensor, weight: Tensor | None, eps: float, offset: float,
    has_mean: bool, stable: bool, needs: Needs,
) -> Gradients:  # fmt: skip
    """Return the needed ones of dx (in the dtype of x), dw and db (in fp32 or wider), contiguous; else None."""
    wide, n_cols = wide_dtype(x), x.shape[-1]
    g, f = dy.to(wide).reshape(-1, n_cols), x.to(wide).reshape(-1, n_cols)
    w = None if weight is None else wide_weight(weight.reshape(-1), offset, wide)
    # on a GPU torch's kernel subtracts the mean first
    if has_mean and not stable and not (x.is_cpu and _any_far(stats[1], stats[0])):
        # torch computes db only if it gets a bias, whose values it does not read
        b = (stats.new_empty(n_cols) if w is None else w) if needs[2] else None
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(g, f, (n_cols,), stats[1], stats[0], w, b, needs)
    else:
        dx, dw, db = rows_formula(g, f, stats, w, eps, has_mean, stable, needs)
    if dx is not None:
        dx = dx.view(x.shape)
        dx = (dx if ds is None else dx + ds).to(x.dtype)
    return dx, dw, db


def rows_formula(
    dy: Tensor, x: Tensor, stats: Tensor, w: Tensor | None, eps: float, has_mean: bool, stable: bool, needs: Needs
) -> Gradients:
    """Return dx, dw and db of rows (rows, n) in fp32 or wider, by the formulas of README.md."""
    n_cols = x.shape[-1]
    rstd = stats[0, :, None]
    n = (x - stats[1, :, None]).mul_(rstd) if has_mean else x * rstd
    dw = (dy * n).sum(0) if needs[1] else None
    db = dy.sum(0) if needs[2] else None
    if not needs[0]:
        return None, dw, db
    g = dy if w is None else dy * w
    total = torch.linalg.vecdot(g, n)[:, None]
    if has_mean:
        g = g - g.mean(-1, keepdim=True)
    dx = torch.addcmul(g, n, total / n_cols, value=-1).mul_(rstd)
    if stable:
        # subtract the gradient of m, shared evenly by the positions that attain it
        signed = stats[2, :, None]
        attained = x == signed
        dx -= attained * (total / attained.sum(-1, keepdim=True).clamp_(min=1) * eps * (signed * rstd) * rstd)
    return dx, dw, db
