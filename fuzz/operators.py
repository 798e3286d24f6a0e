"""Operators against float64: norms, weighted sum, soft and hard top-k, coordinate descent, routing's score."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.ops.routing.op import score

from . import bounds, soft
from .bounds import Rounding, accumulator, compare, length, roundoff, smallest
from .engine import Case, FaultError, Property, SkipCase, require
from .tensors import DTYPES, SEEDS, build, dtypes, mask, sizes, spec, torch_device, wide

KINDS = ("capped_exp", "sigmoid", "laplace", "clamp")
VECTORS = ("normal", "ties", "plateau", "constant", "shifted", "ones", "large")
UPSTREAM = ("normal", "ties", "cauchy", "ones", "plateau", "outlier")
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


def check_norm(case: Case, device: str) -> None:
    """Values and all gradients of layer_norm and rms_norm."""
    x, weight, residual = (_leaf(case[name], device) for name in ("x", "weight", "residual"))
    bias = _leaf(case.get("bias"), device)
    assert x is not None
    has_mean, eps = case["op"] == "layer_norm", case["eps"]
    stable, offset = case.get("stable", False), case.get("offset", 0.0)
    if has_mean:
        out = onepass.layer_norm(x, weight, bias, eps=eps, stable=stable, residual=residual)
    else:
        out = onepass.rms_norm(x, weight, eps=eps, offset=offset, residual=residual)
    y, s = (out, x) if residual is None else out
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
    if found is not None:
        of_bias = None if bias is None else wide(bias)
        want, bound = bounds.norm_values(found, gain, of_bias, rounding, stretch)
        # the result must be finite in the accumulator too
        fits = found.fits & (want.abs().amax(-1, keepdim=True) < torch.finfo(acc).max / 64 if n else found.fits)
        compare(y.reshape(rows.shape), want, bound, _label(case, tag, "y"), rows=fits)
        if case["x"]["fill"] == "constant" and residual is None and n <= 4096 and x.dtype.itemsize == 2 and has_mean:
            # 8 bits times n ≤ 2^12: the sum is exact in fp32, so the mean is the constant, and what is left is the bias
            exact = torch.zeros_like(want) if of_bias is None else of_bias.to(x.dtype).double().expand(want.shape)
            compare(
                y.reshape(rows.shape), exact, torch.full_like(want, rounding.zero), _label(case, tag, "constant row")
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
        "op": "weighted_sum", "x": draw(spec(shape, dtype)),
        "weight": draw(spec((vectors, shape[-1]) if vectors else shape[-1:], other, fills=(*VECTORS, "cauchy"))),
        "out": draw(st.none() | st.sampled_from(dtypes(device))), "up": draw(st.sampled_from(UPSTREAM)), "seed": draw(SEEDS),
    }  # fmt: skip


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
        y.reshape(want.shape), want, length(n) * u * size + roundoff(dtype) * want.abs() + floor, _label(case, tag, "y"),
        rows=size < largest,
    )  # fmt: skip
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


SCORES = (
    "normal", "uniform", "ties", "plateau", "constant", "shifted", "cauchy", "outlier", "large", "ones", "huge", "wide",
    "tiny",
)  # fmt: skip
SOFT_EPS = (0.1, 1.0, 0.03, 1e-3, 1e-6, 10.0, 1e3)


def _numbers(device: str, dtype: str) -> st.SearchStrategy[Any]:
    """How k or eps is given: a number, one tensor for all rows, one per row."""
    return st.sampled_from(("number", "tensor", "rows")).flatmap(
        lambda form: st.tuples(st.just(form), st.sampled_from((dtype, *dtypes(device))))
    )


@st.composite
def _soft_cases(draw: Any, device: str) -> Case:
    long = 400 if device == "interpret" else 20_000 if device == "cpu" else 200_000
    n = draw(st.one_of(sizes(5, 64, 1000, 4097 if device != "interpret" else 100), st.integers(0, 40)))
    rows = draw(st.sampled_from((1, 2, 3, 5)))
    if device != "interpret" and draw(st.integers(0, 9)) == 9:
        n, rows = draw(st.sampled_from((8192, long, 100_000 if device == "cuda" else 30_011))), 1
    dtype = draw(st.sampled_from(dtypes(device)))
    k = draw(
        st.one_of(
            st.sampled_from((1, n // 2, n - 1, n, n + 1, n / 16, 0.5, n - 0.5, 1.25, 1e-3)),
            st.integers(1, max(1, n)), st.floats(0.0625, max(1.0, float(n)), width=32),
        )
    )  # fmt: skip
    x = draw(spec((rows, n), dtype, fills=SCORES))
    special = draw(st.sampled_from((0, 0, 0, 1, 2, 3)))
    if special:
        values = [(math.inf, 0.05), (-math.inf, 0.3), (math.nan, 0.02)][special - 1]
        x["special"] = [[str(values[0]), values[1]]]
    return {
        "op": draw(st.sampled_from(("soft_topk", "topk"))), "scores": x, "k": float(max(k, 1e-3)),
        "k_form": draw(_numbers(device, dtype)), "eps": draw(st.sampled_from(SOFT_EPS)),
        "eps_form": draw(_numbers(device, dtype)), "kind": draw(st.sampled_from(KINDS)),
        "mask": draw(st.none() | st.sampled_from((0.0, 0.1, 0.5, 0.95))), "seed": draw(SEEDS),
        "up": draw(st.sampled_from(UPSTREAM)),
    }  # fmt: skip


def _parameter(value: float, form: Any, rows: int, device: str) -> tuple[Any, Tensor]:
    """k or eps as it is passed, and its value for each row in float64."""
    how, dtype = form
    if how == "number":
        # numbers reach the kernels in fp32
        value = float(torch.tensor(value, dtype=torch.float32))
        return value, torch.full((rows,), value, dtype=torch.float64)
    shape = (rows,) if how == "rows" else ()
    t = torch.full(shape, value, dtype=DTYPES[dtype], device=torch_device(device))
    # fp16 has no 1e-8, and no row of 10^5
    t = t.clamp(torch.finfo(t.dtype).smallest_normal, torch.finfo(t.dtype).max).requires_grad_()
    return t, wide(t).expand(rows).clone()


def _valid(case: Case, x: Tensor, device: str) -> tuple[Tensor | None, Tensor]:
    if case["mask"] is None:
        return None, torch.ones(x.shape, dtype=torch.bool)
    given = mask(list(x.shape), case["seed"], case["mask"], device)
    return given, given.cpu()


def check_soft(case: Case, device: str) -> None:
    """Values and gradients of soft_topk; selection, values, gates and gradients of topk."""
    x = _leaf(case["scores"], device)
    assert x is not None
    rows, n = x.shape
    given, valid = _valid(case, x, device)
    eps, eps_rows = _parameter(case["eps"], case["eps_form"], rows, device)
    u = roundoff(accumulator(x.dtype))
    zero = max(soft.vanishing(x.dtype), smallest(x.dtype))
    tag = f"{case['kind']} {case['scores']['dtype']}" + (" infinite" if "special" in case["scores"] else "")
    s64 = wide(x)
    if case["k"] > n / 2:
        tag += " k > n÷2"
    if case["op"] == "topk":
        k = math.ceil(case["k"])
        k_rows = torch.full((rows,), float(k), dtype=torch.float64)
        values, indices, out = onepass.topk(x, k, eps=eps, mask=given, kind=case["kind"])
        _check_selection(case, s64, valid, k, values, indices, out, tag)
        leaves = {"scores": x}
    else:
        k, k_rows = _parameter(case["k"], case["k_form"], rows, device)
        out = onepass.soft_topk(x, k, eps=eps, mask=given, kind=case["kind"])
        leaves = {"scores": x} | ({"k": k} if isinstance(k, Tensor) else {})
    if isinstance(eps, Tensor):
        leaves["eps"] = eps
    if eps_rows.max() / max(eps_rows.min(), 1e-300) > 1e30 or not n:
        return
    solved = [soft.solve(s64[i], valid[i], float(k_rows[i]), float(eps_rows[i]), case["kind"], u) for i in range(rows)]
    if case["op"] == "soft_topk":
        for i, row in enumerate(solved):
            bound = soft.allowed_gates(row, case["kind"], u, roundoff(x.dtype), zero)
            if bool(row.y.isnan().any()):
                # documented both ways for what is masked there: the row is NaN, and masked entries are 0
                some = out[i][valid[i].to(out.device) & (x[i] != -math.inf)]
                require(bool(some.isnan().all()), _label(case, tag, "NaN row"), f"row {i}: {out[i].tolist()[:12]}")
                continue
            compare(out[i], row.y, bound, _label(case, tag, "gates"))
    if not out.requires_grad or any(bool(row.y.isnan().any()) for row in solved):
        return
    up = {
        "shape": list(out.shape),
        "dtype": case["scores"]["dtype"],
        "fill": case["up"],
        "layout": "contiguous",
        "seed": case["seed"],
    }
    gy = build(up, device)
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), gy, allow_unused=True), strict=True))
    g64 = wide(gy)
    if case["op"] == "topk":
        placed = indices.cpu()
        g64 = torch.zeros(rows, n).double().scatter_add(1, placed.clamp_min(0), torch.where(placed >= 0, g64, 0.0))
    _check_soft_gradients(case, solved, g64, leaves, grads, eps_rows, u, zero, tag)


def _check_soft_gradients(
    case: Case, solved: list[soft.Solved], g64: Tensor, leaves: dict[str, Tensor], grads: dict[str, Tensor | None],
    eps_rows: Tensor, u: float, zero: float, tag: str,
) -> None:  # fmt: skip
    found = [
        soft.gradients(row, g64[i], float(eps_rows[i]), u, roundoff(leaves["scores"].dtype), zero)
        if row.sharp
        else None
        for i, row in enumerate(solved)
    ]
    ds = grads["scores"]
    for i, row in enumerate(found):
        if row is not None and ds is not None:
            compare(ds[i], *row.ds, _label(case, tag, "gradient of scores"))
    if any(row is None for row in found):
        return
    known = [row for row in found if row is not None]
    for name in ("k", "eps"):
        leaf, grad = leaves.get(name), grads.get(name)
        if leaf is None or grad is None:
            continue
        pairs = [row.dk if name == "k" else row.deps for row in known]
        want, bound = (torch.tensor([p[j] for p in pairs], dtype=torch.float64) for j in (0, 1))
        if leaf.dim() == 0:
            bound = (bound.sum() + length(len(pairs)) * u * want.abs().sum())[None]
            want = want.sum()[None]
        bound = bound + roundoff(leaf.dtype) * want.abs() + smallest(leaf.dtype)
        compare(grad.reshape(want.shape), want, bound, _label(case, tag, f"gradient of {name}"))


def _check_selection(
    case: Case, s64: Tensor, valid: Tensor, k: int, values: Tensor, indices: Tensor, gates: Tensor, tag: str
) -> None:
    """The k largest by a stable sort in which NaN comes before +inf."""
    nan = " NaN and inf" if bool(s64.isnan().any()) else ""
    if bool((s64 == math.inf).any()) and bool(s64.isnan().any()):
        nan += " together"
    for i in range(len(s64)):
        allowed = (valid[i] & (s64[i] != -math.inf)).nonzero()[:, 0].tolist()
        row = s64[i].tolist()
        order = sorted(allowed, key=lambda j: (not math.isnan(row[j]), 0.0 if math.isnan(row[j]) else -row[j], j))[:k]
        missing = k - len(order)
        what = _label(case, case["scores"]["dtype"] + nan, "selection")
        got = indices[i].tolist()
        require(got == order + [-1] * missing, what, f"row {i}: {got[:12]} instead of {order[:12]} and {missing} × −1")
        want = [row[j] for j in order] + [-math.inf] * missing
        same = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values[i].tolist(), want, strict=True))
        require(same, what + " values", f"row {i}: {values[i].tolist()[:12]} instead of {want[:12]}")
        expected = [1.0] * len(order) + [0.0] * missing
        if not any(math.isnan(v) for v in row):
            require(gates[i].tolist() == expected, what + " gates", f"row {i}: {gates[i].tolist()[:12]}")


@st.composite
def _descent_cases(draw: Any, device: str) -> Case:
    n = draw(sizes(5, 64, 1000 if device != "interpret" else 64))
    dtype = draw(st.sampled_from(dtypes(device)))
    x = draw(spec((draw(st.sampled_from((1, 2, 4))), n), dtype, fills=SCORES))
    if draw(st.integers(0, 3)) == 3:
        x["special"] = [["-inf", 0.3]]
    eps = draw(st.sampled_from((0.1, 1.0, 0.03, 1e-3, 10.0)))
    return {
        "op": "coor_descent", "scores": x, "n_iters": draw(st.sampled_from((1, 2, 3, 8, 20, 50))), "eps": eps,
        "k": float(draw(st.one_of(st.sampled_from((1, n // 2, n - 1, n, n + 1, 0.5)), st.integers(1, max(1, n)))) or 1),
        "k_form": draw(_numbers(device, dtype)), "eps_init": draw(st.none() | st.sampled_from((eps * 4, eps / 2, 4.0))),
        "eps_decay": draw(st.sampled_from((1.0, 0.7, 0.5))), "mask": draw(st.none() | st.sampled_from((0.0, 0.5, 0.9))),
        "seed": draw(SEEDS), "up": draw(st.sampled_from(UPSTREAM)),
    }  # fmt: skip


def check_descent(case: Case, device: str) -> None:
    """Values and gradients of coor_descent."""
    x = _leaf(case["scores"], device)
    assert x is not None
    case = {**case, "k": max(case["k"], 0.5)}
    rows = len(x)
    given, valid = _valid(case, x, device)
    k, k_rows = _parameter(case["k"], case["k_form"], rows, device)
    options = {name: case[name] for name in ("n_iters", "eps", "eps_init", "eps_decay")}
    y = onepass.coor_descent(x, k=k, mask=given, **options)
    current = max(case["eps_init"] or case["eps"], case["eps"])
    schedule = [current]
    for _ in range(case["n_iters"]):
        schedule.append(max(schedule[-1] * case["eps_decay"], case["eps"]))
    u, v = roundoff(accumulator(x.dtype)), roundoff(x.dtype)
    zero = max(soft.vanishing(x.dtype), smallest(x.dtype))
    up = {
        "shape": list(y.shape),
        "dtype": case["scores"]["dtype"],
        "fill": case["up"],
        "layout": "contiguous",
        "seed": case["seed"],
    }
    gy = build(up, device)
    tag = case["scores"]["dtype"]
    s64, g64 = wide(x), wide(gy)
    found = [soft.descend(s64[i], valid[i], float(k_rows[i]), schedule, g64[i], u, v, zero) for i in range(rows)]
    for i, row in enumerate(found):
        compare(y[i], row.y, row.allowed, _label(case, tag, "gates"))
    if not x.numel():
        return
    leaves = [x, *([k] if isinstance(k, Tensor) else [])]
    grads = torch.autograd.grad(y, leaves, gy)
    for i, row in enumerate(found):
        if row.sharp:
            compare(grads[0][i], *row.ds, _label(case, tag, "gradient of scores"))
    if len(leaves) > 1 and k.dim() == 1:
        for i, row in enumerate(found):
            if row.sharp:
                want, bound = (torch.tensor([p], dtype=torch.float64) for p in row.dk)
                bound = bound + roundoff(k.dtype) * want.abs() + smallest(k.dtype)
                compare(grads[1][i : i + 1], want, bound, _label(case, tag, "gradient of k"))


@st.composite
def _score_cases(draw: Any, device: str) -> Case:
    batch, n = draw(st.sampled_from((0, 1, 2))), draw(sizes(7, largest=40))
    dim = max(1, draw(_width(device)))
    dim = dim if batch * n * dim < 400_000 else 33
    dtype = draw(st.sampled_from(dtypes(device)))
    vectors = draw(st.sampled_from((0, 0, 1, 2, 16)))
    return {
        "op": "score", "x": draw(spec((batch, n, dim), dtype)), "eps": draw(st.sampled_from(EPS)),
        "weight": draw(spec((vectors, dim) if vectors else (dim,), draw(st.sampled_from((dtype, *dtypes(device)))), fills=VECTORS)),
        "up": draw(st.sampled_from(UPSTREAM)), "seed": draw(SEEDS),
    }  # fmt: skip


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
    batch, n, dim = x.shape
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


__all__ = ["PROPERTIES", "FaultError", "SkipCase"]

PROPERTIES = [
    Property("norm", lambda d: _norm_cases(d), check_norm, share=2.0),
    Property("weighted sum", lambda d: _sum_cases(d), check_sum),
    Property("soft and hard top-k", lambda d: _soft_cases(d), check_soft, share=2.0),
    Property("coordinate descent", lambda d: _descent_cases(d), check_descent),
    Property("score", lambda d: _score_cases(d), check_score),
]
