"""`Experts` in several processes: tokens in shards, FSDP2 and DDP, against one process with the whole batch."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from onepass.nn import Experts, update_balance
from sharded.compare import many, mesh, same_layer, whole, wide
from sharded.processes import device_type

DIM, TOKENS = 16, 24


def _layer(num_experts: int = 4) -> Experts:
    torch.manual_seed(0)
    layer = Experts(DIM, num_experts, shared_dim=8, balance_rate=0.01)
    return layer.to(device_type(), wide(1).dtype)


def _batch() -> Tensor:
    return torch.randn(8, TOKENS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        device_type(), wide(1).dtype
    )


def _mine(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return x[rank * len(x) // size : (rank + 1) * len(x) // size]


@many("tokens in shards", {"rows": [8, 4]})
def _(rows: int) -> None:
    layer, spread = same_layer(_layer(), _batch()[:rows], None, mesh(), [Shard(0)])
    update_balance(spread)
    # one process counts the batch once for each process here: the sign is the same
    update_balance(layer)
    assert torch.equal(whole(spread.expert_bias), layer.expert_bias)


@many("data parallel", {"how": ["FSDP2", "DDP", "DDP, buffers broadcast"], "num_experts": [4, 5]})
def _(how: str, num_experts: int) -> None:
    """Gradients are those of the whole batch, and biases stay equal; the experts need not divide by the processes."""
    layer, x = _layer(num_experts), _batch()
    parts = copy.deepcopy(layer)
    net = fully_shard(parts, mesh=mesh()) if how == "FSDP2" else DistributedDataParallel(
        parts, broadcast_buffers=how != "DDP"
    )  # fmt: skip
    for _ in range(2):
        layer(x).square().mean().backward()
        net(_mine(x)).square().mean().backward()
        for (name, p), q in zip(layer.named_parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(whole(q.grad), p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert whole(parts.tokens_per_expert).sum() == 2 * _mine(x).shape[0] * TOKENS
        rest = [whole(t) for t in (layer.expert_bias, parts.expert_bias)]
        assert torch.equal(*rest)
        update_balance(parts)
        # the whole batch, counted by each process
        update_balance(layer)
        assert torch.equal(whole(parts.expert_bias), layer.expert_bias)
        assert layer.expert_bias.any()
