"""The two ways of `RoutedFeedForward`: as one autograd node in plain eager, and as the modules it consists of."""

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
from onepass.nn import CausalRouter, RoutedFeedForward, Router, RouterOutput
from onepass.nn.feed_forward import FeedForward

DIM = 24
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often the fused way was taken."""
    calls = [0]
    real = routed_module.routed_feed_forward

    def spy(*args: Any) -> Any:
        calls[0] += 1
        return real(*args)

    with patch.object(routed_module, "routed_feed_forward", spy):
        yield calls


@contextmanager
def composed() -> Iterator[None]:
    """The modules one by one."""
    with patch.object(RoutedFeedForward, "_fused_dtype", lambda self, x, mask: None):
        yield


def _mask(device: str) -> Tensor:
    mask = torch.ones(3, 20, dtype=torch.bool)
    mask[0, 3:] = False  # fewer than k
    mask[1] = False  # none at all
    return mask.to(device)


def _both(
    layer: RoutedFeedForward,
    x: Tensor,
    mask: Tensor | None,
    wanted: list[Tensor],
    context: Callable[[], Any] = nullcontext,
) -> list[list[Tensor]]:
    """Outputs, routing and gradients of the fused way and of the composition; a loss on all that is differentiable."""
    found = []
    for way, fused in ((nullcontext, 1), (composed, 0)):
        with way(), counted() as calls:
            with context():
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
            {}, {"explore": 3.0}, {"explore": 0}, {"score": "cosine"}, {"gate": "straight_through"}, {"kind": "sigmoid"}
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
    ours, theirs = _both(layer, x, _mask(device) if masked else None, [x, *layer.parameters()])
    limit = 1e-10 if device == "cpu" else 1e-4
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit * max(1.0, float(b.detach().abs().max())))


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_both_ways_under_autocast(device: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    layer = RoutedFeedForward(DIM, 7).to(device)
    x = torch.randn(3, 20, DIM, device=device).to(x_dtype).requires_grad_()
    wanted = [x, *layer.parameters()]
    ours, theirs = _both(layer, x, None, wanted, lambda: torch.autocast(device, dtype))
    assert ours[0].dtype == dtype
    assert torch.equal(ours[1], theirs[1])
    assert [g.dtype for g in ours[3:]] == [t.dtype for t in wanted]
    for a, b in zip(ours, theirs, strict=True):
        # roundings of a 16-bit product, relative to the largest entry
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=2e-2 * max(1.0, float(b.detach().abs().max())))


@on_devices
@pytest.mark.parametrize("frozen", ["x", "light", "heavy", "router", "norms", "weights", "biases"])
def test_only_what_is_asked_for(device: str, frozen: str) -> None:
    layer = RoutedFeedForward(DIM, 7).to(device)
    x = torch.randn(3, 20, DIM, device=device, requires_grad=frozen != "x")
    kinds = {"norms": "norm.", "weights": ".weight", "biases": ".bias"}
    for name, p in layer.named_parameters():
        p.requires_grad_(kinds.get(frozen, frozen + ".") not in name)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    ours, theirs = _both(layer, x, _mask(device), wanted)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.detach().abs().max())))


class TestTheModulesAreCalledWhereSomethingElseLooksOn:
    def _is_composed(self, layer: RoutedFeedForward, **kwargs: Any) -> None:
        with counted() as calls:
            layer(torch.randn(2, 9, DIM), **kwargs)
        assert calls == [0]

    def test_but_not_without_reason(self) -> None:
        with counted() as calls:
            RoutedFeedForward(DIM, 3)(torch.randn(2, 9, DIM))
        assert calls == [1]

    @pytest.mark.parametrize("where", ["light", "heavy.norm", "light.up", "heavy.down", "router"])
    @pytest.mark.parametrize(
        "kind", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
    )
    def test_hooks(self, where: str, kind: str) -> None:
        layer = RoutedFeedForward(DIM, 3)
        handle = getattr(layer.get_submodule(where), kind)(lambda *args: None)
        self._is_composed(layer)
        handle.remove()
        with counted() as calls:
            layer(torch.randn(2, 9, DIM))
        assert calls == [1]

    def test_a_hook_may_keep_the_light_output(self) -> None:
        layer, kept = RoutedFeedForward(DIM, 3), []
        layer.light.register_forward_hook(lambda module, args, out: kept.append((out, out.detach().clone())))
        layer(torch.randn(2, 9, DIM))
        assert torch.equal(*kept[0])

    def test_a_forward_set_on_an_instance(self) -> None:
        layer = RoutedFeedForward(DIM, 3)
        layer.heavy.up.forward = lambda x: torch.zeros(*x.shape[:-1], 4 * DIM)  # type: ignore[union-attr, assignment]
        self._is_composed(layer)

    def test_a_parametrization(self) -> None:
        layer = RoutedFeedForward(DIM, 3)
        nn.utils.parametrizations.weight_norm(layer.light.up)
        self._is_composed(layer)

    @pytest.mark.parametrize("where", ["light.up", "heavy.down", "heavy.norm", "router"])
    @pytest.mark.parametrize("put", [setattr, nn.Module.register_buffer])
    def test_another_tensor_in_a_parameters_place(self, where: str, put: Callable[..., None]) -> None:
        """As who shards, replicates, freezes or computes a weight leaves it."""
        layer, x = RoutedFeedForward(DIM, 3), torch.randn(2, 9, DIM)
        module, expected = layer.get_submodule(where), layer(x)
        weight = module.weight.detach().clone().requires_grad_()
        del module.weight
        put(module, "weight", weight)
        self._is_composed(layer)
        y = layer(x)
        torch.testing.assert_close(y, expected)
        assert torch.autograd.grad(y.square().sum(), weight)[0].any()

    def test_branches_and_routers_of_ones_own(self) -> None:
        class Mine(Router):
            def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
                return super().forward(-x, k, mask)

        self._is_composed(RoutedFeedForward(DIM, 3, router=Mine(DIM)))
        self._is_composed(RoutedFeedForward(DIM, 3, router=Router(DIM, 2)))
        layer = RoutedFeedForward(DIM, 3)
        layer.heavy = nn.Linear(DIM, DIM)
        self._is_composed(layer)

    def test_nothing_to_choose(self) -> None:
        self._is_composed(RoutedFeedForward(DIM, 0))

    def test_a_transform(self) -> None:
        layer, x = RoutedFeedForward(DIM, 3), torch.randn(2, 9, DIM)
        expected = torch.autograd.grad(layer(x).square().sum(), [*layer.parameters()])
        with counted() as calls:
            grads = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(
                {n: p.detach() for n, p in layer.named_parameters()}
            )
        assert calls == [0]
        for (name, _), e in zip(layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(grads[name], e)


class TestGraph:
    def test_without_gradients(self) -> None:
        layer, x = RoutedFeedForward(DIM, 3), torch.randn(2, 9, DIM)
        expected = layer(x)
        with torch.no_grad():
            y = layer(x)
        assert torch.equal(y, expected)
        assert not y.requires_grad

    def test_a_kept_graph_gives_the_same_twice(self) -> None:
        layer, x = RoutedFeedForward(DIM, 3), torch.randn(2, 9, DIM, requires_grad=True)
        y = layer(x)
        wanted = [x, *layer.parameters()]
        first = torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(y.square().sum(), wanted)))

    def test_the_output_may_be_written_to(self) -> None:
        layer, x = RoutedFeedForward(DIM, 3, router=Router(DIM, explore=0)), torch.randn(2, 9, DIM)
        expected = torch.autograd.grad((2 * layer(x)).square().sum(), [*layer.parameters()])
        y = layer(x)
        y *= 2
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [*layer.parameters()]), expected)

    def test_several_layers_over_one_input(self) -> None:
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

    def test_backward_inside_autocast_computes_as_forward_did(self) -> None:
        layer = RoutedFeedForward(DIM, 4, router=Router(DIM, explore=0))
        x = torch.randn(2, 20, DIM, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        loss = layer(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            grads = torch.autograd.grad(loss, [x, *layer.parameters()])
        assert all(map(torch.equal, grads, expected))

    def test_saved_tensors_may_travel(self) -> None:
        layer, x = RoutedFeedForward(DIM, 4), torch.randn(2, 20, DIM, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        with torch.autograd.graph.save_on_cpu():
            loss = layer(x).square().sum()
        assert all(map(torch.equal, torch.autograd.grad(loss, [x, *layer.parameters()]), expected))


def test_the_branch_is_what_its_layers_say() -> None:
    branch, x = FeedForward(DIM, 40).double(), torch.randn(5, DIM, dtype=torch.float64)
    expected = branch.down(nn.functional.gelu(branch.up(nn.functional.rms_norm(x, (DIM,), branch.norm.weight))))
    torch.testing.assert_close(branch(x), expected)
