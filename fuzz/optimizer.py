"""Lion, every combination of options: each step against the definition in float64, and against lion-pytorch."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.ops.lion.reference import join
from onepass.ops.lion.storage import dequantize
from onepass.optim import Lion, clip_grad_norm

from .bounds import accumulator, compare, roundoff, smallest
from .engine import Case, Property, SkipCase, require
from .tensors import DTYPES, SEEDS, build, dtypes, sizes, spec, torch_device, wide

# 127·(|x|/scale)^¼, rounded to a whole number: the value is known to within half a step of the root
CODES = 127
FILLS = ("normal", "ties", "plateau", "cauchy", "tiny", "huge", "constant", "outlier")


@st.composite
def _group(draw: Any, device: str) -> Case:
    known = dtypes(device)
    params = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from(((1,), (), (0,), (3, 5), (70, 61), (256,), (257, 16), (2, 3, 4))))
        dtype = draw(st.sampled_from(known))
        layouts = draw(st.sampled_from((("contiguous",), ("transposed", "offset", "sliced", "stepped"))))
        p = draw(spec(shape, dtype, fills=("normal", "ties", "constant", "outlier"), layouts=layouts))
        g = draw(st.sampled_from(("yes", "yes", "yes", "none", "other layout")))
        params.append({"p": p, "grad": g, "fill": draw(st.sampled_from(FILLS)), "seed": draw(SEEDS)})
    return {
        "params": params, "lr": draw(st.sampled_from((1e-4, 1e-3, 0.1, 0.0, 1e-7))),
        "betas": draw(st.sampled_from(((0.9, 0.99), (0.0, 0.0), (0.95, 0.98), (0.9, 0.0)))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1, 1.0, 1e-4))), "maximize": draw(st.booleans()),
        "decouple_lr": draw(st.booleans()), "cautious": draw(st.sampled_from((False, False, True, 0.25, 1.0))),
        "cautious_weight_decay": draw(st.booleans()), "tensor_lr": draw(st.booleans()),
        "state_dtype": draw(st.sampled_from((None, None, "float32", "int8", *(d for d in known if d == "bfloat16")))),
        "low_precision": draw(st.sampled_from(("auto", "none", "kahan", "stochastic"))),
    }  # fmt: skip


@st.composite
def _cases(draw: Any, device: str) -> Case:
    path = draw(st.sampled_from(("default", "default", "foreach", "single", "unfused", "capturable")))
    return {
        "op": "Lion",
        "groups": [draw(_group(device)) for _ in range(draw(st.sampled_from((1, 1, 2))))],
        "path": path,
        "steps": draw(st.sampled_from((1, 2, 5))),
        "clip": draw(st.none() | st.sampled_from((0.1, 1e3, 0.0))),
        "scale": draw(st.none() | st.sampled_from((1024.0, 0.5))),
        "found_inf": draw(st.booleans()),
        "seed": draw(SEEDS),
    }


PATHS = {
    "default": {}, "foreach": {"foreach": True}, "single": {"foreach": False}, "unfused": {"fused": False},
    "capturable": {"capturable": True},
}  # fmt: skip


def _options(group: Case) -> dict[str, Any]:
    names = ("weight_decay", "maximize", "decouple_lr", "cautious", "cautious_weight_decay", "low_precision")
    options = {name: group[name] for name in names}
    state = group["state_dtype"]
    lr = group["lr"]
    if group["decouple_lr"] and lr == 0:
        lr = 1e-3
    lr = torch.tensor(lr, dtype=torch.float64) if group["tensor_lr"] else lr
    return {**options, "lr": lr, "betas": tuple(group["betas"]), "state_dtype": DTYPES.get(state, state)}


def careful(group: Case) -> bool:
    """Whether updates that disagree with the gradient count for less."""
    # True == 1.0, and means the opposite
    return group["cautious"] is True or (group["cautious"] is not False and group["cautious"] != 1.0)


def full(p: Tensor, state: dict[str, Any]) -> Tensor:
    """The value that a parameter stands for, in float64."""
    if "remainder" in state:
        return wide(join(p.detach(), state["remainder"]))
    return wide(p) + (wide(state["kahan_comp"]) if "kahan_comp" in state else 0.0)


def momentum(state: dict[str, Any], p: Tensor) -> Tensor:
    """The momentum in float64."""
    m = state.get("exp_avg")
    if m is None:
        return torch.zeros(p.shape, dtype=torch.float64)
    return wide(dequantize(m, state["exp_avg_scale"]) if m.dtype == torch.int8 else m)


def _stored(p: Tensor, state: dict[str, Any], value: Tensor) -> Tensor:
    """How exactly a value is kept: an absolute error per element."""
    v = roundoff(p.dtype)
    if "remainder" in state:
        return roundoff(torch.float32) * value.abs() + smallest(torch.float32)
    if "kahan_comp" in state:
        return 2 * v * v * value.abs() + 2 * smallest(p.dtype)
    # stochastic rounding may take the farther neighbour
    return (2 * v if "rounding" in state else v) * value.abs() + 2 * smallest(p.dtype)


def _kept(state: dict[str, Any], value: Tensor) -> Tensor:
    m = state["exp_avg"]
    if m.dtype == torch.int8:
        scale = float(state["exp_avg_scale"].max()) if state["exp_avg_scale"].numel() else 0.0
        root = (value.abs() / max(scale, 1e-300)) ** 0.25
        step = 0.5 / CODES * (1 + 1e-4)
        return (
            scale * torch.maximum((root + step) ** 4 - root**4, root**4 - (root - step).clamp_min(0) ** 4) + 2.0**-126
        )
    return roundoff(m.dtype) * value.abs() + smallest(m.dtype)


def check_step(case: Case, device: str) -> None:
    """Every step of every parameter against the definition in float64, from the state that was there before it."""
    where = torch_device(device)
    groups, shapes = [], []
    for group in case["groups"]:
        params = [build(p["p"], device).requires_grad_() for p in group["params"]]
        groups.append({"params": params, **_options(group)})
        shapes += [(p, what, group) for p, what in zip(params, group["params"], strict=True)]
    optimizer = Lion(groups, **PATHS[case["path"]])
    for step in range(case["steps"]):
        for i, (p, what, _) in enumerate(shapes):
            p.grad = _gradient(p, what, step, i)
        before = {
            id(p): (full(p, optimizer.state.get(p, {})), momentum(optimizer.state.get(p, {}), p), p.detach().clone())
            for p, *_ in shapes
        }
        grads = {id(p): None if p.grad is None else p.grad.clone() for p, *_ in shapes}
        factor, skip = 1.0, False
        if case["scale"] is not None:
            optimizer.grad_scale = torch.tensor(case["scale"], device=where)
            optimizer.found_inf = torch.tensor(float(case["found_inf"] and step == 1), device=where)
            skip = bool(optimizer.found_inf)
            factor = 1 / case["scale"]
        elif case["clip"] is not None and any(g is not None for g in grads.values()):
            norm = clip_grad_norm([p for p, *_ in shapes], case["clip"])
            total = math.sqrt(sum(float(wide(g).square().sum()) for g in grads.values() if g is not None))
            low = accumulator(*(g.dtype for g in grads.values() if g is not None))
            if not 1e-15 < total < 1e15:
                # squares leave fp32's range
                raise SkipCase
            close = (
                abs(float(norm) - total)
                <= (16 + 2 * math.sqrt(sum(g.numel() for g in grads.values() if g is not None)))
                * roundoff(torch.float32)
                * total
            )
            require(close, f"clip_grad_norm {low}", f"{float(norm)} instead of {total}")
            factor = min(1.0, case["clip"] / (total + 1e-6))
        optimizer.step()
        for p, _, group in shapes:
            grad = grads[id(p)]
            _check_one(case, optimizer, p, grad, group, before[id(p)], factor, skip)


def _gradient(p: Tensor, what: Case, step: int, place: int) -> Tensor | None:
    if what["grad"] == "none":
        return None
    layout = "contiguous" if what["grad"] == "yes" else "transposed"
    g = build(
        {**what["p"], "fill": what["fill"], "seed": what["seed"] + step + place, "layout": layout}, str(p.device.type)
    )
    if what["grad"] == "yes":
        return torch.empty_like(p).copy_(g)
    return g


def _check_one(
    case: Case, optimizer: Lion, p: Tensor, grad: Tensor | None, group: Case, before: Any, factor: float, skip: bool
) -> None:
    old, m, bits = before
    state = optimizer.state.get(p, {})
    label = f"Lion {case['path']} {str(p.dtype)[6:]} {group['low_precision']} {group['state_dtype'] or ''}".strip()
    label += " cautious" if careful(group) else ""
    if grad is None or skip:
        same = torch.equal(p.detach(), bits) and torch.equal(momentum(state, p), m)
        require(same, f"{label} left alone", "a parameter without a gradient, or of a skipped step, changed")
        return
    if not p.is_cuda and grad.numel() and max(float(wide(grad).abs().max()), float(m.abs().max())) > 1e21:
        # Lion's docstring names this limit: on a CPU updates are scaled before they are clamped to their sign
        raise SkipCase
    lr, wd = float(_options(group)["lr"]), group["weight_decay"]
    if group["decouple_lr"]:
        wd = wd / lr
    beta1, beta2 = group["betas"]
    u = roundoff(accumulator(p.dtype))
    # fp64 parameters with another gradient or momentum are fp64 all the same
    g = wide(grad) * factor * (-1.0 if group["maximize"] else 1.0)
    # one rounding each of the factor (a norm of many terms), of 1 − β and of the products
    of_factor = 0.0 if factor == 1.0 else u * (20 + 2 * math.sqrt(p.numel()))
    clipped = 0.0 if case["clip"] is None or case["scale"] is not None else 1e-5
    raw, size = m * beta1 + g * (1 - beta1), (m * beta1).abs() + (g * (1 - beta1)).abs()
    unsure = raw.abs() <= (8 * u + of_factor + clipped) * size + 2 * smallest(accumulator(p.dtype))
    sign = raw.sign()
    low, high = torch.where(unsure, -1.0, sign), torch.where(unsure, 1.0, sign)
    if careful(group):
        keep = 0.0 if group["cautious"] is True else float(group["cautious"])
        agree = sign * g > 0
        unsettled = unsure | (g.abs() <= smallest(accumulator(p.dtype)))
        if bool(unsettled.any()):
            raise SkipCase
        scale = torch.where(agree, 1.0, keep).double()
        sign = sign * (scale / scale.mean().clamp(min=1e-5)) if scale.numel() else sign
        low = high = sign
    decay = old * wd
    if group["cautious_weight_decay"]:
        decay = torch.where(sign * old > 0, decay, torch.zeros_like(decay))
        unsure_decay = unsure
    else:
        unsure_decay = torch.zeros_like(unsure)
    reach = lr * (low.abs().maximum(high.abs()) + decay.abs())
    want = old - lr * (sign + decay)
    allowed = 4 * u * (old.abs() + reach) + lr * (high - low) + torch.where(unsure_decay, lr * (old * wd).abs(), 0.0)
    allowed = allowed + _stored(p, state, want) + lr * u * 40 * want.numel() ** 0.5 * (careful(group))
    # a weight that rounds beyond its dtype's range is infinite
    inside = want.abs() + 4 * allowed < torch.finfo(p.dtype).max * (1 - 2 * roundoff(p.dtype))
    compare(full(p, state).to(torch.float64), want, allowed, f"{label} weight", rows=inside)
    expected = m * beta2 + g * (1 - beta2)
    bound = (6 * u + of_factor + clipped) * ((m * beta2).abs() + (g * (1 - beta2)).abs())
    kept = state["exp_avg"].dtype
    inside = expected.abs() < torch.finfo(torch.float32 if kept == torch.int8 else kept).max / 4
    compare(momentum(state, p), expected, bound + _kept(state, expected), f"{label} momentum", rows=inside)


@st.composite
def _twin_cases(draw: Any, device: str) -> Case:
    return {
        "op": "Lion", "n": draw(sizes(257, 4097, largest=600)), "lr": draw(st.sampled_from((1e-3, 1e-5, 0.3))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))), "seed": draw(SEEDS), "steps": draw(st.integers(1, 8)),
        "cautious": draw(st.sampled_from((False, True))), "maximize": draw(st.booleans()),
        "fill": draw(st.sampled_from(FILLS)), "release": draw(st.booleans()),
    }  # fmt: skip


def check_twin(case: Case, device: str) -> None:
    """bf16 with its remainder is fp32 bit for bit; so is a step inside backward, and one that was saved and loaded."""
    start = build(
        {"shape": [case["n"]], "dtype": "bfloat16", "fill": "normal", "layout": "contiguous", "seed": case["seed"]},
        device,
    )
    options = {name: case[name] for name in ("lr", "weight_decay", "cautious", "maximize")}
    short, plain = start.clone().requires_grad_(), start.float().requires_grad_()
    a, b = Lion([short], state_dtype=torch.float32, **options), Lion([plain], **options)
    for step in range(case["steps"]):
        up = build(
            {
                "shape": [case["n"]],
                "dtype": "bfloat16",
                "fill": case["fill"],
                "layout": "contiguous",
                "seed": case["seed"] + 1 + step,
            },
            device,
        )
        short.grad, plain.grad = up, up.float()
        a.step()
        b.step()
        if step == case["steps"] // 2:
            fresh = Lion([short], state_dtype=torch.float32, **options)
            fresh.load_state_dict(a.state_dict())
            a = fresh
    if case["n"]:
        whole = join(short.detach(), a.state[short]["remainder"])
        require(torch.equal(whole, plain.detach()), "Lion remainder", "not fp32's bits")
    if case["release"] and case["n"]:
        _check_release(case, options, device)


def _check_release(case: Case, options: dict[str, Any], device: str) -> None:
    from onepass.optim.release import release_gradients

    results = []
    for release in (False, True):
        torch.manual_seed(case["seed"] % 2**31)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(torch_device(device))
        optimizer = Lion(model.parameters(), **options)
        if release:
            release_gradients(model, optimizer)
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(case["seed"])).to(torch_device(device))
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    require(all(map(torch.equal, *results)), "Lion release", "other weights than with a step after backward")


@st.composite
def _peer_cases(draw: Any, device: str) -> Case:
    return {
        "op": "Lion", "shapes": draw(st.lists(st.sampled_from(((3,), (5, 7), (1,), (64, 3))), min_size=1, max_size=3)),
        "lr": draw(st.floats(1e-6, 0.5)), "weight_decay": draw(st.sampled_from((0.0, 0.01, 1.0))),
        "betas": draw(st.sampled_from(((0.9, 0.99), (0.5, 0.9), (0.95, 0.98)))), "decoupled": draw(st.booleans()),
        "seed": draw(SEEDS), "steps": draw(st.integers(1, 6)),
    }  # fmt: skip


def check_peer(case: Case, device: str) -> None:
    """onepass.compat.lion_pytorch and lion-pytorch in float64: the same trajectory up to rounding."""
    from lion_pytorch import Lion as Peer

    from onepass.compat.lion_pytorch import Lion as Ours

    generator = torch.Generator().manual_seed(case["seed"])
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in case["shapes"]]
    sides = []
    for kind in (Ours, Peer):
        params = [t.clone().to(torch_device(device)).requires_grad_() for t in start]
        options = {"lr": case["lr"], "betas": tuple(case["betas"]), "weight_decay": case["weight_decay"]}
        sides.append((params, kind(params, decoupled_weight_decay=case["decoupled"], **options)))
    for _ in range(case["steps"]):
        ups = [torch.randn(s, generator=generator, dtype=torch.float64) for s in case["shapes"]]
        for params, optimizer in sides:
            for p, g in zip(params, ups, strict=True):
                p.grad = g.to(p.device)
            optimizer.step()
    for i, (a, b) in enumerate(zip(sides[0][0], sides[1][0], strict=True)):
        # each step rounds a few times, relative to the weight and to what is subtracted
        bound = (
            case["steps"]
            * 8
            * roundoff(torch.float64)
            * (wide(b).abs() + start[i].abs() + case["lr"] * (1 + case["weight_decay"]) * case["steps"])
        )
        compare(a, wide(b), bound, "Lion against lion-pytorch")


def check_refusals(case: Case, device: str) -> None:
    """Sparse gradients are refused in words, and nothing has changed then."""
    p = build(case["p"], device).requires_grad_()
    optimizer = Lion([p], lr=0.1)
    before = p.detach().clone()
    p.grad = torch.ones_like(p).to_sparse()
    try:
        optimizer.step()
    except RuntimeError as error:
        require("sparse" in str(error), "Lion sparse", str(error))
    else:
        require(False, "Lion sparse", "a sparse gradient was accepted")
    require(torch.equal(before, p.detach()), "Lion sparse", "the weight changed")


def _without_peer() -> str | None:
    return None if importlib.util.find_spec("lion_pytorch") else "lion-pytorch is not installed"


PROPERTIES = [
    Property("Lion's step", _cases, check_step, share=1.5),
    Property("Lion's twins", _twin_cases, check_twin, ("cpu", "cuda")),
    Property("Lion and lion-pytorch", _peer_cases, check_peer, ("cpu", "cuda"), share=0.5, lacks=_without_peer),
    Property(
        "Lion's refusals",
        lambda d: st.fixed_dictionaries(
            {"op": st.just("Lion"), "p": spec((3, 2), "float32", fills=("normal",), layouts=("contiguous",))}
        ),
        check_refusals,
        share=0.1,
        burst=5,
    ),
]
