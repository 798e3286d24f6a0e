"""Packed sequences on a row that is spread over processes, against the same on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

from nn.layers import outputs
from onepass.core.launch import INTERPRET
from onepass.fused import row
from onepass.nn import CausalRouter, Routed, RoutedAttention, RoutedBlock, RoutedFeedForward, Router
from sharded.compare import R, case, in_shards, many, mesh, placed, same_layer, tolerance, whole, wide
from sharded.modules import Calls
from sharded.processes import device_type

DIM = 16
HEADS: dict[str, Any] = {"heads": 2, "dim_head": 8, "window": 4}


def _own(router: nn.Module, k: int | float, **options: Any) -> nn.Module:
    return Routed(nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), router, k, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: RoutedFeedForward(DIM, 1 / 4),
    "number": lambda: RoutedFeedForward(DIM, 3),
    "straight through": lambda: RoutedFeedForward(DIM, 1 / 4, router=Router(DIM, gate="straight_through")),
    "causal feed-forward": lambda: RoutedFeedForward(DIM, 1 / 4, router=CausalRouter(DIM, block=4, memory=8)),
    "two routes": lambda: RoutedFeedForward(DIM, 1 / 4, router=Router(DIM, num_routes=2)),
    "own branches": lambda: _own(Router(DIM), 3),
    "causal, own branches": lambda: _own(CausalRouter(DIM, block=4, memory=8), 1 / 4),
    "no choice": lambda: RoutedFeedForward(DIM, 0),
    "attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 2, **HEADS),
    "number attention": lambda: RoutedAttention(DIM, 3, 5, **HEADS),
    "causal attention": lambda: RoutedAttention(DIM, 1 / 4, 1 / 2, causal=True, **HEADS),
    "block": lambda: RoutedBlock(DIM, 1 / 4, **HEADS),
    "causal block": lambda: RoutedBlock(DIM, 1 / 4, causal=True, **HEADS),
}
# one over all processes, ends at edges of two and of four, empty ones, processes where none begins, parts of unequal
# length, a process without tokens, and many sequences in each
LENGTHS = [(24,), (12, 6, 6), (0, 10, 0, 0, 14, 0), (21, 3), (9, 17, 7), (3, 2), (1,) * 7 + (10, 1, 1)]


def bounds(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype, device=device_type())


@many("as on one process", {"layer": list(LAYERS), "lengths": LENGTHS})
def _(layer: str, lengths: Sequence[int]) -> None:
    if INTERPRET and (layer not in ("causal attention", "block") or lengths != LENGTHS[4]):
        return
    x = wide(1, sum(lengths), DIM).to(device_type())
    more = lengths == LENGTHS[4]
    # fewer keys than a grain are never cut
    row.GRAIN = 64 if more else 1
    same_layer(
        LAYERS[layer](), x.float() if INTERPRET else x, None, mesh(), [Shard(1)], in_shards if more else None,
        cu_seqlens=bounds(lengths, torch.int64 if more else torch.int32), max_seqlen=max(lengths) + 2 * more,
    )  # fmt: skip


@many("layer by layer, on a larger mesh, without a batch", {"layer": ["block", "causal block"]})
def _(layer: str) -> None:
    x, how = wide(1, 24, DIM).to(device_type()), {"cu_seqlens": bounds(LENGTHS[2]), "max_seqlen": 14}
    same_layer(LAYERS[layer](), x, None, mesh(dist.get_world_size() // 2, 2), [R, Shard(1)], **how)
    same_layer(LAYERS[layer](), x[0], None, mesh(), [Shard(0)], **how)
    block: Any = LAYERS[layer]()
    block.attention.register_forward_hook(lambda *_: None)
    same_layer(block, x, None, mesh(), [Shard(1)], **how)


@many(
    "plain weights, and a loss on the routing",
    {"layer": ["feed-forward", "two routes", "attention", "causal attention"]},
)
def _(layer: str) -> None:
    """The loss on the routing is the whole one on each process: for the others' sum, a share of it."""
    x, how = wide(1, 24, DIM).to(device_type()), {"cu_seqlens": bounds(LENGTHS[2]), "max_seqlen": 14}
    module = LAYERS[layer]().to(x.device, x.dtype)
    found = []
    for a in (x.clone(), placed(x, mesh(), [Shard(1)])):
        module.zero_grad()
        y, routing = module(a.requires_grad_(), return_routing=True, **how)
        loss = y.square().sum()
        for output in outputs(routing):
            real = torch.arange(14, device=x.device) < bounds(LENGTHS[2]).diff()[:, None]
            scores = output.scores.full_tensor() if isinstance(a, DTensor) else output.scores
            gates = output.gates.full_tensor() if isinstance(a, DTensor) else output.gates
            routed = (scores.square() * real.view(6, *(1,) * (scores.dim() - 2), 14)).sum() + gates.square().sum()
            loss = loss + (DTensor.from_local(routed, mesh(), [R]) if isinstance(a, DTensor) else routed)
        loss.backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        if isinstance(a, DTensor):
            for g in grads.values():
                dist.all_reduce(g)
        found.append({"x": whole(a.grad), **grads})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, **tolerance(x.dtype), msg=lambda m, n=name: f"{n}: {m}")


@many(
    "no more collectives than a row has, and no operator on DTensors",
    {"layer": ["attention", "causal attention", "block", "causal block"], "placed": [0, 1]},
)
def _(layer: str, placed: bool) -> None:
    module = LAYERS[layer]().to(device_type())
    module = distribute_module(module, mesh()) if placed else module
    x = distribute_tensor(torch.randn(1, 64, DIM, device=device_type()), mesh(), [Shard(1)]).requires_grad_()
    up = distribute_tensor(torch.ones_like(x), mesh(), [Shard(1)])
    x.grad = torch.zeros_like(x)
    module(x, cu_seqlens=bounds((30, 34)), max_seqlen=34)
    with Calls() as forward:
        y = module(x, cu_seqlens=bounds((3, 40, 21)), max_seqlen=40)
    with Calls() as backward:
        y.backward(up)
    assert len(forward.sent) + len(backward.sent) <= 2 * (3 + ("block" in layer)) + placed
    assert not forward.on_dtensors
    assert {*backward.on_dtensors} <= {"aten.add_.Tensor", "aten.detach.default"}, backward.on_dtensors


# what process r of several is given: ends of two sequences of 24 tokens, and max_seqlen
WRONG: dict[str, tuple[str, Callable[[int], tuple[tuple[int, ...], int]]]] = {
    "other bounds on one": (
        r"must agree on cu_seqlens.*device 0: \[0, 10, 24\] and 14; device 1: \[0, 11, 24\] and 14",
        lambda r: ((10 + (r == 1), 24), 14),
    ),
    "another longest on one": (
        "agree on.*device 0: .* and 14; device 1: .* and 15",
        lambda r: ((10, 24), 14 + (r == 1)),
    ),
    "more sequences on one": ("agree on cu_seqlens", lambda r: ((10, *(24,) * (1 + r)), 14)),
    "too few tokens on one": ("agree on cu_seqlens", lambda r: ((10, 24 - (r == 1)), 14)),
    "too few tokens": (
        r"rise from 0 to the 24 tokens of x by at most max_seqlen; got \[0, 10, 23\]",
        lambda _: ((10, 23), 14),
    ),
    "falling": ("rise from 0", lambda _: ((20, 10, 24), 24)),
    "far away": ("rise from 0", lambda _: ((-5, 10**9, 24), 24)),
    "too long": ("rise from 0", lambda _: ((10, 24), 13)),
    "no sequence": ("rise from 0", lambda _: ((), 24)),
}


@many(
    "wrong bounds are named everywhere",
    {"wrong": list(WRONG), "layer": ["feed-forward", "attention", "causal block", "own branches"]},
)
def _(wrong: str, layer: str) -> None:
    """Also after a right call, when processes no longer compare what they do."""
    said, make = WRONG[wrong]
    module, x = LAYERS[layer]().to(device_type()), placed(torch.randn(1, 24, DIM), mesh(), [Shard(1)])
    ends, most = make(dist.get_rank())
    for right in (True, False, True):
        if right:
            module(x, cu_seqlens=bounds((10, 14)), max_seqlen=14)
            continue
        with pytest.raises(ValueError, match=said):
            module(x, cu_seqlens=torch.tensor((0, *ends), device=x.device, dtype=torch.int32), max_seqlen=most)


REFUSED: dict[str, tuple[str, Callable[[int, Tensor], dict[str, Any]]]] = {
    "a DTensor": (
        r"cu_seqlens must be a plain tensor.*full_tensor",
        lambda _, b: {"cu_seqlens": placed(b, mesh(), [R])},
    ),
    "a DTensor on one": ("agree on mask and cu_seqlens.*plain tensor", lambda r, b: {"cu_seqlens": placed_on(r, b)}),
    "dtype": ("cu_seqlens must be int32 or int64", lambda _, b: {"cu_seqlens": b.float()}),
    "dtype on one": ("agree on mask and cu_seqlens.*must be int32", lambda r, b: {"cu_seqlens": b.float() if r else b}),
    "none on one": ("agree on mask and cu_seqlens", lambda r, b: {} if r else {"cu_seqlens": b, "max_seqlen": 14}),
    "max_seqlen": ("max_seqlen must be an int", lambda _, b: {"cu_seqlens": b, "max_seqlen": 2.0}),
}


def placed_on(rank: int, t: Tensor) -> Tensor:
    return t if rank else DTensor.from_local(t, mesh(), [R], run_check=False)


@many("what is no bounds is named everywhere", {"wrong": list(REFUSED), "layer": ["feed-forward", "block"]})
def _(wrong: str, layer: str) -> None:
    said, make = REFUSED[wrong]
    module, x = LAYERS[layer]().to(device_type()), placed(torch.randn(1, 24, DIM), mesh(), [Shard(1)])
    with pytest.raises((ValueError, TypeError), match=said):
        module(x, **make(dist.get_rank(), bounds((10, 14))))


class Given(nn.Module):
    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> Any:
        raise AssertionError("called")


@case("routers and placements that are refused")
def _() -> None:
    x, how = torch.randn(1, 24, DIM, device=device_type()), {"cu_seqlens": bounds((10, 14)), "max_seqlen": 14}
    with pytest.raises(TypeError, match=r"packed sequences over a row .* need a Router, got Given; pad them"):
        _own(Given(), 0.25).to(x.device)(placed(x, mesh(), [Shard(1)]), **how)
    with pytest.raises(TypeError, match=r"DTensor whose tokens are in shards .*Shard\(1\)"):
        LAYERS["block"]().to(x.device)(placed(x, mesh(), [R]), **how)
