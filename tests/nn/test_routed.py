"""`Routed`, `RoutedFeedForward` and `RoutedBlock`: sums of branches, as autograd nodes and as modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import waiting_is_an_error
from nn.layers import first, outputs, tokens, watched
from onepass.nn import CausalRouter, Routed, RoutedBlock, RoutedFeedForward, Router, RouterOutput

DIM = 24


def _mask() -> Tensor:
    """Fewer real tokens than k, none at all, all."""
    return first(20, 3, 0, 20)


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


ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "soft": partial(Router, DIM, explore=0), "three": partial(Router, DIM, 3, explore=0),
    "hard": partial(Router, DIM, gate="straight_through", explore=0),
    "sigmoid": partial(Router, DIM, kind="sigmoid", explore=0), "causal": partial(CausalRouter, DIM, block=4, memory=8),
}  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("kind", ["feed-forward", "without bias", "any modules"])
def test_values_and_gradients_are_those_of_the_definition(router: str, kind: str, masked: bool) -> None:
    """As one node and as modules; the definition has its gradients through the gates that each of them returns."""
    torch.manual_seed(1)
    layer: Routed = (
        Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()), nn.Linear(DIM, DIM), ROUTERS[router](), 4)
        if kind == "any modules"
        else RoutedFeedForward(DIM, 4, bias=kind == "feed-forward", router=ROUTERS[router]())
    )
    layer = layer.double().eval()
    x, dy = tokens(3, 20, DIM).double().requires_grad_(), tokens(3, 20, DIM, seed=2).double()
    mask, wanted, found = _mask() if masked else None, [x, *layer.parameters()], []
    for hooked in (False, True):
        ran = watched(layer) if hooked else []
        y, routing = layer(x, mask, return_routing=True)
        assert ("router" in ran) == hooked
        # a module of the user's sees padding as it is, a feed-forward sees zeros
        expected = _definition(layer, x if mask is None or kind == "any modules" else x * mask[..., None], routing)
        torch.testing.assert_close(y, expected)
        ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        found.append(torch.autograd.grad(expected, wanted, dy, retain_graph=True))
        torch.testing.assert_close(ours, found[-1])
        scores = routing.scores.masked_fill(~routing.scores.isfinite(), 0)
        found.append(torch.autograd.grad(scores.square().sum(), wanted, materialize_grads=True))
    torch.testing.assert_close(found[:2], found[2:])


@pytest.mark.parametrize("change", [
    lambda layer: layer.light.up.register_full_backward_hook(lambda *_: None),
    lambda layer: setattr(layer.heavy.norm, "rounding", "twice"),
    lambda layer: setattr(layer.light.norm, "offset", 1.0),
], ids=["backward hook", "rounding", "offset"])  # fmt: skip
def test_what_the_node_does_not_do_is_left_to_the_modules(change: Callable[[RoutedFeedForward], object]) -> None:
    layer, x = RoutedFeedForward(DIM, 3).bfloat16(), tokens(2, 9, DIM).bfloat16()
    before = layer.fused_dtype(x, None)
    change(layer)
    assert (before, layer.fused_dtype(x, None)) == (torch.bfloat16, None)
    y = layer(x)
    watched(layer)
    assert torch.equal(layer(x), y)


def test_the_light_output_is_not_touched() -> None:
    """The heavy output is added in place where that is safe: not to a branch's input, buffer, or what it kept."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("value", torch.zeros(2, 9, DIM))

        def forward(self, x: Tensor) -> Tensor:
            return self.value  # type: ignore[return-value]

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


def test_a_router_is_any_module_with_its_call() -> None:
    class First(nn.Module):
        """The first k tokens."""

        def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
            return RouterOutput(torch.arange(k).expand(len(x), k), torch.ones(len(x), k), torch.zeros(x.shape[:2]))

    layer, x = RoutedFeedForward(DIM, 4, router=First()), tokens(2, 9, DIM)
    y, light = layer(x), layer.light(x)
    torch.testing.assert_close(y[:, :4], light[:, :4] + layer.heavy(x[:, :4]))
    torch.testing.assert_close(y[:, 4:], light[:, 4:])


WINDOW = 8


def _block(causal: bool = False, k: float = 1 / 4, **kwargs: Any) -> RoutedBlock:
    torch.manual_seed(2)
    return RoutedBlock(DIM, k, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs)


def test_each_half_is_added_to_the_residual_stream(causal: bool, masked: bool, autocast: bool) -> None:
    """Inside the halves' nodes; a hook on a half sees its own output."""
    block, x = _block(causal), tokens(40, 3, DIM).transpose(0, 1).requires_grad_()
    mask = first(40, 40, 20, 0) if masked else None
    found, seen, limit = [], [], 2e-2 if autocast else 1e-5
    for hooked in (False, True):
        if hooked:
            for half in (block.attention, block.feed_forward):
                half.register_forward_hook(lambda _, __, y: seen.append(y))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, routing = block(x, mask, return_routing=True)
        loss = (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() + routing.attention.q.gates.sum()
        found.append([y, *torch.autograd.grad(loss, [x, *block.parameters()])])
    (h, attention), (f, feed_forward) = seen
    assert torch.equal(y, x + h + f)
    for a, b in zip(outputs(routing), outputs((attention, feed_forward)), strict=True):
        assert torch.equal(a.indices, b.indices)
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit * max(scale, 1e-3))


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({"k": 1 / 16}, (1 / 16, 1 / 16, 1 / 8)), ({"k": 0.75}, (0.75, 0.75, 1.0)), ({"k": 6}, (6, 6, 12)),
     ({"k": 6, "k_q": 3, "k_kv": 5}, (6, 3, 5)), ({"k": 0.5, "k_q": 3}, (0.5, 3, 1.0))],
)  # fmt: skip
def test_how_many_each_half_chooses(kwargs: dict[str, Any], expected: tuple[float, ...]) -> None:
    block = _block(**kwargs)
    assert (block.feed_forward.k, block.attention.k_q, block.attention.k_kv) == expected


@pytest.mark.parametrize("n", [16, 20, 3])
def test_fault_2_of_the_public_library_block_wise_routing_raises_index_error(n: int, hooked: bool) -> None:
    """Keys of each window are its own. Others of its eight are in `test_router.py`, which says where the rest is."""
    layer, x, mask = _block(True).attention, tokens(3, n, DIM), first(n, n, n // 2, 0)
    if hooked:
        watched(layer)
    kv = layer(x, mask, return_routing=True)[1].kv
    at, gates = (t.view(3, -(-n // WINDOW), -1) for t in (kv.indices, kv.gates))
    for window, start in enumerate(range(0, n, WINDOW)):
        alone = layer.router_kv(x[:, start : start + WINDOW], layer.quota(n), mask[:, start : start + WINDOW])
        there, chosen = alone.indices >= 0, at[:, window] >= 0
        assert torch.equal(at[:, window][chosen], alone.indices[there] + start)
        torch.testing.assert_close(gates[:, window][chosen], alone.gates[there])


@pytest.mark.gpu
@pytest.mark.parametrize("router", [Router, CausalRouter])
def test_no_synchronisation_with_the_host(router: type[Router]) -> None:
    layer = RoutedFeedForward(96, 1 / 16, router=router(96)).cuda()
    x, mask = tokens(3, 300, 96).cuda(), first(300, 10, 0, 300).cuda()
    layer(x, mask).sum().backward()
    with waiting_is_an_error():
        layer(x, mask).sum().backward()
