"""Soft and hard top-k against float64: gates, gradients, selection; coordinate descent step for step."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import onepass

from . import soft
from .bounds import accumulator, compare, length, roundoff, smallest
from .engine import Case, Property, require
from .tensors import DTYPES, SEEDS, UPSTREAM, build, dtypes, mask, sizes, spec, torch_device, wide

KINDS = ("capped_exp", "sigmoid", "laplace", "clamp")
SCORES = (
    "normal", "uniform", "ties", "plateau", "constant", "shifted", "cauchy", "outlier", "large", "ones", "huge", "wide",
    "tiny",
)  # fmt: skip
SOFT_EPS = (0.1, 1.0, 0.03, 1e-3, 1e-6, 10.0, 1e3)


def _label(case: Case, dtype: str, what: str) -> str:
    return f"{case['op']} {what} {dtype}"


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
    special = draw(st.sampled_from(((), (), (), ("inf",), ("-inf",), ("nan",), ("inf", "nan"), ("-inf", "inf", "nan"))))
    if special:
        x["special"] = [[value, {"inf": 0.05, "-inf": 0.3, "nan": 0.05}[value]] for value in special]
    return {
        "op": draw(st.sampled_from(("soft_topk", "topk"))), "scores": x, "k": float(max(k, 1e-3)),
        "k_form": draw(_numbers(device, dtype)), "eps": draw(st.sampled_from(SOFT_EPS)),
        "eps_form": draw(_numbers(device, dtype)), "kind": draw(st.sampled_from(KINDS)),
        "mask": draw(st.none() | st.sampled_from((0.0, 0.1, 0.5, 0.95))), "seed": draw(SEEDS),
        "up": draw(st.sampled_from(UPSTREAM)),
    }  # fmt: skip


def _parameter(value: float, form: Any, rows: int, device: str) -> tuple[Any, Tensor]:
    """K or eps as it is passed, and its value for each row in float64."""
    how, dtype = form
    if how == "number":
        # numbers reach the kernels in fp32
        value = float(torch.tensor(value, dtype=torch.float32))
        return value, torch.full((rows,), value, dtype=torch.float64)
    shape = (rows,) if how == "rows" else ()
    # fp16 has no 1e-8, and no row of 10^5
    limits = torch.finfo(DTYPES[dtype])
    value = min(max(value, limits.smallest_normal), limits.max)
    t = torch.full(shape, value, dtype=DTYPES[dtype], device=torch_device(device)).requires_grad_()
    return t, wide(t).expand(rows).clone()


def _valid(case: Case, x: Tensor, device: str) -> tuple[Tensor | None, Tensor]:
    if case["mask"] is None:
        return None, torch.ones(x.shape, dtype=torch.bool)
    given = mask(list(x.shape), case["seed"], case["mask"], device)
    return given, given.cpu()


def check_soft(case: Case, device: str) -> None:
    """Values and gradients of soft_topk; selection, values, gates and gradients of topk."""
    x = build(case["scores"], device).requires_grad_()
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
    x = build(case["scores"], device).requires_grad_()
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


PROPERTIES = [
    Property("soft and hard top-k", _soft_cases, check_soft, share=2.0),
    Property("coordinate descent", _descent_cases, check_descent),
]
