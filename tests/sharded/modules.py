"""Routed layers and experts over processes, rows in shards, FSDP2 and DDP, against one process."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import onepass
from harness import Calls
from nn.table import DIM, LOCAL, TABLE, Called
from onepass.core.launch import INTERPRET
from onepass.nn import Experts, RMSNorm, RoutedAttention, RoutedBlock, RoutedFeedForward, WeightedSum, update_balance
from sharded.compare import R, case, in_shards, many, mesh, placed, same_layer, tolerance, whole, wide
from sharded.processes import device_type

NAMES = (
    "Routed", "RoutedFeedForward", "RoutedFeedForward by three", "RoutedAttention", "RoutedAttention causal",
    "RoutedAttention with routers", "RoutedCrossAttention", "RoutedBlock", "RoutedBlock causal", "LocalAttention",
)  # fmt: skip
EVERY: dict[str, Callable[[], nn.Module]] = {s.name: functools.partial(Called, s) for s in TABLE if s.name in NAMES}


@many("each process has whole rows", {"layer": list(EVERY), "rows": [5, 1]})
def _(layer: str, rows: int) -> None:
    if INTERPRET and layer not in ("RoutedFeedForward", "RoutedAttention", "RoutedAttention causal"):
        return
    x = wide(rows, 20, DIM).to(device_type())
    mask = torch.rand(rows, 20, device=x.device) < 0.7
    same_layer(EVERY[layer](), x, mask, mesh(), [Shard(0)])
    same_layer(EVERY[layer](), x, None, mesh(), [Shard(0)], in_shards)
    same_layer(EVERY[layer](), x, None, mesh(), [R])
    same_layer(EVERY[layer](), x, None, mesh(), [Shard(0)], plain=True)
    spread = layer in ("RoutedFeedForward", "RoutedBlock") and not INTERPRET
    for placements in ([Shard(0), R], [R, Shard(0)]) if spread else ():
        same_layer(EVERY[layer](), x, mask if rows == 1 else None, mesh(dist.get_world_size() // 2, 2), placements)


@many("hooks see DTensors", {"layer": list(EVERY)})
def _(layer: str) -> None:
    x, seen = wide(4, 20, DIM).to(device_type()), []
    plain, module = (EVERY[layer]().to(x.device, x.dtype) for _ in range(2))
    for m in (plain, module):
        [*m.modules()][-1].register_forward_hook(lambda _, __, y: seen.append(type(y[0])))
    same_layer(module, x, None, mesh(), [Shard(0)], hooked=True)
    assert seen == [Tensor, DTensor] * (len(seen) // 2)
    for rows, m in ((5, distribute_module(module, mesh())), (4, plain)):
        with pytest.raises(ValueError, match=f"with hooks inside, .*; got {rows} rows on {dist.get_world_size()} dev"):
            m(placed(wide(rows, 20, DIM).to(x.device), mesh(), [Shard(0)]))


@many("the forward of a subclass, as FSDP2 makes one, runs once", {"kind": [0, 1]})
def _(kind: int) -> None:
    base: Any = (RoutedAttention, RoutedFeedForward)[kind]

    class Shifted(base):
        def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(x + 1, *args, **options)

    layer = Shifted(DIM, 1 / 4) if kind else Shifted(DIM, 1 / 4, 1 / 2, **LOCAL)
    x = wide(4, 20, DIM).to(device_type())
    same_layer(layer, x, None, mesh(), [Shard(0)])
    bounds = torch.tensor([0, 7, 20], device=x.device)
    alone = torch.cat([layer(x[:1, :7]), layer(x[:1, 7:])], 1)
    torch.testing.assert_close(layer(x[:1], cu_seqlens=bounds, max_seqlen=13), alone, **tolerance(x.dtype))


@case("branches in tensor parallelism")
def _() -> None:
    def branch(name: str, module: nn.Module, on: DeviceMesh) -> None:
        if name.endswith(("up", "down")):
            style = ColwiseParallel() if name.endswith("up") else RowwiseParallel(use_local_output=False)
            parallelize_module(module, on, style)

    same_layer(RoutedFeedForward(DIM, 1 / 4), wide(4, 20, DIM).to(device_type()), None, mesh(), [R], branch)


@many("one collective", {"layer": list(EVERY), "placed": [False, True]})
def _(layer: str, placed: bool) -> None:
    """The sum of a layer's gradients of weights; a block has two layers."""
    module = EVERY[layer]().to(device_type())
    module = distribute_module(module, mesh()) if placed else module
    x = distribute_tensor(torch.randn(4, 64, DIM, device=device_type()), mesh(), [Shard(0)]).requires_grad_()
    up = distribute_tensor(torch.ones_like(x), mesh(), [Shard(0)])
    x.grad = torch.zeros_like(x)
    module(x)
    with Calls("c10d") as forward:
        y, _ = module(x, return_routing=True)
    with Calls("c10d") as backward:
        y.backward(up)
    assert not forward.found
    assert len(backward.found) == placed * (1 + ("Block" in layer)), backward.found


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
        (DistributedDataParallel(norm()), "model is wrapped in DistributedDataParallel"),
        (wrapped, "model is wrapped in FSDPSequential"), (nn.Sequential(wrapped), "0 is wrapped in FSDPSequential"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"swap: {name}; swap first, then wrap"):
            onepass.swap(model)
    assert onepass.swap(distribute_module(norm(), mesh())).left_alone[0].reason == "its weight is of type DTensor"
    onepass.swap(swapped := norm())
    ddp = DistributedDataParallel(swapped)
    ddp(torch.randn(2, 8, device=device_type())).sum().backward()
    assert ddp.module[0].weight.grad is not None


@many("what rows over devices are refused", {"layer": list(EVERY)})
def _(layer: str) -> None:
    module, x = EVERY[layer]().to(device_type()), torch.randn(4, 24, DIM, device=device_type())
    with pytest.raises(ValueError, match=r"rows must be whole on a device, .*; write distribute_tensor\(x, mesh, \["):
        module(placed(x, mesh(), [Shard(1)]))
    with pytest.raises(TypeError, match="mask must be a DTensor, as the other tensors are"):
        module(placed(x, mesh(), [Shard(0)]), torch.ones(4, 24, dtype=torch.bool, device=x.device))
    with pytest.raises(TypeError, match="TransformerBlock: x must be a plain tensor, got a DTensor; give"):
        onepass.nn.TransformerBlock(DIM, dim_head=16, device=x.device)(placed(x, mesh(), [Shard(0)]))
    if layer in ("RoutedAttention", "RoutedBlock causal"):
        with pytest.raises(TypeError, match="x must be a plain tensor, got a DTensor; give each device whole"):
            module(placed(x.flatten(0, 1), mesh(), [Shard(0)]), cu_seqlens=torch.tensor([0, 96]), max_seqlen=96)


def _experts(num_experts: int = 4) -> Experts:
    return Experts(DIM, num_experts, shared_dim=8, balance_rate=0.01).to(device_type(), wide(1).dtype)


@case("experts in shards take a whole state with the gate apart")
def _() -> None:
    layer, net = (Experts(DIM, 5, activation="swiglu").to(device_type()) for _ in range(2))
    state = layer.state_dict()
    state["gate"], state["up"] = state["up"].chunk(2, -1)
    set_model_state_dict(fully_shard(net, mesh=mesh()), state, options=StateDictOptions(full_state_dict=True))
    assert torch.equal(whole(net.up), layer.up)


@many("experts on tokens in shards", {"rows": [8, 4]})
def _(rows: int) -> None:
    layer, spread = same_layer(_experts(), wide(rows, 24, DIM).to(device_type()), None, mesh(), [Shard(0)])
    update_balance(spread)
    # one process counts the batch once for each process here: the sign is the same
    update_balance(layer)
    assert torch.equal(whole(spread.expert_bias), layer.expert_bias)


@many("experts, data parallel", {"how": ["FSDP2", "DDP", "DDP, buffers broadcast"], "num_experts": [4, 5]})
def _(how: str, num_experts: int) -> None:
    """Gradients are those of the whole batch, and biases stay equal; the experts need not divide by the processes."""
    layer, x = _experts(num_experts), wide(8, 24, DIM).to(device_type())
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    parts = copy.deepcopy(layer)
    net = fully_shard(parts, mesh=mesh()) if how == "FSDP2" else DistributedDataParallel(
        parts, broadcast_buffers=how != "DDP"
    )  # fmt: skip
    for _ in range(2):
        layer(x).square().mean().backward()
        net(mine).square().mean().backward()
        for (name, p), q in zip(layer.named_parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(whole(q.grad), p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert whole(parts.tokens_per_expert).sum() == 2 * mine.shape[0] * mine.shape[1]
        assert torch.equal(*[whole(t) for t in (layer.expert_bias, parts.expert_bias)])
        update_balance(parts)
        # the whole batch, counted by each process
        update_balance(layer)
        assert torch.equal(whole(parts.expert_bias), layer.expert_bias)
        assert layer.expert_bias.any()
