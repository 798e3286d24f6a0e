"""Routed modules built on the meta device, sharded by FSDP2, materialised and reset."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onepass.nn as onn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_is_left_uninitialised(tmp_path: Path, causal: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(
            onn.RoutedBlock(16, 4, heads=2, dim_head=8, causal=causal), onn.RMSNorm(16), onn.WeightedSum(16, 2)
        )
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, float("nan"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has no random tracker for a mesh of CPUs
            for m in model.modules():
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()
        assert [name for name, p in model.named_parameters() if p.full_tensor().isnan().any()] == []
        null = model[0].attention.null.full_tensor()
        assert torch.equal(null, torch.zeros(16))
    finally:
        dist.destroy_process_group()
