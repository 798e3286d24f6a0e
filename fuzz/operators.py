"""Operators against float64: norms, weighted sum, routing's score."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.ops.routing.op import score

from . import bounds
from .bounds import Rounding, accumulator, compare, length, roundoff, smallest
from .engine import Case, Property, require
from .tensors import DTYPES, SEEDS, UPSTREAM, build, dtypes, sizes, spec, wide

VECTORS = ("normal", "ties", "plateau", "constant", "shifted", "ones", "large")
EPS = (1e-5, 1e-6, 1e-12, 0.0, 0.1, 1e3)


def _leading(device: str) -> st.SearchStrategy[tuple[int, ...]]:
    rows = sizes(7, 33, largest=8 if device == "interpret" else 70)
    return st.one_of(
        st.tuples(), st.tuples(rows), st.tuples(st.sampled_from((1, 2)), rows), st.just((0,)), st.just((1,)),
        st.just((3, 0, 2)),
    )  # fmt: skip


def _width(device: str) -> st.SearchStrategy[int]:
    if device == "interpret":
        return sizes(16, 33, largest=130)
    wide_rows = (1000, 1025, 2048, 3000, 4097, 8200, 20480, 40001, 131073) if device == "cuda" else (1000, 2049, 8200)
    return st.one_of(sizes(8, 31, 32, 33, 64, 127, 128, 256, 257), sizes(), st.sampled_from(wide_rows))


@st.composite
def _norm_cases(draw: Any, device: str) -> Case:
    op = draw(st.sampled_from(("layer_norm", "rms_norm")))
    shape = (*draw(_leading(device)), draw(_width(device)))
    # a long row with many others would take the float64 oracle too long
    if math.prod(shape) > 400_000:
        shape = (2, shape[-1])
    dtype = draw(st.sampled_from(dtypes(device)))
    other = st.sampled_from((dtype, dtype, *dtypes(device)))
    vector = lambda: draw(st.none() | spec(shape[-1:], draw(other), fills=VECTORS))  # noqa: E731
    case = {
        "op": op, "x": draw(spec(shape, dtype)), "weight": vector(), "eps": draw(st.sampled_from(EPS)),
        "residual": draw(st.none() | spec(shape, draw(other))),
        "dy": draw(spec(shape, dtype, fills=UPSTREAM)), "sum": draw(st.booleans()),
        "ds": None,
    }  # fmt: skip
    if case["residual"]:
        case["ds"] = draw(st.none() | spec(shape, dtype, fills=UPSTREAM))
    if op == "layer_norm":
        case |= {"bias": vector(), "stable": draw(st.booleans())}
    else:
        case |= {"offset": draw(st.sampled_from((0.0, 1.0)))}
    return case


def _leaf(what: Any, device: str) -> Tensor | None:
    return None if what is None else build(what, device).requires_grad_()


def _label(case: Case, dtype: str, what: str) -> str:
    return f"{case['op']} {what} {dtype}"


def _call_norm(
    case: Case, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Y and the sum that was normalised."""
    if case["op"] == "layer_norm":
        out = onepass.layer_norm(x, weight, bias, eps=case["eps"], stable=case["stable"], residual=residual)
    else:
        out = onepass.rms_norm(x, weight, eps=case["eps"], offset=case["offset"], residual=residual)
    return (out, x) if residual is None else out


def check_norm(case: Case, device: str) -> None:
    """Values and all gradients of layer_norm and rms_norm."""
    x, weight, residual = (_leaf(case[name], device) for name in ("x", "weight", "residual"))
    bias = _leaf(case.get("bias"), device)
    assert x is not None
    has_mean, eps = case["op"] == "layer_norm", case["eps"]
    stable, offset = case.get("stable", False), case.get("offset", 0.0)
    y, s = _call_norm(case, x, weight, bias, residual)
    tag = case["x"]["dtype"] + (" residual" if residual is not None else "") + (" stable" if stable else "")
    s64 = wide(s)
    if residual is not None:
        want = wide(x) + wide(residual)
        bound = (roundoff(s.dtype) + roundoff(accumulator(s.dtype))) * want.abs() + smallest(s.dtype)
        compare(s, want, bound, _label(case, tag, "sum"))
    require(y.dtype == x.dtype, _label(case, tag, "dtype"), f"y is {y.dtype}")
    acc = accumulator(s.dtype)
    n = x.shape[-1]
    rows = s64.reshape(-1, n) if n else s64.new_zeros(math.prod(x.shape[:-1]), 0)
    rounding = Rounding.of(acc, x.dtype)
    of_s = roundoff(s.dtype) if residual is not None and s.dtype != acc else 0.0
    found = bounds.norm(rows, eps, has_mean, stable, rounding.u, of_s, torch.finfo(acc).max) if n else None
    gain = torch.ones(n).double() if weight is None else wide(weight) + (0.0 if has_mean else offset)
    stretch = length(n)
    # without gradients other kernels of torch may do the work
    with torch.no_grad():
        alone = _call_norm(case, x, weight, bias, residual)
    # 8 bits times n ≤ 2^12: sums are exact in fp32, so the mean of a constant row is the constant
    exact = case["x"]["fill"] == "constant" and residual is None and n <= 4096 and has_mean
    if found is not None:
        of_bias = None if bias is None else wide(bias)
        want, bound = bounds.norm_values(found, gain, of_bias, rounding, stretch)
        # the result must be finite in the accumulator too
        fits = found.fits & (want.abs().amax(-1, keepdim=True) < torch.finfo(acc).max / 64)
        for way, result in (("y", y), ("y without gradients", alone[0])):
            compare(result.reshape(rows.shape), want, bound, _label(case, tag, way), rows=fits)
            if exact:
                only = torch.zeros_like(want) if of_bias is None else of_bias.expand(want.shape)
                bound_of_bias = torch.full_like(want, rounding.zero) + rounding.v * only.abs()
                compare(
                    result.reshape(rows.shape), only, bound_of_bias, _label(case, tag, f"constant row {way}"), rows=fits
                )
    if not y.requires_grad:
        return
    dy = torch.ones_like(y).sum() if case["sum"] else None
    up = build(case["dy"], device) if dy is None else y.new_ones(()).expand(y.shape)
    outs, ups = [y], [up.to(y.dtype)]
    ds = None
    if case["ds"] is not None:
        ds = build(case["ds"], device).to(s.dtype)
        outs, ups = [y, s], [*ups, ds]
    leaves = {k: t for k, t in {"x": x, "residual": residual, "weight": weight, "bias": bias}.items() if t is not None}
    grads = torch.autograd.grad(outs, list(leaves.values()), ups)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        require(grad.dtype == leaf.dtype and grad.shape == leaf.shape, _label(case, tag, f"gradient of {name}"), "form")
    if found is None or not len(rows):
        return
    dy64 = wide(ups[0]).reshape(rows.shape)
    ds64 = None if ds is None else wide(ds).reshape(rows.shape)
    vectors = max((roundoff(t.dtype) for k, t in leaves.items() if k in ("weight", "bias")), default=0.0)
    both = Rounding(rounding.u, roundoff(s.dtype) + rounding.v, rounding.zero)
    if residual is not None:
        both.v += roundoff(residual.dtype)
        both.zero = max(both.zero, smallest(residual.dtype), smallest(s.dtype))
    expected = bounds.norm_gradients(found, rows, dy64, ds64, gain, eps, has_mean, stable, both, vectors, stretch)
    largest = torch.finfo(acc).max / 64
    fits = found.fits & ((dy64 * gain).abs().amax(-1, keepdim=True) * n < largest)
    fits &= (dy64 * gain).abs().amax(-1, keepdim=True) * n * found.inverse * found.normed.abs().amax(
        -1, keepdim=True
    ) < largest
    small = max((smallest(t.dtype) for t in leaves.values()), default=0.0)
    if exact and not stable:
        # n is 0 then: what is left is r·(g − mean g), each rounded a few times
        g = dy64 * gain
        centred = found.inverse * (g - g.mean(-1, keepdim=True))
        unit = found.inverse * (g.abs() + g.abs().mean(-1, keepdim=True))
        bound = stretch * 4 * rounding.u * unit + rounding.v * centred.abs() + rounding.zero * (1 + found.inverse)
        if acc == torch.float64:
            # torch's mean of equal numbers may be off by an ulp there, and n by u·|mean|·r; it enters twice
            left = rounding.u * rows.abs().amax(-1, keepdim=True) * found.inverse
            bound = bound + stretch * found.inverse * left.square() * g.abs().mean(-1, keepdim=True)
        got = grads[list(leaves).index("x")].reshape(rows.shape)
        compare(got, centred, bound, _label(case, tag, "constant row gradient of x"), rows=fits)
    pairs = {"x": expected.dx, "residual": expected.dx, "weight": expected.dw, "bias": expected.db}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        want, bound = pairs[name]
        row_wise = name in ("x", "residual")
        if not row_wise and not bool(fits.all()):
            continue
        compare(
            grad.reshape(want.shape), want, bound + small + roundoff(leaf.dtype) * want.abs(),
            _label(case, tag, f"gradient of {name}"), rows=fits if row_wise else None,
        )  # fmt: skip


@st.composite
def _sum_cases(draw: Any, device: str) -> Case:
    shape = (*draw(_leading(device)), draw(_width(device)))
    if math.prod(shape) > 400_000:
        shape = (2, shape[-1])
    dtype = draw(st.sampled_from(dtypes(device)))
    other = draw(st.sampled_from((dtype, *dtypes(device))))
    vectors = draw(st.sampled_from((0, 0, 1, 2, 3, 16)))
    return {
        "op": "weighted_sum",
        "x": draw(spec(shape, dtype)),
        "weight": draw(spec((vectors, shape[-1]) if vectors else shape[-1:], other, fills=(*VECTORS, "cauchy"))),
        "out": draw(st.none() | st.sampled_from(dtypes(device))),
        "up": draw(st.sampled_from(UPSTREAM)),
        "seed": draw(SEEDS),
    }


def check_sum(case: Case, device: str) -> None:
    """Values and both gradients of weighted_sum."""
    x, weight = _leaf(case["x"], device), _leaf(case["weight"], device)
    assert x is not None
    assert weight is not None
    out = DTYPES[case["out"]] if case["out"] else None
    y = onepass.weighted_sum(x, weight, out_dtype=out)
    tag = f"{case['x']['dtype']}·{case['weight']['dtype']}"
    dtype = out or torch.promote_types(x.dtype, weight.dtype)
    require(y.dtype == dtype, _label(case, tag, "dtype"), f"{y.dtype}")
    acc = accumulator(x.dtype, weight.dtype)
    u, largest = roundoff(acc), torch.finfo(acc).max / 64
    rows = wide(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    vectors = wide(weight) if weight.dim() == 2 else wide(weight)[None]
    want, size = rows @ vectors.T, rows.abs() @ vectors.abs().T
    n, floor = x.shape[-1], smallest(acc) * (x.shape[-1] + 1) + smallest(dtype)
    compare(
        y.reshape(want.shape),
        want,
        length(n) * u * size + roundoff(dtype) * want.abs() + floor,
        _label(case, tag, "y"),
        rows=size < largest,
    )
    up = {
        "shape": list(y.shape),
        "dtype": str(dtype)[6:],
        "fill": case["up"],
        "layout": "contiguous",
        "seed": case["seed"],
    }
    dy = build(up, device)
    if not x.numel():
        return
    dx, dw = torch.autograd.grad(y, [x, weight], dy)
    g = wide(dy).reshape(want.shape)
    for name, grad, leaf, a, b, terms in (
        ("x", dx, x, g, vectors, len(vectors)), ("weight", dw, weight, g.T, rows, len(rows)),
    ):  # fmt: skip
        full, size = a @ b, a.abs() @ b.abs()
        bound = length(terms) * u * size + roundoff(leaf.dtype) * full.abs()
        bound = bound + smallest(acc) * (terms + 1) + smallest(leaf.dtype)
        compare(grad.reshape(full.shape), full, bound, _label(case, tag, f"gradient of {name}"), rows=size < largest)


@st.composite
def _score_cases(draw: Any, device: str) -> Case:
    batch, n = draw(st.sampled_from((0, 1, 2))), draw(sizes(7, largest=40))
    dim = max(1, draw(_width(device)))
    dim = dim if batch * n * dim < 400_000 else 33
    dtype = draw(st.sampled_from(dtypes(device)))
    vectors = draw(st.sampled_from((0, 0, 1, 2, 16)))
    return {
        "op": "score",
        "x": draw(spec((batch, n, dim), dtype)),
        "eps": draw(st.sampled_from(EPS)),
        "weight": draw(
            spec((vectors, dim) if vectors else (dim,), draw(st.sampled_from((dtype, *dtypes(device)))), fills=VECTORS)
        ),
        "up": draw(st.sampled_from(UPSTREAM)),
        "seed": draw(SEEDS),
    }


def check_score(case: Case, device: str) -> None:
    """Values and gradients of routing's score."""
    x, weight = _leaf(case["x"], device), _leaf(case["weight"], device)
    assert x is not None
    assert weight is not None
    s = score(x, weight, eps=case["eps"])
    # scores and statistics are kept in fp32 unless x is fp64
    acc = accumulator(x.dtype)
    u, largest = roundoff(acc), torch.finfo(acc).max / 64
    tag = f"{case['x']['dtype']}·{case['weight']['dtype']}"
    dim = x.shape[-1]
    if not x.numel():
        require(s.numel() == 0, _label(case, tag, "shape"), f"{tuple(s.shape)}")
        return
    rows, vectors = wide(x).reshape(-1, dim), wide(weight).reshape(-1, dim)
    found = bounds.norm(rows, case["eps"], False, False, u, 0.0, torch.finfo(acc).max)
    want, size = found.normed @ vectors.T, found.normed.abs() @ vectors.abs().T
    stretch = length(dim)
    bound = stretch * (u * size + want.abs() * found.of_inverse) + roundoff(s.dtype) * want.abs() + smallest(acc)
    bound = bound + smallest(acc) * dim * found.inverse
    fits = found.fits & ((rows.abs() @ vectors.abs().T).amax(-1, keepdim=True) < largest)
    got = (s if weight.dim() == 2 else s[:, None]).transpose(1, 2).reshape(want.shape)
    compare(got, want, bound, _label(case, tag, "scores"), rows=fits)
    up = {
        "shape": list(s.shape),
        "dtype": str(s.dtype)[6:],
        "fill": case["up"],
        "layout": "contiguous",
        "seed": case["seed"],
    }
    gs = build(up, device)
    dx, dw = torch.autograd.grad(s, [x, weight], gs)
    g = wide(gs if weight.dim() == 2 else gs[:, None]).transpose(1, 2).reshape(want.shape)
    gain, gain_size = g @ vectors, g.abs() @ vectors.abs()
    along = (gain * found.normed).mean(-1, keepdim=True)
    along_size = (gain_size * found.normed.abs()).mean(-1, keepdim=True)
    r, relative = found.inverse, found.of_inverse
    full = r * (gain - found.normed * along)
    parts = (length(len(vectors)) * u + 3 * stretch * relative) * gain_size + (
        2 * stretch * u + 6 * stretch * relative
    ) * found.normed.abs() * along_size
    bound = (
        r * parts
        + roundoff(x.dtype) * full.abs()
        + smallest(x.dtype)
        + smallest(acc) * r * (1 + found.normed.abs()) * dim * (1 + gain_size)
    )
    inside = fits & (gain_size.amax(-1, keepdim=True) * dim * (1 + r) < largest)
    compare(dx.reshape(rows.shape), full, bound, _label(case, tag, "gradient of x"), rows=inside)
    if bool(inside.all()):
        full = g.T @ found.normed
        bound = (
            g.abs().T @ (found.normed.abs() * (length(len(rows)) * u + stretch * relative))
            + roundoff(weight.dtype) * full.abs()
        )
        bound = bound + smallest(acc) * len(rows) * (1 + float(r.max())) + smallest(weight.dtype)
        compare(dw.reshape(full.shape), full, bound, _label(case, tag, "gradient of weight"))


PROPERTIES = [
    Property("norm", _norm_cases, check_norm, share=2.0),
    Property("weighted sum", _sum_cases, check_sum),
    Property("score", _score_cases, check_score),
]
