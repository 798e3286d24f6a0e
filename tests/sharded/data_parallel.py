"""DistributedDataParallel in two processes, each with half of the batch, against one process with all of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onepass.nn import RMSNorm, RoutedBlock
from onepass.optim import Lion
from sharded.processes import device_type, main


def model() -> nn.Module:
    torch.manual_seed(0)
    block = RoutedBlock(16, k=1 / 4, heads=2, dim_head=8, window=8)
    return nn.Sequential(block, RMSNorm(16), nn.Linear(16, 16), nn.Tanh()).to(device_type())


def train(net: nn.Module, shard: slice) -> None:
    # eval: exploration draws by the place in the batch, which two halves do not share
    net.eval()
    optimizer = Lion(net.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(4):
        x = torch.randn(4, 32, 16, generator=torch.Generator().manual_seed(step))[shard].to(device_type())
        (net(x) - x.cumsum(1).tanh()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def halves_train_as_the_whole() -> None:
    whole, parts = model(), DistributedDataParallel(model())
    train(whole, slice(None))
    rank = dist.get_rank()
    train(parts, slice(2 * rank, 2 * rank + 2))
    far = total = 0
    for a, b in zip(whole.parameters(), parts.module.parameters(), strict=True):
        # an update is ± the rate: a gradient near zero may fall on the other side in another order of sums
        far += int(((a - b).abs() > 1e-6).sum())
        total += a.numel()
    assert far <= total // 100, f"{far} of {total} weights differ"
    for parameter in parts.parameters():
        both = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(both, parameter.detach())
        assert torch.equal(*both)


def a_process_without_tokens_trains_on() -> None:
    """Its share of one step is empty: its gradients are zeros, and the others' are not waited for in vain."""
    torch.manual_seed(0)
    for causal in (False, True):
        net = RoutedBlock(16, k=1 / 4, heads=2, dim_head=8, window=8, causal=causal).to(device_type())
        parts = DistributedDataParallel(net)
        for step in range(3):
            n = 0 if dist.get_rank() and step == 1 else 12
            x = torch.randn(n, 16, device=device_type())
            parts(x, cu_seqlens=torch.tensor([0, n // 2, n], device=x.device), max_seqlen=6).square().sum().backward()
        assert all(p.grad is not None for p in parts.parameters())


if __name__ == "__main__":
    main({f.__name__: f for f in (halves_train_as_the_whole, a_process_without_tokens_trains_on)})
