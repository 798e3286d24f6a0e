"""Routed layers that balance heavy work over the devices of a sequence: same results, even work, few tokens moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_module

from nn.layers import first
from onepass.nn import CausalRouter, Routed, RoutedBlock, RoutedFeedForward, Router, RouterOutput
from sharded.compare import R, case, in_shards, many, mesh, placed, same_layer, whole, wide
from sharded.processes import device_type

DIM = 16
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": 4}


def _own(k: int | float, **options: Any) -> Routed:
    heavy = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
    return Routed(nn.Linear(DIM, DIM), heavy, Router(DIM, **options), k, balance=True)


LAYERS: dict[str, Callable[[], Any]] = {
    "share": lambda: RoutedFeedForward(DIM, 1 / 4, balance=True),
    "number": lambda: RoutedFeedForward(DIM, 7, balance=True),
    "causal": lambda: RoutedFeedForward(DIM, 1 / 4, router=CausalRouter(DIM, block=4, memory=8), balance=True),
    "two routes, straight through": lambda: _own(1 / 4, num_routes=2, gate="straight_through"),
    "own branches": lambda: _own(5),
    "no choice": lambda: RoutedFeedForward(DIM, 0, balance=True),
    "block": lambda: RoutedBlock(DIM, 1 / 4, balance=True, **HEADS),
    "causal block": lambda: RoutedBlock(DIM, 1 / 4, causal=True, balance=True, **HEADS),
}


class Given(nn.Module):
    """A router that reads no tokens: it has its choices."""

    def __init__(self, indices: Tensor) -> None:
        super().__init__()
        self.indices = indices

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        gates = torch.linspace(0.5, 1, self.indices.shape[-1], dtype=torch.float64).to(x.dtype).to(x.device)
        gates = torch.where(self.indices >= 0, gates, 0)
        return RouterOutput(self.indices, gates, gates)


def _heavy_rows(layer: Any) -> list[int]:
    """Return a list that gets the number of tokens of each call of the heavy branch, also of the layer's copies."""
    found: list[int] = []
    heavy = getattr(layer, "feed_forward", layer).heavy
    heavy.register_forward_pre_hook(lambda _, args: found.append(args[0].shape[:-1].numel()))
    return found


def _even(rows: int, chosen: int, group: Any = None) -> None:
    """Demand that the devices together have the chosen tokens, and none more than ⌈chosen / devices⌉."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, rows, group=group)
    assert sum(everyone) == chosen, everyone
    assert max(everyone) == -(-chosen // len(everyone)), everyone


def _balanced(layer: Any, x: Tensor, mask: Tensor | None = None) -> None:
    """Compare with one process, and demand even work."""
    rows = _heavy_rows(layer)
    routing = same_layer(layer, x, mask, mesh(), [Shard(1)])
    indices = getattr(routing, "feed_forward", routing).indices
    if indices.shape[-1]:
        _even(rows[1], int(((indices >= 0) & (indices < x.shape[1])).sum()))


def _crowded(layer: Any, x: Tensor, begin: int, end: int) -> Tensor:
    """Return x with tokens that the feed-forward's router prefers from begin to end."""
    router = getattr(layer, "feed_forward", layer).router
    x = 0.1 * x
    x[:, begin:end] += 10 * router.weight.detach().to(x).sum(0)
    return x


@many("like one process", {"layer": list(LAYERS), "n": [33, 5, 1], "masked": [False, True]})
def _(layer: str, n: int, masked: bool) -> None:
    x = wide(3, n, DIM).to(device_type())
    _balanced(LAYERS[layer](), x, first(n, max(1, n // 2), n, 0).to(x.device) if masked else None)


@many("all chosen tokens on one device", {"layer": [*LAYERS][:-3], "place": ["first", "last"], "batch": [1, 2]})
def _(layer: str, place: str, batch: int) -> None:
    n, here = 40, 40 // dist.get_world_size()
    module = LAYERS[layer]()
    x = wide(batch, n, DIM).to(device_type())
    begin = 0 if place == "first" else n - here
    _balanced(module, _crowded(module, x, begin, begin + min(here, 10)))


_CHOICES = [[[0, 1, 2], [0, 1, -1]], [[4, 3, 2], [-1, -1, -1]], [[-1] * 3] * 2, [[99, 1, -7], [0, 24, 2]]]


@many("given choices", {"n": [24, 5], "rows": _CHOICES})
def _(n: int, rows: list[list[int]]) -> None:
    indices = torch.tensor(rows, device=device_type())
    layer = Routed(nn.Identity(), nn.Linear(DIM, DIM), Given(indices), 3, balance=True)
    _balanced(layer, wide(2, n, DIM).to(device_type()))


@case("batch and sequence")
def _() -> None:
    on = mesh(dist.get_world_size() // 2, 2)
    layer = LAYERS["share"]()
    x = _crowded(layer, wide(4, 20, DIM).to(device_type()), 0, 5)
    rows = _heavy_rows(layer)
    same_layer(copy.deepcopy(layer), x, torch.rand(4, 20, device=x.device) < 0.7, on, [Shard(0), Shard(1)])
    same_layer(layer, x, None, on, [R, Shard(1)])
    _even(rows[3], 4 * 5, on.get_group(1))
    same_layer(LAYERS["block"](), x, None, on, [Shard(0), Shard(1)])


@case("weights in shards")
def _() -> None:
    layer = LAYERS["share"]()
    same_layer(layer, _crowded(layer, wide(2, 24, DIM).to(device_type()), 0, 6), None, mesh(), [Shard(1)], in_shards)


@many("like the layer that is not balanced", {"layer": ["share", "causal", "block"], "learns": ["x", "weights"]})
def _(layer: str, learns: str) -> None:
    """Plain weights, as FSDP2 hands them; also where tokens or weights need no gradient."""
    module = LAYERS[layer]().to(device_type(), torch.float64)
    module.requires_grad_(learns == "weights")
    tokens = _crowded(module, wide(2, 24, DIM).to(device_type()).double(), 0, 6)
    found = []
    for balance in (False, True):
        one = copy.deepcopy(module)
        getattr(one, "feed_forward", one).balance = balance
        x = placed(tokens, mesh(), [Shard(1)]).requires_grad_(learns == "x")
        y, routing = one(x, return_routing=True)
        y.backward(placed(torch.ones_like(tokens), mesh(), [Shard(1)]))
        gradients = [p.grad for p in one.parameters() if p.grad is not None]
        for grad in gradients:
            dist.all_reduce(grad)
        routing = getattr(routing, "feed_forward", routing)
        gradients += [] if x.grad is None else [whole(x.grad)]
        found.append([whole(t) for t in (y, routing.gates, routing.indices)] + gradients)
    plain, balanced = found
    assert len(plain) == len(balanced) > 3
    for a, b in zip(plain, balanced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@case("autocast and no gradient")
def _() -> None:
    layer = _own(1 / 4).to(device_type())
    x = placed(_crowded(layer, wide(2, 24, DIM).float().to(device_type()), 0, 6), mesh(), [Shard(1)])
    layer = distribute_module(layer, mesh())
    found = []
    for balance in (False, True):
        layer.balance = balance
        with torch.no_grad(), torch.autocast(device_type(), torch.bfloat16):
            found.append(whole(layer(x)))
    # tanh times a gate is at most 1, and a bf16 product of another shape may round it by 2⁻⁸
    torch.testing.assert_close(*found, rtol=0, atol=2**-7)


def _sent(choices: list[int]) -> list[int]:
    """Return how many of 24 tokens this device sends in each all-to-all of forward and backward; demand no others."""
    sent: list[int] = []
    router = Given(torch.tensor([choices], device=device_type()))
    x = placed(wide(1, 24, DIM).to(device_type()), mesh(), [Shard(1)]).requires_grad_()
    up = placed(torch.ones(x.shape, dtype=x.dtype, device=x.device), mesh(), [Shard(1)])
    # plain weights: their gradients stay here
    layer = Routed(nn.Identity(), nn.Linear(DIM, DIM), router, 6, balance=True).to(x.device, x.dtype)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in str(func):
                assert "alltoall" in str(func), func
                sent.append(args[1].numel() // DIM)
            return func(*args, **(kwargs or {}))

    layer(x)  # the devices agree on a call that is new to them
    with Watch():
        layer(x).backward(up)
    return sent


@case("no more tokens move than balance takes")
def _() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    here = 24 // world
    # two on each device
    assert _sent([d * here + i for d in range(world) for i in range(2)]) == []
    # device 0 has one more than a share, device 1 one less: one token there and back, and its gradients
    moved = [d * here + i for d in range(world) for i in range((3, 1, 2, 2)[d])]
    assert _sent(moved) == ([1, 0, 1, 0] if rank == 0 else [0, 1, 0, 1] if rank == 1 else [0] * 4)
