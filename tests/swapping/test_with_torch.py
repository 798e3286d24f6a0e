"""`onepass.swap` and the rest of torch: the compiler, modules that read norms, models on several devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import onepass
from swapping.norms import (
    Tiny,
    shuffle,
    swap,
)


def test_compiled_before_and_after() -> None:
    """torch.compile sees the new class and compiles again."""
    model, x = shuffle(Tiny()), torch.randn(2, 16)
    want = model(x)
    program = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(program(x), want)
    seen: list[type] = []
    with swap(model):
        model.c.register_forward_hook(lambda m, args, y: seen.append(type(m)))
        torch.testing.assert_close(program(x), want)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
        assert set(seen) == {onepass.nn.RMSNorm}
    torch.testing.assert_close(program(x), want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(training: bool, norm_first: bool) -> None:
    """In evaluation mode torch reads the norms' weights itself and calls neither."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = shuffle(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train(training)
    x = torch.randn(2, 5, 16)
    with torch.set_grad_enabled(training):
        want = model(x)
        report = swap(model, strict=True)
        assert len(report.exchanged) == 4
        # random weights of variance 1: activations of about 10³, so a relative bound
        torch.testing.assert_close(model(x), want, rtol=0.0, atol=1e-4 * float(want.detach().abs().max()))


def test_wrapped_models_are_refused(tmp_path) -> None:
    code = f"""
import torch, onepass
from torch import nn
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
wrapped = [nn.parallel.DistributedDataParallel(nn.Sequential(nn.LayerNorm(8)))]
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
wrapped.append(fully_shard(nn.Sequential(nn.LayerNorm(8)), mesh=mesh))
wrapped.append(nn.Sequential(fully_shard(nn.Sequential(nn.LayerNorm(8)), mesh=mesh)))
for model in wrapped:
    try:
        onepass.swap(model)
    except ValueError as e:
        print(e)
model = nn.Sequential(nn.LayerNorm(8))
from torch.distributed.tensor import distribute_tensor, Replicate
model[0].weight = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
print(onepass.swap(model).left_alone[0].reason)
swapped = nn.Sequential(nn.LayerNorm(8))
onepass.swap(swapped)
ddp = nn.parallel.DistributedDataParallel(swapped)
ddp(torch.randn(2, 8)).sum().backward()
print(ddp.module[0].weight.grad is not None)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "swap: the model is wrapped in DistributedDataParallel; swap first, then wrap",
        "swap: the model is wrapped in FSDPSequential; swap first, then wrap",
        "swap: 0 is wrapped in FSDPSequential; swap first, then wrap",
        "its weight is of type DTensor",
        "True",
    ]
