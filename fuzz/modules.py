"""Routed layers: what lies in padding reaches nothing, rows do not see each other, causal layers do not look ahead."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from onepass.nn import LocalAttention, RoutedAttention, RoutedBlock, RoutedCrossAttention, RoutedFeedForward
from onepass.nn.causal import CausalRouter

from .engine import Case, Property, SkipCase, require
from .tensors import DTYPES, SEEDS, mask, torch_device

DIM = 16
LAYERS = ("local", "attention", "feed forward", "block", "cross")


@st.composite
def _cases(draw: Any, device: str) -> Case:
    n = draw(st.integers(1, 12 if device == "interpret" else 40))
    shares = st.one_of(st.integers(1, n + 2), st.sampled_from((0.1, 0.25, 1.0)))
    return {
        "op": draw(st.sampled_from(LAYERS)),
        "n": n,
        "batch": draw(st.sampled_from((1, 2, 3))),
        "k": draw(shares),
        "k_kv": draw(shares),
        "window": draw(st.sampled_from((1, 4, 8))),
        "causal": draw(st.booleans()),
        "value": draw(st.sampled_from(("nan", "inf", "-inf", "1e30"))),
        "share": draw(st.sampled_from((0.0, 0.3, 0.7, 0.95))),
        "composed": draw(st.booleans()),
        "train": draw(st.booleans()),
        "seed": draw(SEEDS),
        "dtype": draw(st.sampled_from(("float32", "float32", "float64"))) if device == "cpu" else "float32",
    }


def _layer(case: Case, device: str) -> nn.Module:
    torch.manual_seed(case["seed"] % 2**31)
    options = {"device": torch_device(device), "dtype": DTYPES[case["dtype"]]}
    heads = {"heads": 2, "dim_head": 8}
    k, k_kv, window, causal = case["k"], case["k_kv"], case["window"], case["causal"]
    layer: nn.Module
    if case["op"] == "local":
        layer = LocalAttention(DIM, window=window, causal=causal, **heads, **options)
    elif case["op"] == "attention":
        layer = RoutedAttention(DIM, k, k_kv, window=window, causal=causal, **heads, **options)
    elif case["op"] == "feed forward":
        router = CausalRouter(DIM, block=window, memory=2 * window, **options) if causal else None
        layer = RoutedFeedForward(DIM, k, router=router, **options)
    elif case["op"] == "block":
        layer = RoutedBlock(DIM, k, k_kv=k_kv, window=window, causal=causal, **heads, **options)
    else:
        layer = RoutedCrossAttention(DIM, k, k_kv, **heads, **options)
    if case["composed"]:
        # with a hook the layer is a composition of modules instead of one node
        for part in layer.modules():
            part.register_forward_hook(lambda *_: None)
    return layer.train(case["train"])


def _tokens(case: Case, *shape: int, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(case["seed"] + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch_device(device), DTYPES[case["dtype"]])


def _run(case: Case, layer: nn.Module, x: Tensor, given: Tensor | None, context: Tensor | None) -> Tensor:
    if case["op"] == "cross":
        return layer(x, context, given)  # type: ignore[no-any-return]
    return layer(x, given)  # type: ignore[no-any-return]


def _found(case: Case, layer: nn.Module, x: Tensor, given: Tensor, context: Tensor | None) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    y = _run(case, layer, leaf, given, context)
    up = _tokens(case, *y.shape, seed=9, device=str(x.device.type))
    dx, *rest = torch.autograd.grad(y, [leaf, *layer.parameters()], up, allow_unused=True)
    return [y.detach()[given], None if dx is None else dx[given], *rest]


def _same(a: list[Tensor | None], b: list[Tensor | None], what: str) -> None:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        name = ("output", "gradient of x")[i] if i < 2 else "gradients of parameters"
        require((x is None) == (y is None), what, f"{name}: one is missing")
        if x is not None and y is not None:
            require(
                torch.equal(x, y),
                f"{what} {name}",
                f"largest difference {float((x - y).abs().max()) if x.numel() else 0}",
            )


def check_padding(case: Case, device: str) -> None:
    """Masked tokens hold NaN or anything: bit for bit the outputs and gradients of the real ones with zeros there."""
    layer = _layer(case, device)
    x = _tokens(case, case["batch"], case["n"], DIM, seed=1, device=device)
    context = _tokens(case, case["batch"], 7, DIM, seed=2, device=device)
    given = mask([case["batch"], case["n"]], case["seed"], case["share"], device)
    what = f"{case['op']}{' causal' if case['causal'] else ''} padding"
    expected = _found(case, layer, x.masked_fill(~given[..., None], 0), given, context)
    actual = _found(case, layer, x.masked_fill(~given[..., None], float(case["value"])), given, context)
    require(all(t is None or bool(t.isfinite().all()) for t in expected), what, "not finite with zeros in the padding")
    _same(actual, expected, what)
    if case["op"] == "cross":
        real = mask([case["batch"], 7], case["seed"] + 1, case["share"], device)
        for memory in (
            context.masked_fill(~real[..., None], 0),
            context.masked_fill(~real[..., None], float(case["value"])),
        ):
            actual = [layer(x, memory, context_mask=real).detach()]
            expected = actual if memory.isfinite().all() and not memory[~real].any() else expected
            _same(actual, expected, f"{what} of memories")


def check_isolation(case: Case, device: str) -> None:
    """Another row of the batch changes no bit of this one, nor a later token an earlier output of a causal layer."""
    layer = _layer(case, device)
    x = _tokens(case, case["batch"], case["n"], DIM, seed=1, device=device)
    context = _tokens(case, case["batch"], 7, DIM, seed=2, device=device)
    given = mask([case["batch"], case["n"]], case["seed"], 0.7, device) if case["share"] else None
    before = _run(case, layer, x, given, context).detach()
    other = x.clone()
    if case["batch"] > 1:
        other[1:] = _tokens(case, *other[1:].shape, seed=5, device=device) * 10
        after = _run(case, layer, other, given, context).detach()
        require(
            torch.equal(after[0], before[0]), f"{case['op']} isolation", "another row of the batch changed this one"
        )
    if case["causal"] and case["op"] not in ("cross",):
        at = case["seed"] % case["n"]
        other = x.clone()
        other[:, at:] += 30 * _tokens(case, *other[:, at:].shape, seed=6, device=device)
        after = _run(case, layer, other, given, context).detach()
        require(
            torch.equal(after[:, :at], before[:, :at]),
            f"{case['op']} looks ahead",
            f"token {at} changed an earlier output",
        )


def check_longer(case: Case, device: str) -> None:
    """With k a number of tokens, a sequence alone and the same one with padding behind it choose alike and agree."""
    if case["causal"] or isinstance(case["k"], float) or isinstance(case["k_kv"], float) or case["train"]:
        # a share is of the padded length, a running threshold of its share; exploring samples all tokens
        raise SkipCase
    layer = _layer(case, device)
    x = _tokens(case, 1, case["n"], DIM, seed=1, device=device)
    context = _tokens(case, 1, 7, DIM, seed=2, device=device)
    more = torch.cat((x, _tokens(case, 1, 5, DIM, seed=3, device=device)), 1)
    given = (torch.arange(case["n"] + 5) < case["n"])[None].to(x.device)
    alone = _run(case, layer, x, None, context).detach()
    padded = _run(case, layer, more, given, context).detach()[:, : case["n"]]
    # matrix products of another shape round differently: half of the digits
    allowed = math.sqrt(torch.finfo(x.dtype).eps) * max(1.0, float(alone.abs().max()))
    error = float((alone - padded).abs().max())
    require(error <= allowed, f"{case['op']} alone and padded", f"differ by {error}")


PROPERTIES = [
    Property("padding", _cases, check_padding),
    Property("isolation", _cases, check_isolation),
    Property("alone and padded", _cases, check_longer, share=0.5),
]
