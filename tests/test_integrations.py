"""Other libraries' training loops around ours: accelerate and DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onepass
from onepass.optim import Lion
from sharded.processes import run


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    model = _model()
    assert len(onepass.swap(model).exchanged) == 1
    optimizer = Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4))

    def epoch() -> None:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x.sum(-1, keepdim=True)).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    epoch()
    accelerator.save_state(str(tmp_path))
    epoch()
    through = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.load_state(str(tmp_path))
    epoch()
    assert all(torch.equal(value, through[name]) for name, value in model.state_dict().items())

    # the same by hand, without the library
    plain = _model()
    onepass.swap(plain)
    lion = Lion(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        for first in range(0, 32, 8):
            for half in (first, first + 4):
                x = data.tensors[0][half : half + 4]
                ((plain(x) - x.sum(-1, keepdim=True)).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            lion.step()
            lion.zero_grad()
    assert all(torch.equal(value, through[name]) for name, value in plain.state_dict().items())


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_ddp() -> None:
    run("data_parallel.py", 2)
