"""Routed layers on tokens that are spread over processes, against one process."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import onepass
from nn.layers import first
from onepass.core.launch import INTERPRET
from onepass.nn import (
    LocalAttention,
    RMSNorm,
    Routed,
    RoutedAttention,
    RoutedBlock,
    RoutedCrossAttention,
    RoutedFeedForward,
    Router,
    WeightedSum,
)
from sharded.compare import R, case, in_shards, many, mesh, placed, same_layer, tolerance, whole, wide
from sharded.processes import device_type

DIM = 16


def _feed_forward(**options: Any) -> nn.Module:
    return RoutedFeedForward(DIM, 1 / 4, router=Router(DIM, **options) if options else None)


class _Scale(nn.Module):
    """A branch's buffer, which `distribute_module` makes a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.linspace(1, 2, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


def _linear() -> nn.Module:
    return Routed(nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), _Scale()), Router(DIM), 5)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": _feed_forward,
    "two routes, straight through": lambda: _feed_forward(num_routes=2, gate="straight_through"),
    "own branches": _linear,
    "no choice": lambda: RoutedFeedForward(DIM, 0),
}
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": 4}


class _Local(nn.Module):
    """`LocalAttention`, which chooses nothing, called as the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LocalAttention(DIM, **HEADS)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False) -> Any:
        return self.layer(x, mask), ()


class _Cross(nn.Module):
    """`RoutedCrossAttention` whose memories are the tokens in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = RoutedCrossAttention(DIM, 4, 1 / 2, heads=2, dim_head=8)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False) -> Any:
        return self.layer(x, x.flip(1), mask, None if mask is None else mask.flip(1), return_routing=True)


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 2, **HEADS),
    "causal attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 2, causal=True, **HEADS),
    "block": lambda: RoutedBlock(DIM, 1 / 4, **HEADS),
    "causal block": lambda: RoutedBlock(DIM, 1 / 4, causal=True, **HEADS),
}


@many("spread over the sequence", {"layer": [*LAYERS, *ATTENTIONS], "n": [32, 33, 17, 5, 1], "masked": [False, True]})
def _(layer: str, n: int, masked: bool) -> None:
    if layer in LAYERS and n == 17:
        return  # an edge of windows
    if INTERPRET and (layer not in ("feed-forward", "attention", "causal attention") or n != 33 or not masked):
        return
    x = wide(2 if INTERPRET else 3, n, DIM).to(device_type())
    mask = first(n, *(n, max(1, n // 2), 0)[: len(x)]).to(x.device)
    same_layer(
        {**LAYERS, **ATTENTIONS}[layer](), x.float() if INTERPRET else x, mask if masked else None, mesh(), [Shard(1)]
    )


@many("batch and sequence", {"masked": [False, True]})
def _(masked: bool) -> None:
    world = dist.get_world_size()
    on = mesh(world // 2, 2)
    x = wide(4, 20, DIM).to(device_type())
    mask = torch.rand(4, 20, device=x.device) < 0.7 if masked else None
    same_layer(_feed_forward(), x, mask, on, [Shard(0), Shard(1)])
    same_layer(_feed_forward(), x, None, on, [R, Shard(1)])
    same_layer(ATTENTIONS["block"](), x, None, on, [Shard(0), Shard(1)])


@many("fewer rows than processes along the batch", {"layer": ["feed-forward", "causal block", "own branches"]})
def _(layer: str) -> None:
    x = wide(1, 20, DIM).to(device_type())
    on, make = mesh(dist.get_world_size(), 1), {**LAYERS, **ATTENTIONS}[layer]
    same_layer(make(), x, torch.rand(1, 20, device=x.device) < 0.7, on, [Shard(0), Shard(1)])


EVERY = {**LAYERS, **ATTENTIONS, "local": _Local, "cross": _Cross}


@many("each process has whole rows", {"layer": list(EVERY), "rows": [5, 1]})
def _(layer: str, rows: int) -> None:
    x = wide(rows, 20, DIM).to(device_type())
    mask = torch.rand(rows, 20, device=x.device) < 0.7
    same_layer(EVERY[layer](), x, mask, mesh(), [Shard(0)])
    same_layer(EVERY[layer](), x, None, mesh(), [Shard(0)], in_shards)
    same_layer(EVERY[layer](), x, None, mesh(), [R])
    # plain weights, as FSDP2 hands them; the parts of their gradients add up
    _alike(EVERY[layer]().to(x.device, x.dtype), x)


def _alike(layer: nn.Module, x: Tensor, *on: DeviceMesh) -> None:
    """Compare a layer's outputs and gradients on rows in shards, with plain weights or those on a mesh."""
    other = copy.deepcopy(layer)
    other = distribute_module(other, *on) if on else other
    (y, _), (got, _) = layer(x, return_routing=True), other(placed(x, mesh(), [Shard(0)]), return_routing=True)
    torch.testing.assert_close(whole(got.detach()), y.detach(), **tolerance(x.dtype))
    y.sum().backward()
    got.sum().backward()
    for (name, p), q in zip(layer.named_parameters(), other.parameters(), strict=True):
        if not on and p.grad is not None:
            dist.all_reduce(q.grad)
        if p.grad is not None:
            torch.testing.assert_close(whole(q.grad), p.grad, **tolerance(x.dtype), msg=lambda m, n=name: f"{n}: {m}")


@many("hooks see DTensors", {"layer": list(EVERY)})
def _(layer: str) -> None:
    x, seen = wide(4, 20, DIM).to(device_type()), []
    plain, module = (EVERY[layer]().to(x.device, x.dtype) for _ in range(2))
    for m in (plain, module):
        [*m.modules()][-1].register_forward_hook(lambda _, __, y: seen.append(type(y[0])))
    _alike(module, x, mesh())
    assert seen == [Tensor, DTensor] * (len(seen) // 2)
    for rows, m in ((5, distribute_module(module, mesh())), (4, plain)):
        with pytest.raises(ValueError, match=f"with hooks inside, .*; got {rows} rows on {dist.get_world_size()} dev"):
            m(placed(wide(rows, 20, DIM).to(x.device), mesh(), [Shard(0)]))


@many("the forward of a subclass, as FSDP2 makes one, runs once", {"kind": [0, 1], "dim": [0, 1]})
def _(kind: int, dim: int) -> None:
    base: Any = (RoutedAttention, RoutedFeedForward)[kind]

    class Shifted(base):
        def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(x + 1, *args, **options)

    layer = Shifted(DIM, 1 / 4) if kind else Shifted(DIM, 1 / 4, 1 / 2, **HEADS)
    x = wide(4, 20, DIM).to(device_type())
    same_layer(layer, x, None, mesh(), [Shard(dim)])
    bounds = torch.tensor([0, 7, 20], device=x.device)
    alone = torch.cat([layer(x[:1, :7]), layer(x[:1, 7:])], 1)
    torch.testing.assert_close(layer(x[:1], cu_seqlens=bounds, max_seqlen=13), alone, **tolerance(x.dtype))


@case("branches in tensor parallelism")
def _() -> None:
    def branch(name: str, module: nn.Module, on: DeviceMesh) -> None:
        if name.endswith(("up", "down")):
            style = ColwiseParallel() if name.endswith("up") else RowwiseParallel(use_local_output=False)
            parallelize_module(module, on, style)

    same_layer(_feed_forward(), wide(4, 20, DIM).to(device_type()), None, mesh(), [R], branch)


@many("torch.compile leaves layers of DTensors to eager", {"dim": [0, 1]})
def _(dim: int) -> None:
    layer = distribute_module((_linear() if dim else ATTENTIONS["block"]()).to(device_type()), mesh())
    x = placed(wide(4, 20, DIM).float().to(device_type()), mesh(), [Shard(dim)])
    y, got = layer(x), torch.compile(layer, backend="aot_eager")(x)
    got.sum().backward()
    torch.testing.assert_close(whole(got.detach()), whole(y.detach()))


@case("weights in shards")
def _() -> None:
    same_layer(_feed_forward(), wide(2, 24, DIM).to(device_type()), None, mesh(), [Shard(1)], in_shards)


@many(
    "plain weights",
    {
        "layer": ["feed-forward", "attention", "causal attention", "causal block"],
        "dtype": [torch.float32, torch.float64],
    },
)
def _(layer: str, dtype: torch.dtype) -> None:
    """Each process has whole weights, as FSDP2 hands them; the parts of their gradients add up."""
    x = wide(2, 24, DIM).to(device_type(), dtype)
    module = {**LAYERS, **ATTENTIONS}[layer]().to(x.device, x.dtype)
    other = copy.deepcopy(module)
    a = x.clone().requires_grad_()
    b = placed(x, mesh(), [Shard(1)]).requires_grad_()
    y, got = module(a), other(b)
    tight = tolerance(dtype)
    torch.testing.assert_close(whole(got.detach()), y.detach(), **tight)
    y.backward(torch.ones_like(y))
    got.backward(placed(torch.ones_like(y), mesh(), [Shard(1)]))
    torch.testing.assert_close(whole(b.grad), a.grad, **tight)
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert q.grad is not None, name
        dist.all_reduce(q.grad)
        torch.testing.assert_close(q.grad, p.grad, **tight, msg=lambda m, n=name: f"{n}: {m}")


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Collectives, how much each sends, operators on DTensors, and how many operators only a spread layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.on_dtensors: list[str] = []
        self.seams = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func):
            tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Tensor)]
            self.sent.append((str(func), max(t.numel() for t in tensors)))
        if any(issubclass(t, DTensor) for t in types):
            self.on_dtensors.append(str(func))
        frame: Any = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(onepass.__path__[0]):
            frame = frame.f_back
        self.seams += frame is not None and frame.f_code.co_filename.endswith(("row.py", "over_sequence.py"))
        return func(*args, **(kwargs or {}))


@many("few collectives, and no operator on DTensors", {"layer": list(ATTENTIONS), "placed": [False, True]})
def _(layer: str, placed: bool) -> None:
    """Scores, edges of windows, keys and values; a block also sends the feed-forward's scores. Weights: one sum."""
    module = ATTENTIONS[layer]().to(device_type())
    module = distribute_module(module, mesh()) if placed else module
    x = distribute_tensor(torch.randn(1, 64, DIM, device=device_type()), mesh(), [Shard(1)]).requires_grad_()
    up = distribute_tensor(torch.ones_like(x), mesh(), [Shard(1)])
    x.grad = torch.zeros_like(x)
    module(x)
    with Calls() as forward:
        y = module(x)
    with Calls() as backward:
        y.backward(up)
    block = "block" in layer
    assert len(forward.sent) == 3 + block, forward.sent
    assert len(backward.sent) == 3 + block + placed, backward.sent
    weights = placed * len(list(module.parameters()))
    assert forward.seams <= 52 + 10 * block + weights, forward.seams
    assert backward.seams <= 48 + 20 * block + weights, backward.seams
    assert not forward.on_dtensors
    # autograd alone: it adds to x.grad, and keeps each weight's gradient
    assert {*backward.on_dtensors} <= {"aten.add_.Tensor", "aten.detach.default"}, backward.on_dtensors


@many("meta device, FSDP2, to_empty, reset: nothing is left uninitialised", {"causal": [False, True]})
def _(causal: bool) -> None:
    with torch.device("meta"):
        block = RoutedBlock(16, 4, heads=2, dim_head=8, causal=causal)
        model = nn.Sequential(block, RMSNorm(16), WeightedSum(16, 2))
    fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    model.to_empty(device=device_type())
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no random tracker for a mesh of CPUs
        for m in model.modules():
            if hasattr(m, "reset_parameters"):
                m.reset_parameters()
    assert not [name for name, p in model.named_parameters() if whole(p).isnan().any()]
    assert not whole(block.attention.null).any()


@case("swap refuses what is wrapped, and leaves a norm of DTensors alone")
def _() -> None:
    def norm() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8)).to(device_type())

    wrapped = fully_shard(norm(), mesh=mesh())
    for model, name in (
        (DistributedDataParallel(norm()), "the model is wrapped in DistributedDataParallel"),
        (wrapped, "the model is wrapped in FSDPSequential"), (nn.Sequential(wrapped), "0 is wrapped in FSDPSequential"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"swap: {name}; swap first, then wrap"):
            onepass.swap(model)
    assert onepass.swap(distribute_module(norm(), mesh())).left_alone[0].reason == "its weight is of type DTensor"
    onepass.swap(swapped := norm())
    ddp = DistributedDataParallel(swapped)
    ddp(torch.randn(2, 8, device=device_type())).sum().backward()
    assert ddp.module[0].weight.grad is not None


WRONG: dict[str, tuple[str, Callable[[int, Tensor, nn.Module], tuple[Any, Any]]]] = {
    "mask": ("mask", lambda rank, x, _: (x, None if rank else _part(torch.ones(2, 24, dtype=torch.bool)))),
    "dtype": ("weights", lambda rank, x, layer: (layer.to(torch.float32 if rank else torch.float64), (x, None))[1]),
    "length": ("x", lambda rank, x, _: (_part(torch.randn(2, 24 + 9 * rank, DIM)), None)),
    "placing": ("distribute_tensor", lambda rank, x, _: (_unlike(rank), None)),
    "plain mask": ("mask must be a DTensor", lambda rank, x, _: (x, torch.ones(2, 24, dtype=torch.bool))),
}


def _part(t: Tensor) -> DTensor:
    """Return t with this process's tokens alone, without asking the others."""
    own = t.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous().to(device_type())
    return DTensor.from_local(own, mesh(), [Shard(1)], run_check=False)


def _unlike(rank: int) -> DTensor:
    """24 tokens, of which the first process has one more than its share, and the second one less."""
    here = 24 // dist.get_world_size() + (1, -1, 0, 0)[rank]
    part = torch.randn(2, here, DIM, device=device_type())
    return DTensor.from_local(part, mesh(), [Shard(1)], run_check=False, shape=(2, 24, DIM), stride=(24 * DIM, DIM, 1))


@many("a call unlike those of the others is named everywhere", {"wrong": list(WRONG), "layer": list(ATTENTIONS)[1:3]})
def _(wrong: str, layer: str) -> None:
    said, make = WRONG[wrong]
    module = ATTENTIONS[layer]().to(device_type())
    x, mask = make(dist.get_rank(), _part(torch.randn(2, 24, DIM)), module)
    with pytest.raises((ValueError, TypeError), match=said):
        module(x.to(device_type()), mask)


@many("only scores, windows and chosen keys travel", {"layer": ["feed-forward", "attention"]})
def _(layer: str) -> None:
    """The largest tensors sent are rows of scores, chosen keys and values, and weights' gradients."""
    n, world = 2048, dist.get_world_size()
    module = _feed_forward() if layer == "feed-forward" else RoutedAttention(DIM, 1 / 64, 1 / 64, **HEADS)
    module = distribute_module(module.to(device_type()), mesh())
    x = placed(wide(2, n, DIM).float().to(device_type()), mesh(), [Shard(1)]).requires_grad_()

    module(x)
    with Calls() as calls:
        y = module(x)
        y.backward(DTensor.from_local(torch.ones_like(y.to_local()), mesh(), [Shard(1)], run_check=False))
    sent = [count for _, count in calls.sent]
    assert sent
    # what a device has and the windows beside it may be copied to itself
    beside = 2 * (n // world + 4 * HEADS["window"]) * DIM if layer == "attention" else 0
    assert max(sent) <= max(2 * n, beside) < 2 * n * DIM, sent
