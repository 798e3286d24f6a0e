"""FSDP2: routed blocks in shards on several processes, Lion on the shards, one checkpoint for any number of them.

Run: torchrun --standalone --nproc-per-node 2 examples/fsdp2.py      on CPUs with gloo, on GPUs with NCCL
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from onepass.nn import RMSNorm, RoutedBlock
from onepass.optim import Lion

DIM, LENGTH = 32, 128


def build(device: torch.device) -> tuple[nn.Module, Optimizer]:
    """Return a sharded model and its optimizer; every process starts from the same weights."""
    torch.manual_seed(0)
    blocks = [RoutedBlock(DIM, k=1 / 8, heads=2, dim_head=16, window=16) for _ in range(2)]
    model = nn.Sequential(*blocks, RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh()).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    # after fully_shard: the parameters are DTensors now
    return model, Lion(model.parameters(), lr=1e-3, weight_decay=0.1)


def train(model: nn.Module, optimizer: Optimizer, steps: range, device: torch.device) -> Tensor:
    for step in steps:
        # each process has sequences of its own; FSDP2 averages their gradients
        draws = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(4, LENGTH, DIM, generator=draws).to(device)
        loss = (model(x) - x.cumsum(1).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone() / dist.get_world_size())
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {mean.item():.4f}", flush=True)
    return mean


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)

    model, optimizer = build(device)
    train(model, optimizer, range(20), device)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    through = train(model, optimizer, range(20, 30), device)

    model, optimizer = build(device)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    resumed = train(model, optimizer, range(20, 30), device)
    if dist.get_rank() == 0:
        print(f"through {through.item():.6f}, from the checkpoint {resumed.item():.6f}")
    dist.barrier()  # no process leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
