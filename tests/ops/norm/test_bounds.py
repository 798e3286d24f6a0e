"""Layer and RMS norm of any numbers, from 1e-36 to 1e30, against float64 with bounds that follow from the arithmetic.

A bound is the sum of what single roundings of the formula's steps can move a result by ("unit"). A sum of n terms may
be off by `length(n)` units: n in the worst case, of the order of √n when roundings are independent (Higham and Mary
2019).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET

# the interpreter's bf16 can't be trusted, and fp64 never reaches a kernel
DTYPES = (torch.float32, torch.float16, *(() if INTERPRET else (torch.bfloat16, torch.float64)))
FILLS = ("normal", "ties", "constant", "shifted", "cauchy", "outlier", "huge", "tiny", "wide", "large")
VECTORS = ("normal", "ties", "constant", "shifted", "large")
# what does not overflow in a gradient
UPSTREAM = ("normal", "ties", "cauchy", "outlier")
WIDTHS = st.sampled_from((1, 2, 3, 8, 31, 32, 33, 127, 128)) | st.integers(0, 130 if INTERPRET else 300)


@st.composite
def numbers(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, fills: tuple[str, ...] = FILLS) -> Tensor:
    """A finite tensor, the same on every device."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    share = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64)
    match draw(st.sampled_from(fills)):
        case "ties":
            x = (x * 1.5).round()
        case "constant":
            # 8 significant bits a row, from 2^-10 to 2^20
            x = torch.ldexp((share * 12800).floor() % 128 + 128, (31 * share).floor() - 17).expand(shape)
        case "shifted":
            x = x + 1e3 * (1 + 10 * share)
        case "cauchy":
            x = (x / torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(-1e6, 1e6)
        case "outlier":
            x = torch.where(torch.rand(shape, generator=generator) < 0.02, x * 1e4, x)
        case "huge":
            x = x * 10.0 ** (8 + 22 * share)
        case "tiny":
            x = x * 10.0 ** (-6 - 36 * share)
        case "wide":
            x = x.sign() * 10.0 ** (-30 + 60 * torch.rand(shape, generator=generator, dtype=torch.float64))
        case "large":
            x = x * 100
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding; float64: of one here and one in what it is compared with."""
    return torch.finfo(dtype).eps * (1.0 if dtype == torch.float64 else 0.5)


def smallest(*dtypes: torch.dtype) -> float:
    """What a rounding to zero may lose: a GPU flushes fp32 and bf16 numbers below the smallest normal one."""
    infos = [torch.finfo(dtype) for dtype in dtypes]
    return max(i.smallest_normal * i.eps if i.dtype == "float16" else i.tiny for i in infos)


def length(n: int) -> float:
    """How many units a sum of n terms may be off by."""
    return min(n, 8 + 2 * math.sqrt(n)) + 8


def compare(got: Tensor, want: Tensor, allowed: Tensor, rows: Tensor, what: str) -> None:
    """|got − want| ≤ allowed in these rows; what rounds beyond the dtype's range is infinite, or its largest number."""
    g, limit = got.detach().cpu().double().reshape(want.shape), torch.finfo(got.dtype).max
    beyond = (
        (want.abs() + allowed >= limit * (1 - roundoff(got.dtype))) & (g.abs() >= limit) & (g.sign() == want.sign())
    )
    bad = ~((g == want) | beyond | ((g - want).abs() <= allowed)) & rows.expand(want.shape) & allowed.isfinite()
    i = tuple(bad.nonzero()[0]) if bad.any() else None
    assert i is None, f"{what} {tuple(map(int, i))}: {g[i]:.9g} instead of {want[i]:.9g}, allowed {allowed[i]:.3g}"


class Expected:
    """Both norms of rows s (R, n) in float64, and how far arithmetic of roundoff u may be from them."""

    def __init__(
        self, s: Tensor, gain: Tensor, eps: float, has_mean: bool, stable: bool, acc: torch.dtype, of_s: float
    ) -> None:
        self.s, self.gain, self.eps, self.has_mean, self.stable = s, gain, eps, has_mean, stable
        self.u, self.zero, self.most = roundoff(acc), smallest(acc), torch.finfo(acc).max / 64
        u, n, size = self.u, s.shape[-1], s.abs()
        self.stretch = length(n)
        d, of_d = (s - s.mean(-1, True), size + size.mean(-1, True)) if has_mean else (s, size)
        of_d = (u + of_s) * of_d
        top, far = s.amax(-1, True), size.amax(-1, True)
        self.m = torch.where(top > 0, top, torch.where(far > 0, far, 1.0)) if stable else torch.ones_like(top)
        var = d.square().mean(-1, True) + eps * self.m.square()
        self.r = r = var.rsqrt()
        self.of_r = r.square() * ((d.abs() * of_d).mean(-1, True) + of_d.square().mean(-1, True) / 2) + u
        self.n, self.of_n = d * r, r * of_d + (d * r).abs() * self.of_r
        # squares and their sums stay inside the accumulator's range, far from both of its ends
        peak = torch.maximum(far, self.m)
        self.fits = (peak.square() * n < self.most) & (var > (2.0**-60 if acc == torch.float32 else 1e-200))
        self.fits &= peak * r.clamp_min(1) * n < self.most

    def values(self, bias: Tensor | None, out: torch.dtype) -> tuple[Tensor, Tensor]:
        y = self.n * self.gain
        unit = self.gain.abs() * self.of_n + 3 * self.u * y.abs()
        if bias is not None:
            y, unit = y + bias, unit + self.u * bias.abs()
        floor = max(self.zero, smallest(out)) * (1 + self.gain.abs() * (1 + self.r))
        return y, self.stretch * unit + roundoff(out) * y.abs() + floor

    def gradients(self, dy: Tensor, ds: Tensor | None, kept: float, zero: float) -> dict[str, tuple[Tensor, Tensor]]:
        """Of x, weight and bias; kept: roundoff of x's gradient, zero: what storing one may lose."""
        u, r, n, of_n, g = self.u, self.r, self.n, self.of_n, dy * self.gain
        c = g.mean(-1, True) if self.has_mean else torch.zeros_like(r)
        of_c = u * g.abs().mean(-1, True) if self.has_mean else torch.zeros_like(r)
        a, of_a = (g * n).mean(-1, True), (g.abs() * (3 * u * n.abs() + of_n)).mean(-1, True)
        dx = r * (g - c - n * a)
        parts = 3 * u * (g.abs() + c.abs() + (n * a).abs())
        unit = dx.abs() * self.of_r + r * (parts + of_c + of_n * a.abs() + (n.abs() + self.stretch * of_n) * of_a)
        if self.stable:
            # the unit follows the largest number, or the largest in size where none is positive; ties share
            far = torch.where(self.s.amax(-1, True) > 0, self.s, self.s.abs())
            count = (far == self.m).sum(-1, True).clamp_min(1)
            sign = torch.where(self.s.amax(-1, True) > 0, 1.0, -1.0).double()
            along = sign / count * self.s.shape[-1] * self.eps * self.m * r.square()
            along = torch.where((far == self.m) & (self.s.abs().amax(-1, True) > 0), along, 0.0)
            dx, unit = dx - along * a, unit + along.abs() * (a.abs() * (4 * u + 3 * self.of_r) + of_a)
        if ds is not None:
            dx, unit = dx + ds, unit + u * ds.abs()
        rows, size = length(len(self.s)) * u, dy.abs().sum(0)
        floor = zero * (1 + 8 * r * (1 + n.abs()) * (1 + self.gain.abs()))
        dw, of_dw = (dy * n).sum(0), (dy.abs() * (self.stretch * of_n + rows * n.abs())).sum(0)
        return {
            "x": (dx, self.stretch * unit + kept * dx.abs() + floor),
            "weight": (dw, of_dw + zero * (1 + len(self.s)) * (1 + size)),
            "bias": (dy.sum(0), rows * size + zero * (1 + len(self.s))),
        }


@pytest.mark.filterwarnings("ignore:overflow encountered")
@settings(max_examples=10 if INTERPRET else 60)
@given(data=st.data())
def test_any_numbers(data: st.DataObject, device: str) -> None:
    draw = data.draw
    has_mean, eps = draw(st.booleans()), draw(st.sampled_from((1e-5, 1e-6, 1e-12, 0.0, 0.1, 1e3)))
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.integers(0, 8 if INTERPRET else 33)), draw(WIDTHS)
    stable = has_mean and draw(st.booleans())

    def leaf(of: tuple[int, ...], kind: torch.dtype, fills: tuple[str, ...]) -> Tensor:
        return draw(numbers(of, kind, fills)).to(device).requires_grad_()

    given_: dict[str, Tensor] = {"x": leaf(shape, dtype, FILLS)}
    for name, wanted in (("weight", True), ("bias", has_mean)):
        if wanted and draw(st.booleans()):
            given_[name] = leaf(shape[1:], draw(st.sampled_from(DTYPES)), VECTORS)
    if draw(st.booleans()):
        given_["residual"] = leaf(shape, draw(st.sampled_from((dtype, *DTYPES))), FILLS)
    out_dtype = draw(st.none() | st.sampled_from([t for t in DTYPES if t != torch.float64 or t == dtype]))
    options: dict[str, Any] = {"eps": eps, "out_dtype": out_dtype, **({"stable": stable} if has_mean else {})}
    norm = onepass.layer_norm if has_mean else onepass.rms_norm
    out = norm(**given_, **options)
    y, s = out if "residual" in given_ else (out, given_["x"])
    assert y.dtype == (out_dtype or dtype)
    if "residual" in given_:
        assert s.dtype == torch.promote_types(dtype, given_["residual"].dtype)
        assert torch.equal(s, given_["x"] + given_["residual"])
    with torch.no_grad():
        alone = norm(**given_, **options)
    dy, ds = (draw(numbers(shape, t.dtype, UPSTREAM)).to(device) for t in (y, s))
    outs, ups = ([y, s], [dy, ds]) if "residual" in given_ else ([y], [dy])
    grads = dict(zip(given_, torch.autograd.grad(outs, list(given_.values()), ups), strict=True))
    assert [(g.dtype, g.shape) for g in grads.values()] == [(t.dtype, t.shape) for t in given_.values()]
    if not y.numel():
        return
    wide = {name: t.detach().cpu().double() for name, t in {**given_, "s": s}.items()}
    acc, gain = torch.promote_types(torch.float32, s.dtype), wide.get("weight", torch.ones(shape[1]).double())
    # the sum that is normalised may be the rounded one or not
    of_s = roundoff(s.dtype) if "residual" in given_ and s.dtype != acc else 0.0
    expected = Expected(wide["s"], gain, eps, has_mean, stable, acc, of_s)
    want, allowed = expected.values(wide.get("bias"), y.dtype)
    fits = expected.fits & (want.abs().amax(-1, True) < expected.most)
    compare(y, want, allowed, fits, "y")
    compare(alone if isinstance(alone, Tensor) else alone[0], want, allowed, fits, "y without gradients")
    dy64 = dy.cpu().double()
    kept = roundoff(s.dtype) * (3 if "residual" in given_ else 2)
    zero = max(expected.zero, *(smallest(t.dtype) for t in given_.values()))
    bounds = expected.gradients(dy64, ds.cpu().double() if "residual" in given_ else None, kept, zero)
    reach = (dy64 * expected.gain).abs().amax(-1, True) * shape[1]
    fits = expected.fits & (reach * (1 + expected.r * expected.n.abs().amax(-1, True)) < expected.most)
    for name, grad in grads.items():
        want, allowed = bounds["x" if name == "residual" else name]
        inside = fits if name in ("x", "residual") else fits.all()
        compare(grad, want, allowed + roundoff(grad.dtype) * want.abs(), inside, f"gradient of {name}")
