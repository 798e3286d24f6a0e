"""How far from float64 a right result may be, from the roundings of its formula. No number here is fitted.

Each function returns, per output element, the sum of what single roundings of the formula's steps can move it by
("unit"), in float64. A sum of n terms may be off by up to `length(n)` of its units: n in the worst case, of the order
of √n when roundings are independent (Higham and Mary 2019), with a constant that covers the few steps around the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .engine import FaultError


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding; float64: of one here and one in what it is compared with."""
    return torch.finfo(dtype).eps * (1.0 if dtype == torch.float64 else 0.5)


def accumulator(*dtypes: torch.dtype) -> torch.dtype:
    """What is computed in: fp32 or wider."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def smallest(dtype: torch.dtype) -> float:
    """What a rounding to zero may lose: a GPU flushes fp32 and bf16 numbers below the smallest normal one."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps if dtype == torch.float16 else info.tiny


def length(n: int) -> float:
    """How many units a sum of n terms may be off by."""
    return min(n, 8 + 2 * math.sqrt(n)) + 8


@dataclass
class Rounding:
    """The roundoff of arithmetic (u) and of the stored result (v)."""

    u: float
    v: float
    zero: float

    @classmethod
    def of(cls, acc: torch.dtype, out: torch.dtype) -> Rounding:
        return cls(roundoff(acc), roundoff(out), max(smallest(acc), smallest(out)))


def compare(got: Tensor, want: Tensor, allowed: Tensor, what: str, *, rows: Tensor | None = None) -> float:
    """Raise a FaultError where |got − want| > allowed; infinities and NaN must be the same. Largest error / allowed.

    rows: bool, broadcasts; where it is False nothing is compared (the formula leaves the accumulator's range there).
    """
    dtype = got.dtype
    if tuple(got.shape) != tuple(want.shape):
        raise FaultError(f"{what} shape", f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not got.numel():
        return 0.0
    g = got.detach().cpu().double()
    allowed = allowed.expand(want.shape)
    limit = torch.finfo(dtype).max
    error = (g - want).abs()
    # what rounds beyond the dtype's range is infinite, or its largest number
    beyond = (want.abs() + allowed >= limit * (1 - roundoff(dtype))) & (g.abs() >= limit) & (g.sign() == want.sign())
    same = (g == want) | (g.isnan() & want.isnan()) | beyond
    bad = ~(same | (error <= allowed)) & ~allowed.isnan()
    # a bound that is itself infinite says nothing
    bad &= ~(allowed == math.inf)
    if rows is not None:
        bad &= rows.expand(want.shape)
    if bool(bad.any()):
        excess = torch.where(bad, torch.where(error.isnan(), math.inf, error / allowed.clamp_min(1e-300)), 0.0)
        at = int(excess.argmax())
        raise FaultError(
            what,
            f"{int(bad.sum())} of {bad.numel()} wrong; at {at}: {g.reshape(-1)[at]:.9g} instead of "
            f"{want.reshape(-1)[at]:.9g}, allowed is {allowed.reshape(-1)[at]:.3g}",
            got=float(g.reshape(-1)[at]), want=float(want.reshape(-1)[at]), allowed=float(allowed.reshape(-1)[at]),
        )  # fmt: skip
    ratio = torch.where(same | allowed.isnan() | allowed.isinf(), 0.0, error / allowed.clamp_min(1e-300))
    return float(ratio.max())


@dataclass
class Norm:
    """A normalisation in float64 with the units of its parts; rows (R, n)."""

    normed: Tensor  # n = d·r
    inverse: Tensor  # r (R, 1)
    of_normed: Tensor  # unit of n
    of_inverse: Tensor  # relative unit of r (R, 1)
    scale: Tensor  # m² (R, 1)
    fits: Tensor  # bool (R, 1): squares and their sums stay well inside the accumulator's range


def norm(s: Tensor, eps: float, has_mean: bool, stable: bool, u: float, of_s: float, largest: float) -> Norm:
    """Of s (R, n) in float64, which is known to a relative error of_s. largest: of the accumulator's numbers."""
    n = s.shape[-1]
    size = s.abs()
    if has_mean:
        d = s - s.mean(-1, keepdim=True)
        of_d = (u + of_s) * (size + size.mean(-1, keepdim=True))
    else:
        d, of_d = s, (u + of_s) * size
    m = torch.ones_like(s[:, :1])
    if stable:
        top, far = s.amax(-1, keepdim=True), size.amax(-1, keepdim=True)
        m = torch.where(top > 0, top, torch.where(far > 0, far, 1.0))
    var = d.square().mean(-1, keepdim=True) + eps * m.square()
    r = var.rsqrt()
    relative = r.square() * ((d.abs() * of_d).mean(-1, keepdim=True) + of_d.square().mean(-1, keepdim=True) / 2) + u
    # the sum of squares, and m², far from both ends of the range; m itself is squared only with stable
    peak = torch.maximum(size.amax(-1, keepdim=True), m)
    fits = (peak.square() * n < largest / 64) & (var > 2.0**-60 if largest < 1e40 else var > 1e-200)
    fits &= peak * r.clamp_min(1) * n < largest / 64
    normed = d * r
    return Norm(normed, r, r * of_d + normed.abs() * relative, relative, m.square(), fits)


def norm_values(
    found: Norm, gain: Tensor, bias: Tensor | None, rounding: Rounding, stretch: float
) -> tuple[Tensor, Tensor]:
    """Y (R, n), and how far from it a right result may be."""
    y = found.normed * gain
    unit = gain.abs() * found.of_normed + 3 * rounding.u * y.abs()
    if bias is not None:
        y = y + bias
        unit = unit + rounding.u * bias.abs()
    return y, stretch * unit + rounding.v * y.abs() + rounding.zero * (1 + gain.abs() * (1 + found.inverse))


@dataclass
class NormGradients:
    """Gradients of a normalisation, and how far from them a right result may be."""

    dx: tuple[Tensor, Tensor]
    dw: tuple[Tensor, Tensor]
    db: tuple[Tensor, Tensor]


def norm_gradients(
    found: Norm, s: Tensor, dy: Tensor, ds: Tensor | None, gain: Tensor, eps: float, has_mean: bool, stable: bool,
    rounding: Rounding, vectors: float, stretch: float,
) -> NormGradients:  # fmt: skip
    """For the upstream gradients dy and ds (R, n) in float64. vectors: roundoff of dw and db."""
    u, rows = rounding.u, len(s)
    n, r, of_n = found.normed, found.inverse, found.of_normed
    g = dy * gain
    c = g.mean(-1, keepdim=True) if has_mean else torch.zeros_like(r)
    of_c = u * g.abs().mean(-1, keepdim=True) if has_mean else torch.zeros_like(r)
    a = (g * n).mean(-1, keepdim=True)
    of_a = (g.abs() * (3 * u * n.abs() + of_n)).mean(-1, keepdim=True)
    dx = r * (g - c - n * a)
    parts = 3 * u * (g.abs() + c.abs() + (n * a).abs())
    unit = dx.abs() * found.of_inverse + r * (parts + of_c + of_n * a.abs() + n.abs() * of_a)
    if stable:
        m = found.scale.sqrt()
        far = torch.where(s.amax(-1, keepdim=True) > 0, s, s.abs())
        ties = far == m
        count = ties.sum(-1, keepdim=True).clamp_min(1)
        sign = torch.where(s.amax(-1, keepdim=True) > 0, 1.0, -1.0).double()
        share = torch.where(ties, sign / count * s.shape[-1] * eps * m * r.square(), 0.0)
        # of a row of zeros m is the constant 1
        share = torch.where(s.abs().amax(-1, keepdim=True) > 0, share, 0.0)
        dx = dx - share * a
        unit = unit + share.abs() * (a.abs() * (4 * u + 3 * found.of_inverse) + of_a)
    if ds is not None:
        dx = dx + ds
        unit = unit + u * ds.abs()
    small = rounding.zero * (1 + 8 * r * (1 + n.abs()) * (1 + gain.abs()))
    dx_allowed = stretch * unit + rounding.v * dx.abs() + small
    along = length(rows)
    dw = (dy * n).sum(0)
    dw_allowed = (dy.abs() * (stretch * of_n + along * u * n.abs())).sum(0) + vectors * dw.abs()
    db = dy.sum(0)
    db_allowed = along * u * dy.abs().sum(0) + vectors * db.abs()
    floor = rounding.zero * (1 + rows)
    return NormGradients((dx, dx_allowed), (dw, dw_allowed + floor * (1 + dy.abs().sum(0))), (db, db_allowed + floor))
