"""The routed layers' operators against float64: gather and scatter, attention over spans, rotary, causal choice."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from onepass.ops.causal_choice.op import causal_choice
from onepass.ops.causal_choice.reference import fraction, per_token, running_threshold
from onepass.ops.causal_choice.reference import reference as choice_reference
from onepass.ops.routing.op import gather, scatter_add
from onepass.ops.span_attention.op import span_attention
from onepass.ops.span_attention.op_rotary import rotary
from onepass.ops.span_attention.torch_rotary import rotate

from .bounds import accumulator, compare, length, roundoff, smallest
from .engine import Case, Property, require
from .tensors import SEEDS, build, dtypes, mask, sizes, spec, torch_device, wide

TOKENS = ("normal", "ties", "cauchy", "outlier", "plateau", "constant")


def choice(batch: int, n: int, k: int, routes: int, seed: int, device: str) -> Tensor:
    """K different tokens per row and route, some missing or out of range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, routes, n) if routes else (batch, n)
    indices = torch.rand(shape, generator=generator).argsort(-1)[..., :k]
    missing = torch.rand(indices.shape, generator=generator)
    indices = indices.masked_fill(missing < 0.2, -1).masked_fill(missing > 0.95, n + 3)
    return indices.to(torch_device(device))


@st.composite
def _routing_cases(draw: Any, device: str) -> Case:
    n, dim = draw(sizes(9, largest=60)), draw(sizes(33, 64, largest=200))
    batch, routes = draw(st.sampled_from((0, 1, 2, 3))), draw(st.sampled_from((0, 0, 1, 2, 3)))
    k = draw(st.integers(0, n))
    dtype = draw(st.sampled_from(dtypes(device)))
    other = st.sampled_from((dtype, *dtypes(device)))
    chosen = (batch, routes, k) if routes else (batch, k)
    return {
        "op": draw(st.sampled_from(("gather", "scatter_add"))), "k": k, "routes": routes, "seed": draw(SEEDS),
        "x": draw(spec((batch, n, dim), dtype, fills=TOKENS)), "up": draw(SEEDS),
        "update": draw(spec((*chosen, dim), draw(other), fills=TOKENS)),
        "gates": draw(st.none() | spec(chosen, draw(other), fills=("uniform", "normal", "ones"))),
        "inplace": draw(st.booleans()),
    }  # fmt: skip


def check_routing(case: Case, device: str) -> None:
    """Gather is exact; its gradient and the gated addition round once per route."""
    x = build(case["x"], device)
    batch, n, dim = x.shape
    indices = choice(batch, n, case["k"], case["routes"], case["seed"], device)
    at = indices.cpu().view(batch, max(1, case["routes"]), case["k"])
    found = (at >= 0) & (at < n)
    tag = f"{case['op']} {case['x']['dtype']}"
    if case["op"] == "gather":
        leaf = x.detach().requires_grad_()
        y = gather(leaf, indices)
        columns = at.where(found, torch.zeros_like(at)).flatten(1)
        if n:
            want = (
                x.cpu().gather(1, columns[..., None].expand(-1, -1, dim)).masked_fill(~found.flatten(1)[..., None], 0)
            )
            require(torch.equal(y.cpu().view(want.shape), want), tag, "not the rows that were asked for")
        dy = build({**case["x"], "shape": list(y.shape), "seed": case["up"], "layout": "contiguous"}, device)
        grad = torch.autograd.grad(y, leaf, dy)[0] if y.requires_grad else torch.zeros_like(x)
        _added(torch.zeros_like(x), dy.view(batch, *at.shape[1:], dim), None, at, found, grad, f"{tag} gradient")
        return
    update = build(case["update"], device).detach().requires_grad_()
    gates = None if case["gates"] is None else build(case["gates"], device).detach().requires_grad_()
    before = x.detach().clone()
    own = x.detach().clone().contiguous() if case["inplace"] else x.detach()
    y = scatter_add(own, update, gates, indices, inplace=case["inplace"])
    if not case["inplace"]:
        require(torch.equal(x, before), tag, "y was written to")
    shape = (batch, *at.shape[1:])
    weights = None if gates is None else gates.detach().view(shape)
    _added(before, update.detach().view(*shape, dim), weights, at, found, y, tag)
    if not y.requires_grad or not update.numel() or not n:
        return
    dy = build({**case["x"], "shape": list(y.shape), "seed": case["up"], "layout": "contiguous"}, device)
    leaves = [update] if gates is None else [update, gates]
    grads = torch.autograd.grad(y, leaves, dy)
    columns = at.where(found, torch.zeros_like(at)).flatten(1)
    upstream = wide(dy).gather(1, columns[..., None].expand(-1, -1, dim)).masked_fill(~found.flatten(1)[..., None], 0)
    acc = accumulator(x.dtype, update.dtype, *([gates.dtype] if gates is not None else []))
    g = torch.ones(batch, columns.shape[1]).double() if gates is None else wide(gates).flatten(1)
    want = upstream * g[..., None]
    bound = (4 * roundoff(acc) + roundoff(update.dtype)) * want.abs() + smallest(update.dtype) + smallest(acc)
    compare(grads[0].reshape(want.shape), want, bound, f"{tag} gradient of update")
    if gates is not None:
        terms = upstream * wide(update).reshape(upstream.shape)
        want, size = terms.sum(-1), terms.abs().sum(-1)
        bound = length(dim) * roundoff(acc) * size + roundoff(gates.dtype) * want.abs()
        bound = bound + smallest(acc) * (dim + 1) + smallest(gates.dtype)
        compare(grads[1].reshape(want.shape), want, bound, f"{tag} gradient of gates")


def _added(y: Tensor, update: Tensor, gates: Tensor | None, at: Tensor, found: Tensor, got: Tensor, what: str) -> None:
    """Compare with y + Σ over routes, one rounding to y's dtype per route."""
    out = wide(y)
    size = torch.zeros_like(out)
    moved = wide(update) if gates is None else wide(update) * wide(gates)[..., None]
    for route in range(at.shape[1]):
        if not out.shape[1] or not at.shape[-1]:
            break
        columns = (
            at[:, route].where(found[:, route], torch.zeros_like(at[:, route]))[..., None].expand(-1, -1, y.shape[-1])
        )
        part = moved[:, route].masked_fill(~found[:, route, :, None], 0)
        out = out.scatter_add(1, columns, part)
        touched = torch.zeros_like(out).scatter_add(1, columns, part.abs())
        size = size + torch.where(touched > 0, out.abs() + touched, 0.0)
    acc = accumulator(y.dtype, update.dtype)
    bound = (4 * roundoff(acc) + 2 * roundoff(y.dtype)) * size + smallest(y.dtype) * (size > 0)
    compare(
        got.reshape(out.shape),
        out,
        bound,
        what,
        rows=size.amax() < torch.finfo(y.dtype).max / 2 if size.numel() else None,
    )


@st.composite
def _span_cases(draw: Any, device: str) -> Case:
    small = 24 if device == "interpret" else 90
    n, m = draw(sizes(16, largest=small)), draw(sizes(16, largest=small))
    batch, heads = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 3)))
    width = draw(st.sampled_from((1, 5, 8, 16, 33, 64) if device != "interpret" else (4, 16)))
    dtype = draw(st.sampled_from(dtypes(device)))
    fills = ("normal", "ties", "plateau", "outlier", "uniform")
    return {
        "op": "span_attention",
        "q": draw(spec((batch, n, heads, width), dtype, fills=fills)),
        "k": draw(spec((batch, m, heads, width), dtype, fills=fills)),
        "v": draw(spec((batch, m, heads, width), dtype, fills=TOKENS)),
        "up": draw(SEEDS),
        "seed": draw(SEEDS),
        "scale": draw(st.none() | st.sampled_from((0.01, 1.0))),
        "mask": draw(st.none() | st.sampled_from((0.0, 0.5, 0.9))),
        "spans": draw(st.sampled_from(("window", "causal", "random", "all", "none"))),
    }


def _spans(case: Case, n: int, m: int, device: str) -> tuple[Tensor, Tensor]:
    i = torch.arange(n)
    if case["spans"] == "random":
        generator = torch.Generator().manual_seed(case["seed"])
        first = torch.randint(-3, m + 3, (n,), generator=generator).sort().values
        last = (first + torch.randint(0, 9, (n,), generator=generator)).cummax(0).values if n else first
    else:
        first, last = {
            "window": (i // 8 * 8 - 8, i // 8 * 8 + 16), "causal": (i * 0, i + 1), "all": (i * 0, i * 0 + m),
            "none": (i * 0 + 2, i * 0 + 1),
        }[case["spans"]]  # fmt: skip
    return first.to(torch_device(device)), last.to(torch_device(device))


def check_span(case: Case, device: str) -> None:
    """Values and gradients of attention over runs of keys; keys that nobody may see hold NaN."""
    q, k, v = (build(case[name], device).detach().clone() for name in "qkv")
    (batch, n, _, width), m = q.shape, k.shape[1]
    first, last = _spans(case, n, m, device)
    allowed = None if case["mask"] is None else mask([batch, m], case["seed"], case["mask"], device)
    if allowed is not None and m:
        k[~allowed], v[~allowed] = math.nan, math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = span_attention(q, k, v, first, last, mask=allowed, scale=case["scale"])
    scale = 1 / math.sqrt(width) if case["scale"] is None else case["scale"]
    a, b, c = (wide(t).nan_to_num(0.0).transpose(1, 2) for t in leaves)
    keys = torch.arange(m)
    seen = (keys >= first.cpu()[:, None]) & (keys < last.cpu()[:, None])
    seen = seen[None, None] if allowed is None else (seen & allowed.cpu()[:, None])[:, None]
    logits, size = scale * a @ b.transpose(-1, -2), scale * a.abs() @ b.abs().transpose(-1, -2)
    some = seen.any(-1, keepdim=True)
    p = logits.masked_fill(~seen, -math.inf).masked_fill(~some, 0.0).softmax(-1).masked_fill(~seen, 0.0)
    p = p.expand(logits.shape)
    u = roundoff(accumulator(q.dtype))
    # weights are rounded to the values' dtype before they meet them, as in every flash attention; the scaled query too
    half = roundoff(q.dtype)
    of_logit = (length(width) * u + 2 * half) * size + 4 * u * logits.abs()
    spread = (p * of_logit).sum(-1, keepdim=True)
    of_p = p * (of_logit + spread + 2 * half + length(m) * u)
    want = p @ c
    bound = (
        of_p @ c.abs()
        + (length(m) * u) * (p @ c.abs())
        + half * want.abs()
        + smallest(q.dtype) * (1 + c.abs().sum(-2, keepdim=True))
    )
    tag = f"span_attention {case['q']['dtype']}"
    certain = (of_logit.masked_fill(~seen, 0.0).amax((-1, -2), keepdim=True) < 0.1) if m and n else torch.ones(1).bool()
    compare(y.transpose(1, 2), want, bound, tag, rows=certain)
    if not (n and m and bool(certain.all())):
        return
    dy = build(
        {**case["q"], "shape": list(y.shape), "seed": case["up"], "layout": "contiguous", "fill": "normal"}, device
    )
    grads = torch.autograd.grad(y, leaves, dy)
    g = wide(dy).transpose(1, 2)
    dp, dp_size = g @ c.transpose(-1, -2), g.abs() @ c.abs().transpose(-1, -2)
    mean, mean_size = (p * dp).sum(-1, keepdim=True), (p * dp_size).sum(-1, keepdim=True)
    ds = p * (dp - mean)
    if bool((2 * ds.abs() > torch.finfo(q.dtype).max).any()):
        return  # as in every flash attention, ds is rounded to the tokens' dtype before the products
    # D = Σ dy·y is taken from the rounded output
    of_mean = (of_p * dp_size).sum(-1, keepdim=True) + (length(width) * u + 2 * half) * mean_size
    of_mean = of_mean + (g.abs() * bound).sum(-1, keepdim=True)
    of_ds = of_p * (dp - mean).abs() + p * ((length(width) * u + half) * dp_size + of_mean) + 2 * half * ds.abs()
    tiny = smallest(q.dtype) * (1 + dp_size.amax((-1, -2), keepdim=True))
    expected = (
        ("q", scale * ds @ b, scale * (of_ds + length(m) * u * ds.abs() + tiny) @ b.abs()),
        (
            "k",
            scale * ds.transpose(-1, -2) @ a,
            scale * (of_ds + length(n) * u * ds.abs() + tiny).transpose(-1, -2) @ a.abs(),
        ),
        ("v", p.transpose(-1, -2) @ g, (of_p + length(n) * u * p + tiny).transpose(-1, -2) @ g.abs()),
    )
    for (name, full, allowance), grad in zip(expected, grads, strict=True):
        compare(
            grad.transpose(1, 2), full, allowance + half * full.abs() + smallest(q.dtype), f"{tag} gradient of {name}"
        )


@st.composite
def _rotary_cases(draw: Any, device: str) -> Case:
    n = draw(sizes(7, largest=60))
    dtype = draw(st.sampled_from(dtypes(device)))
    shape = (draw(st.sampled_from((1, 2))), n, draw(st.sampled_from((1, 3))), draw(st.sampled_from((2, 6, 8, 64))))
    return {
        "op": "rotary",
        "x": draw(spec(shape, dtype, fills=TOKENS)),
        "seed": draw(SEEDS),
        "far": draw(st.none() | st.sampled_from((10, 100_000, 10**7))),
        "base": draw(st.sampled_from((1e4, 100.0, 5e5))),
    }


def check_rotary(case: Case, device: str) -> None:
    """Rotation by positions, and its gradient, the rotation back."""
    x = build(case["x"], device).requires_grad_()
    positions = None
    if case["far"] is not None:
        generator = torch.Generator().manual_seed(case["seed"])
        positions = torch.randint(-case["far"], case["far"], (x.shape[1],), generator=generator).to(x.device)
    y = rotary(x, positions, base=case["base"])
    given = None if positions is None else positions.cpu()
    u, v = roundoff(accumulator(x.dtype)), roundoff(x.dtype)
    dy = build({**case["x"], "seed": case["seed"], "layout": "contiguous"}, device)
    (grad,) = torch.autograd.grad(y, x, dy)
    # angles are fp64 until less than a turn is left; that is rounded (4 u), its cosine and sine (2), the products (3)
    angle = 2**-50 * float(case["far"] or x.shape[1])
    for what, got, source, inverse in (("", y, x, False), (" gradient", grad, dy, True)):
        want = rotate(wide(source), given, case["base"], inverse)
        half = wide(source).abs().unflatten(-1, (2, -1)).sum(-2)
        size = torch.cat((half, half), -1)
        bound = (10 * u + angle) * size + v * want.abs() + smallest(x.dtype)
        compare(got, want, bound, f"rotary {case['x']['dtype']}{what}")


@st.composite
def _causal_cases(draw: Any, device: str) -> Case:
    n = draw(sizes(33, 101, 300, largest=100 if device == "interpret" else 400))
    block = draw(st.sampled_from((1, 4, 8, 32, 40, 128)))
    dtype = draw(st.sampled_from(dtypes(device)))
    fills = ("normal", "ties", "plateau", "constant", "cauchy", "outlier", "shifted", "ones")
    x = draw(spec((draw(st.sampled_from((0, 1, 3))), n), dtype, fills=fills))
    if draw(st.integers(0, 3)) == 3:
        x["special"] = [[draw(st.sampled_from(("nan", "-inf", "inf"))), 0.1]]
    return {
        "op": "causal_choice",
        "scores": x,
        "k": draw(st.one_of(st.integers(0, n + 2), st.sampled_from((1, n // 8, n, 0.0625, 0.1, 1.0)))),
        "eps": draw(st.sampled_from((0.3, 1e-3, 10.0))),
        "block": block,
        "memory": block * draw(st.sampled_from((1, 2, 16))),
        "mask": draw(st.none() | st.sampled_from((0.0, 0.5, 0.9))),
        "seed": draw(SEEDS),
    }


def _fraction(k: int | float, n: int) -> tuple[int, int]:
    return fraction(k) if isinstance(k, float) else (min(k, n), n)


def check_causal(case: Case, device: str) -> None:
    """Choices exactly those of the definition, gates to rounding, nothing of the future in either."""
    x = build(case["scores"], device)
    given = None if case["mask"] is None else mask(list(x.shape), case["seed"], case["mask"], device)
    options = {name: case[name] for name in ("eps", "block", "memory")}
    indices, gates = causal_choice(x, case["k"], mask=given, **options)
    tag = f"causal_choice {case['scores']['dtype']}" + (" infinite" if "special" in case["scores"] else "")
    s64, real = wide(x), None if given is None else given.cpu()
    if bool(s64.isnan().any()):
        # NaN counts as +inf in a threshold and is never chosen: the definition in those words
        known = s64.nan_to_num(math.inf, math.inf, -math.inf)
        never = ~s64.isnan() if real is None else real & ~s64.isnan()
        taken = {int(j) for row, line in zip(never, indices.cpu(), strict=True) for j in line if j >= 0 and not row[j]}
        require(not taken, f"{tag} NaN chosen", f"{sorted(taken)[:9]}")
        del known
        return
    expected, want = choice_reference(s64, case["k"], mask=real, **options)
    require(
        torch.equal(indices.cpu(), expected),
        f"{tag} indices",
        f"{indices.tolist()} instead of {expected.tolist()}"[:900],
    )
    if not indices.numel():
        return
    u = roundoff(accumulator(x.dtype))
    threshold = per_token(
        running_threshold(s64, _fraction(case["k"], x.shape[1]), case["block"], case["memory"], real),
        x.shape[1],
        case["block"],
    )
    at = expected.clamp_min(0)
    above = (s64.gather(1, at) - threshold.gather(1, at)).abs() / case["eps"]
    moved = torch.where(above.isfinite(), 4 * u * above, 0.0)
    steep = want * (1 - want) * moved.clamp_max(700).exp() * moved
    bound = steep + 4 * u * want + roundoff(x.dtype) * want.abs() + smallest(x.dtype)
    compare(gates, want, bound, f"{tag} gates")


PROPERTIES = [
    Property("gather and scatter", _routing_cases, check_routing),
    Property("attention over spans", _span_cases, check_span),
    Property("rotary", _rotary_cases, check_rotary, share=0.5),
    Property("causal choice", _causal_cases, check_causal),
]
