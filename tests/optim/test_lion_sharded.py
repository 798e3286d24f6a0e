"""Lion on DTensor parameters of one process: shards are updated. tests/sharded has several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onepass.optim import Lion

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_updated(mesh: object, dtype: torch.dtype) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plain = torch.randn(6, 4).to(dtype).requires_grad_()
    sharded = distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]).requires_grad_()  # type: ignore[arg-type]
    a, b = Lion([plain], lr=1e-2, weight_decay=0.1), Lion([sharded], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        plain.grad = torch.randn(6, 4).to(dtype)
        sharded.grad = distribute_tensor(plain.grad.clone(), mesh, [Shard(0)])  # type: ignore[arg-type]
        a.step()
        b.step()
    assert torch.equal(sharded.full_tensor(), plain)
    assert b.state[sharded]["exp_avg"].placements == (Shard(0),)
    plain.grad = torch.ones(6, 4, dtype=dtype)
    sharded.grad = distribute_tensor(plain.grad.clone(), mesh, [Replicate()])  # type: ignore[arg-type]
    a.step()
    b.step()
    assert torch.equal(sharded.full_tensor(), plain)


def test_a_state_placed_otherwise_is_refused(mesh: object) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    p = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]).requires_grad_()  # type: ignore[arg-type]
    optimizer = Lion([p])
    p.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])  # type: ignore[arg-type]
    optimizer.step()
    optimizer.state[p]["exp_avg"] = distribute_tensor(torch.ones(6, 4), mesh, [Replicate()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="equal placements"):
        optimizer.step()
