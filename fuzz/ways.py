"""One operator, several ways to it: called again, under torch.func, compiled, on other strides; all the same numbers.

The faults looked for are of structure (a wrong stride, a stale buffer), so inputs are tame. Where the ways round
differently, half of the dtype's digits must agree, relative to the largest number: rounding has properties of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.ops.causal_choice.op import causal_choice
from onepass.ops.routing.op import gather, scatter_add, score
from onepass.ops.span_attention.op import span_attention
from onepass.ops.span_attention.op_rotary import rotary, rotary_attention

from .attention import choice
from .engine import Case, Property, SkipCase, require
from .tensors import DTYPES, LAYOUTS, SEEDS, TAME, build, dtypes, lay_out, mask, torch_device

Call = Callable[..., Any]


def _spans(n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(n, device=x.device)
    return i // 4 * 4 - 4, i + 1


def _call(case: Case, device: str) -> tuple[Call, list[list[int]]]:
    """The operator as a function of floating-point tensors, and their shapes."""
    name, rows, n, flag = case["op"], case["rows"], case["n"], case["flag"]
    where = torch_device(device)
    if name in ("layer_norm", "rms_norm"):
        options = {"stable": flag} if name == "layer_norm" else {"offset": float(flag)}
        op = getattr(onepass, name)
        if case["more"]:
            return lambda x, w, r: op(x, w, residual=r, **options), [[*rows, n], [n], [*rows, n]]
        return lambda x, w: op(x, w, **options), [[*rows, n], [n]]
    if name == "weighted_sum":
        return onepass.weighted_sum, [[*rows, n], [3, n] if flag else [n]]
    if name == "soft_topk":
        given = mask([*rows, n], case["seed"], 0.7, device) if flag else None
        return lambda s: onepass.soft_topk(s, max(1.0, n / 3), eps=0.3, mask=given, kind=case["kind"]), [[*rows, n]]
    if name == "topk":
        return lambda s: tuple(onepass.topk(s, max(1, n // 3), eps=0.3, kind=case["kind"])), [[*rows, n]]
    if name == "coor_descent":
        return lambda s: onepass.coor_descent(s, n_iters=8, k=max(1, n // 3), eps=0.3), [[*rows, n]]
    batch = 1 if case["more"] else 2
    tokens = math.prod(rows) or 1
    if name == "score":
        return score, [[batch, tokens, n], [2, n] if flag else [n]]
    if name in ("gather", "scatter_add"):
        indices = choice(batch, tokens, tokens, 2 if flag else 0, case["seed"], device)
        if name == "gather":
            return lambda x: gather(x, indices), [[batch, tokens, n]]
        moved = list(indices.shape)
        return lambda y, u, g: scatter_add(y, u, g, indices), [[batch, tokens, n], [*moved, n], moved]
    if name == "span_attention":
        first, last = _spans(tokens, torch.empty(0, device=where))
        shape = [batch, tokens, 2, n]
        return lambda q, k, v: span_attention(q, k, v, first, last), [shape, shape, shape]
    if name == "rotary":
        return rotary, [[batch, tokens, 2, 2 * n]]
    if name == "rotary_attention":
        first, last = _spans(tokens, torch.empty(0, device=where))
        return lambda x: rotary_attention(x, first, last), [[batch, tokens, 3, 2, 2 * n]]
    return lambda s: tuple(causal_choice(s, max(1, n // 3), block=4, memory=8)), [[batch, n]]


OPERATORS = (
    "layer_norm", "rms_norm", "weighted_sum", "soft_topk", "topk", "coor_descent", "score", "gather", "scatter_add",
    "span_attention", "rotary", "rotary_attention", "causal_choice",
)  # fmt: skip


@st.composite
def _cases(draw: Any, device: str, ways: tuple[str, ...], only: tuple[str, ...] = OPERATORS) -> Case:
    return {
        "op": draw(st.sampled_from(only)), "way": draw(st.sampled_from(ways)),
        "rows": draw(st.sampled_from(([], [1], [2], [1, 1], [2, 3], [1, 4], [5]))),
        "n": draw(st.sampled_from((1, 2, 3, 8, 10, 16))), "flag": draw(st.booleans()), "more": draw(st.booleans()),
        "kind": draw(st.sampled_from(("capped_exp", "sigmoid", "laplace"))), "seed": draw(SEEDS),
        "dtype": draw(st.sampled_from(dtypes(device))), "fill": draw(st.sampled_from(TAME)),
        "layout": draw(st.sampled_from(LAYOUTS)),
    }  # fmt: skip


def _tensors(case: Case, shapes: list[list[int]], device: str, seed: int = 0) -> list[Tensor]:
    common = {"dtype": case["dtype"], "fill": case["fill"], "layout": case["layout"]}
    return [build({**common, "shape": s, "seed": case["seed"] + seed + i}, device) for i, s in enumerate(shapes)]


def _floats(out: Any) -> list[Tensor]:
    return [t for t in ([out] if isinstance(out, Tensor) else out) if t.is_floating_point()]


def _near(got: Tensor, want: Tensor, what: str, dtype: torch.dtype) -> None:
    require(got.shape == want.shape, what, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}")
    if not got.numel():
        return
    a, b = got.detach().double(), want.detach().double()
    scale = max(1.0, float(torch.where(b.isinf(), 0.0, b).abs().max()))
    # infinities of one sign are the same
    error = float(torch.where(a == b, 0.0, a - b).abs().max())
    allowed = math.sqrt(torch.finfo(dtype).eps) * scale
    require(
        error <= allowed, what, f"differs by {error:.3g}, allowed is {allowed:.3g}", got=a.tolist(), want=b.tolist()
    )


def _gradients(fn: Call, tensors: list[Tensor], seed: int) -> tuple[list[Tensor], list[Tensor | None]]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    outs = _floats(fn(*leaves))
    generator = torch.Generator().manual_seed(seed)
    ups = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outs]
    live = [(o, g) for o, g in zip(outs, ups, strict=True) if o.requires_grad]
    if not live:
        return outs, [None] * len(leaves)
    return outs, list(torch.autograd.grad([o for o, _ in live], leaves, [g for _, g in live], allow_unused=True))


def check_again(case: Case, device: str) -> None:
    """The fourth call gives the first one's bits, whatever other calls came between, and no result changes later."""
    fn, shapes = _call(case, device)
    one, other = _tensors(case, shapes, device), _tensors(case, shapes, device, seed=7)
    what = f"{case['op']} called again {case['dtype']}"
    first, grads = _gradients(fn, one, 1)
    kept = [t.detach().clone() for t in (*first, *(g for g in grads if g is not None))]
    for _ in range(3):
        _gradients(fn, other, 1)
        with torch.no_grad():
            fn(*other)
        again, new = _gradients(fn, one, 1)
        now = [*again, *(g for g in new if g is not None)]
        for was, held, is_now in zip(kept, [*first, *(g for g in grads if g is not None)], now, strict=True):
            require(torch.equal(was, held.detach()), what, "an earlier result was written to")
            same = torch.equal(was, is_now.detach()) or bool(was.isnan().any())
            require(same, what, "other bits than in the first call")


def check_strides(case: Case, device: str) -> None:
    """Strides change no more than rounding, and inputs are left alone."""
    fn, shapes = _call(case, device)
    tensors = _tensors(case, shapes, device)
    copies = [lay_out(t.clone(), "contiguous", torch_device(device)).contiguous() for t in tensors]
    before = [t.clone() for t in tensors]
    what = f"{case['op']} strides {case['dtype']}"
    (a, da), (b, db) = _gradients(fn, tensors, 1), _gradients(fn, copies, 1)
    require(all(map(torch.equal, before, tensors)), what, "an input was written to")
    for x, y in zip([*a, *da], [*b, *db], strict=True):
        if x is not None and y is not None:
            _near(x, y, f"{what} {case['layout']}", DTYPES[case["dtype"]])


def check_func(case: Case, device: str) -> None:
    """vmap, jacrev, vmap of grad and vmap of vjp against loops over plain calls."""
    fn, shapes = _call(case, device)
    tensors = _tensors(case, shapes, device)
    dtype, way = DTYPES[case["dtype"]], case["way"]
    what = f"{case['op']} {way} {case['dtype']}" + (" one row" if math.prod(case["rows"]) == 1 else "")
    rest = tensors[1:]
    single = lambda x: _floats(fn(x, *rest))[-1]  # noqa: E731
    if way == "jacrev":
        leaf = tensors[0].detach().requires_grad_()
        out = single(leaf)
        if out.numel() * leaf.numel() > 40_000 or not leaf.numel():
            raise SkipCase
        got = torch.func.jacrev(single)(tensors[0])
        rows = []
        for i in range(out.numel()):
            up = torch.zeros(out.numel(), dtype=out.dtype, device=out.device)
            up[i] = 1
            if not out.requires_grad:
                raise SkipCase
            rows.append(torch.autograd.grad(out, leaf, up.view(out.shape), retain_graph=True)[0])
        want = torch.stack(rows).view(*out.shape, *leaf.shape) if rows else got
        _near(got, want, what, dtype)
        return
    batch = [tensors[0], *(_tensors(case, shapes[:1], device, seed=50 + i)[0] for i in range(2))]
    stacked = torch.stack(batch)
    if way == "vmap":
        got = torch.vmap(single)(stacked)
        for i, t in enumerate(batch):
            _near(got[i], single(t), what, dtype)
    elif way == "vmap of grad":
        loss = lambda x: sum(o.double().sin().sum() for o in _floats(fn(x, *rest)))  # noqa: E731
        got = torch.vmap(torch.func.grad(loss))(stacked)
        for i, t in enumerate(batch):
            leaf = t.detach().requires_grad_()
            total = loss(leaf)
            if not total.requires_grad:
                raise SkipCase
            _near(got[i], torch.autograd.grad(total, leaf)[0], what, dtype)
    else:
        out, back = torch.func.vjp(single, tensors[0])
        generator = torch.Generator().manual_seed(case["seed"])
        ups = torch.randn((3, *out.shape), generator=generator, dtype=torch.float64).to(out)
        got = torch.vmap(lambda g: back(g)[0])(ups)
        for i, g in enumerate(ups):
            _near(got[i], back(g)[0], what, dtype)


def check_compiled(case: Case, device: str) -> None:
    """torch.compile(fullgraph=True), forward and backward, against plain calls."""
    fn, shapes = _call(case, device)
    tensors = _tensors(case, shapes, device)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager" if case["way"] == "aot_eager" else "inductor")
    (a, da), (b, db) = _gradients(compiled, tensors, 1), _gradients(fn, tensors, 1)
    what = f"{case['op']} compiled {case['dtype']}"
    for x, y in zip([*a, *da], [*b, *db], strict=True):
        if x is not None and y is not None:
            _near(x, y, what, DTYPES[case["dtype"]])


FUNC = ("vmap", "jacrev", "vmap of grad", "vmap of vjp")
# what promises batching; the others are told to refuse or to loop
PROPERTIES = [
    Property("called again", lambda d: _cases(d, ("again",)), check_again),
    Property("strides", lambda d: _cases(d, ("strides",)), check_strides),
    Property("torch.func", lambda d: _cases(d, FUNC), check_func, devices=("cpu", "cuda")),
    Property("torch.compile", lambda d: _cases(d, ("aot_eager",)), check_compiled, ("cpu", "cuda"), share=0.5, burst=3),
]
