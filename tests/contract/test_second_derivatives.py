"""A gradient of a gradient is right, where torch's own operators do the work, or refused by the operator's name.

It is never dropped without a word: after a sum upstream gradients are constants, and a penalty on the gradient would
otherwise lose its part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass.nn
from harness import (
    build,
    call,
    compare_gradients,
    float64,
    floats,
    leaves,
    replace,
    samples_in_turn,
    spec_samples,
    upstream,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample, Spec
from onepass.ops.routing.op import scatter_add

REFUSED = "second derivatives are not implemented"
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda y, g: (y * g).sum(),
    "square": lambda y, g: (y.square() * g).sum(),
}


def _loss(fn: Callable[..., Any], sample: Sample, loss: str, gy: list[Tensor]) -> Tensor:
    # padding's -inf takes no part
    outs = [o.nan_to_num(neginf=0.0) for o in call(fn, sample)]
    return torch.stack([LOSSES[loss](o, g.to(o.device, o.dtype)) for o, g in zip(outs, gy, strict=True)]).sum()


def _twice(fn: Callable[..., Any], sample: Sample, loss: str) -> dict[int | str, Tensor | None]:
    """Gradients of the sum of the squared gradients, None where they depend on nothing."""
    inputs = leaves(sample)
    known = replace(sample, inputs)
    total = _loss(fn, known, loss, upstream(call(fn, sample)))
    if not total.requires_grad:
        return dict.fromkeys(inputs)
    first = torch.autograd.grad(total, list(inputs.values()), create_graph=True, allow_unused=True)
    again = [g.square().sum() for g in first if g is not None and g.requires_grad]
    if not again:
        return dict.fromkeys(inputs)
    second = torch.autograd.grad(torch.stack(again).sum(), list(inputs.values()), allow_unused=True)
    return dict(zip(inputs, second, strict=True))


def _operator(spec: Spec) -> str:
    # one op does both norms
    return "layer_norm, rms_norm" if spec.name.endswith("_norm") else spec.name


@pytest.mark.parametrize("loss", ["square"] if INTERPRET else LOSSES)
@pytest.mark.parametrize(("spec", "name"), samples_in_turn(1))
def test_right_or_refused_by_name(spec: Spec, name: str, loss: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    if sum(t.numel() for t in floats(sample).values()) > 1000:
        pytest.skip("the same as of a small one")
    refused = []
    try:
        actual = _twice(spec.op, sample, loss)
    except NotImplementedError as error:
        refused.append(str(error))
    if refused:
        assert f"{_operator(spec)}: {REFUSED}" in refused[0]
        return
    expected = _twice(spec.reference, float64(sample), loss)
    ours = {k: torch.zeros_like(t) if actual[k] is None else actual[k] for k, t in floats(sample).items()}
    compare_gradients(ours, expected, torch.float32)


@pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")
@pytest.mark.parametrize("way", ["jacrev of grad", "grad of grad", "hessian"])
@pytest.mark.parametrize(("spec", "name"), [p for p in spec_samples() if p.values[1].startswith(("one row", "rows"))])
def test_torch_func_refuses_by_name(spec: Spec, name: str, way: str) -> None:
    sample = build(spec, name, "cpu", torch.float32)
    gy = upstream(call(spec.op, sample))
    inputs = floats(sample)
    key = next(iter(inputs))

    def loss(x: Tensor) -> Tensor:
        return _loss(spec.op, replace(sample, {key: x}), "linear", gy)

    twice = {
        "jacrev of grad": torch.func.jacrev(torch.func.grad(loss)),
        "grad of grad": torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum()),
        "hessian": torch.func.hessian(loss),
    }
    # a Hessian is forward mode over reverse mode
    refused = "forward-mode derivatives are not implemented" if way == "hessian" else REFUSED
    with pytest.raises(NotImplementedError, match=refused) as error:
        twice[way](inputs[key])
    assert _operator(spec) in str(error.value)


@pytest.mark.skipif(INTERPRET, reason="nothing is compiled")
@pytest.mark.parametrize(("spec", "name"), [p for p in spec_samples() if p.values[1].startswith("rows")])
def test_the_registered_op_refuses_by_name(spec: Spec, name: str) -> None:
    """What a graph that Dynamo captured calls."""
    torch._dynamo.reset()
    sample = build(spec, name, "cpu", torch.float32)
    inputs = leaves(sample)
    gy = upstream(call(spec.op, sample))
    compiled = torch.compile(lambda t: _loss(spec.op, replace(sample, t), "linear", gy), backend="eager")
    first = torch.autograd.grad(compiled(inputs), list(inputs.values()), create_graph=True, allow_unused=True)
    with pytest.raises(NotImplementedError, match=f"{_operator(spec)}: {REFUSED}"):
        torch.stack([g.square().sum() for g in first if g is not None]).sum().backward()


def test_adding_in_place_refuses_by_name() -> None:
    u, gates = torch.randn(1, 2, 3, requires_grad=True), torch.rand(1, 2, requires_grad=True)
    y = scatter_add(torch.zeros(1, 4, 3), u, gates, torch.tensor([[2, 0]]), inplace=True)
    du, dg = torch.autograd.grad(y.sum(), (u, gates), create_graph=True)
    with pytest.raises(NotImplementedError, match=f"scatter_add: {REFUSED}"):
        (du.sum() + dg.square().sum()).backward()


@pytest.mark.parametrize("x_wanted", [True] if INTERPRET else [True, False])
@pytest.mark.parametrize(
    "layer", [onepass.nn.RoutedFeedForward(16, k=4), onepass.nn.RoutedAttention(16, k_q=4, k_kv=4, dim_head=8)]
)
def test_routed_layers_refuse_by_name(layer: torch.nn.Module, x_wanted: bool, device: str) -> None:
    """Their nodes may save copies of the weights: a penalty must not lose what depends on these."""
    layer = layer.to(device)
    x = torch.randn(2, 12, 16, device=device, requires_grad=x_wanted)
    wanted = [*([x] if x_wanted else []), *layer.parameters()]
    for y in (layer(x), torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        first = torch.autograd.grad(y.sum(), wanted, create_graph=True, allow_unused=True)
        penalty = torch.stack([g.square().sum() for g in first if g is not None]).sum()
        for t, g in zip(wanted, first, strict=True):
            if g is not None:
                with pytest.raises(NotImplementedError, match=REFUSED):
                    torch.autograd.grad(penalty, t, retain_graph=True)
