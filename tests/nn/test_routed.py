"""`Routed` and `RoutedFeedForward`: the sum of two branches, as one autograd node and as the modules it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import onepass.nn.routed as routed_module
from nn.layers import tokens
from onepass.nn import CausalRouter, Routed, RoutedBlock, RoutedFeedForward, Router, RouterOutput

DIM = 24
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often the fused way was taken."""
    calls, real = [0], routed_module.routed_feed_forward

    def spy(*args: Any) -> Any:
        calls[0] += 1
        return real(*args)

    with patch.object(routed_module, "routed_feed_forward", spy):
        yield calls


def composed() -> Any:
    """The modules one by one."""
    return patch.object(RoutedFeedForward, "fused_dtype", lambda self, x, mask: None)


def _mask(device: str = "cpu") -> Tensor:
    """Fewer real tokens than k, none at all, all."""
    return torch.arange(20, device=device) < torch.tensor([[3], [0], [20]], device=device)


def _definition(layer: Routed, x: Tensor, routing: RouterOutput) -> Tensor:
    """One token at a time."""
    y = layer.light(x)
    rows = []
    for b in range(len(x)):
        indices, gates = routing.indices[b].reshape(-1), routing.gates[b].reshape(-1)
        for i in range(x.shape[1]):
            total = y[b, i]
            for j in (indices == i).nonzero()[:, 0]:
                total = total + gates[j] * layer.heavy(x[b : b + 1, i : i + 1])[0, 0]
            rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("routes", [1, 3])
@pytest.mark.parametrize("kind", ["feed-forward", "any modules"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_definition(routes: int, kind: str, masked: bool) -> None:
    router = Router(DIM, routes, explore=0)
    layer: Routed = (
        RoutedFeedForward(DIM, 4, router=router)
        if kind == "feed-forward"
        else Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()), nn.Linear(DIM, DIM), router, 4)
    )
    layer = layer.double()
    x, dy = tokens(3, 20, DIM).double().requires_grad_(), tokens(3, 20, DIM, seed=2).double()
    mask = _mask() if masked else None
    y, routing = layer(x, mask, return_routing=True)
    # a module of the user's sees padding as it is, a feed-forward sees zeros
    expected = _definition(layer, x if mask is None or kind == "any modules" else x * mask[..., None], routing)
    torch.testing.assert_close(y, expected)
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted, dy))


def _both(layer: RoutedFeedForward, x: Tensor, mask: Tensor | None) -> list[list[Tensor]]:
    """Outputs, routing and gradients of the fused way and of the composition; a loss on all that is differentiable."""
    found, wanted = [], [x, *layer.parameters()]
    for way, fused in ((nullcontext, 1), (composed, 0)):
        with way(), counted() as calls:
            y, routing = layer(x, mask, return_routing=True)
            scores = routing.scores if mask is None else routing.scores.masked_fill(~mask, 0)
            loss = y.double().square().sum() + routing.gates.square().sum() + 0.1 * scores.square().sum()
            found.append([y, routing.indices, routing.gates, *torch.autograd.grad(loss, wanted)])
        assert calls == [fused]
    return found


ROUTERS = [
    *(
        pytest.param(partial(Router, DIM, **options), id=" ".join(map(str, options.values())) or "default")
        for options in (
            {}, {"explore": 3.0}, {"explore": 0}, {"gate": "straight_through"}, {"kind": "sigmoid"}
        )
    ),
    pytest.param(partial(CausalRouter, DIM, block=4, memory=8), id="causal"),
]  # fmt: skip


@on_devices
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
def test_both_ways_give_the_same(device: str, masked: bool, bias: bool, router: Callable[[], nn.Module]) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float32
    layer = RoutedFeedForward(DIM, 7, bias=bias, router=router()).to(device, dtype)
    x = torch.randn(3, 20, DIM, dtype=dtype, device=device, requires_grad=True)
    ours, theirs = _both(layer, x, _mask(device) if masked else None)
    limit = 1e-10 if device == "cpu" else 1e-4
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * max(1.0, float(b.detach().abs().max())))


def _set(layer: nn.Module, name: str, value: Any) -> None:
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, value)


class Reversed(Router):
    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        return super().forward(-x, k, mask)


CHANGES: dict[str, Callable[[RoutedFeedForward], object]] = {
    "backward hook": lambda layer: layer.light.up.register_full_backward_hook(lambda *_: None),
    "hook": lambda layer: layer.heavy.register_forward_hook(lambda *_: None),
    "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer.light.up),
    "router": lambda layer: _set(layer, "router", Reversed(DIM)),
    "routes": lambda layer: _set(layer, "router", Router(DIM, 2)),
    "branch": lambda layer: _set(layer, "heavy", nn.Linear(DIM, DIM)),
    "none chosen": lambda layer: _set(layer, "k", 0),
    "rounding": lambda layer: _set(layer, "heavy.norm.rounding", "twice"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_are_called_where_something_else_looks_on(name: str) -> None:
    layer, x = RoutedFeedForward(DIM, 3), torch.randn(2, 9, DIM)
    with counted() as calls:
        layer(x)
        handle = CHANGES[name](layer)
        layer(x)
        assert calls == [1]
        if hasattr(handle, "remove"):
            handle.remove()
            layer(x)
            assert calls == [2]


def test_several_layers_over_one_input() -> None:
    """The gradient of x has other sources: nothing may be added to theirs in place."""
    a, b = RoutedFeedForward(DIM, 3).double(), RoutedFeedForward(DIM, 5).double()
    x = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        y = x + a(x) + b(x)
        return torch.autograd.grad((y + b(y)).square().sum(), [x, *a.parameters(), *b.parameters()])

    ours = run()
    with composed():
        theirs = run()
    torch.testing.assert_close(ours, theirs)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(2, 9, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.value  # type: ignore[return-value]


def test_the_light_output_is_not_touched() -> None:
    """The heavy output is added in place where that is safe: not to a branch's input, buffer, or what it kept."""
    x = tokens(2, 9, DIM)
    before, heavy, kept = x.clone(), nn.Linear(DIM, DIM), []
    y = Routed(nn.Identity(), heavy, Router(DIM), 3)(x)
    assert torch.equal(x, before)
    assert not torch.equal(y, before)
    layer = Routed(Constant(), heavy, Router(DIM), 3)
    layer(x)
    assert not layer.light.value.any()  # type: ignore[union-attr, operator]
    Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), heavy, Router(DIM), 3)(x).sum().backward()
    layer = RoutedFeedForward(DIM, 3)
    layer.light.register_forward_hook(lambda module, args, out: kept.append((out, out.detach().clone())))
    layer(x)
    assert torch.equal(*kept[0])


def test_a_warning_points_at_the_callers_line() -> None:
    for kind in (RoutedFeedForward, RoutedBlock):
        with pytest.warns(UserWarning, match=r"one token of a sequence; write k=1\.0 for all of them") as caught:
            kind(DIM, 1)
        assert {one.filename for one in caught} == {__file__}


class First(nn.Module):
    """The first k tokens."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        return RouterOutput(torch.arange(k).expand(len(x), k), torch.ones(len(x), k), torch.zeros(x.shape[:2]))


def test_a_router_is_any_module_with_its_call() -> None:
    layer, x = RoutedFeedForward(DIM, 4, router=First()), tokens(2, 9, DIM)
    y, light = layer(x), layer.light(x)
    torch.testing.assert_close(y[:, :4], light[:, :4] + layer.heavy(x[:, :4]))
    torch.testing.assert_close(y[:, 4:], light[:, 4:])
