"""Lion on DTensors against Lion on whole tensors: bit for bit, in every state, through checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from onepass.optim import Lion, clip_grad_norm
from onepass.optim.sharded import placed_gradients
from onepass.optim.state import gatherable
from sharded.compare import Placements, R, case, many, mesh, whole
from sharded.processes import device_type

# uneven shards, an empty one, rows of no whole number of blocks, and a vector too small for int8
SHAPES = [(48, 256), (33, 256), (1, 5120), (128, 128), (8192,), (20, 96, 9), (5, 7), (3,)]
STATES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "remainder": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "state_dtype": "int8"},
    "int8 remainder": {"dtype": torch.bfloat16, "state_dtype": "int8"},
    "wide momentum": {"dtype": torch.bfloat16, "state_dtype": torch.float32},
    "cautious": {"dtype": torch.float32, "cautious": True},
    "half cautious": {"dtype": torch.bfloat16, "cautious": 0.25, "cautious_weight_decay": True},
    "tensor by tensor": {"dtype": torch.float32, "foreach": False},
}


def fits(shape: tuple[int, ...], placements: Placements) -> list[Placement]:
    """Return the placements with those beyond the dimensions of the shape replaced."""
    return [p if getattr(p, "dim", 0) < len(shape) else R for p in placements]


class Model(nn.Module):
    """Parameters of all shapes; whole without a mesh."""

    def __init__(self, dtype: torch.dtype, on: DeviceMesh | None = None, placements: Placements = ()) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for i, shape in enumerate(SHAPES):
            t = torch.randn(shape, generator=random).to(device_type(), dtype)
            if on is not None:
                t = distribute_tensor(t, on, fits(shape, placements), src_data_rank=None)
            self.register_parameter(f"p{i}", nn.Parameter(t))

    def gradients(self, step: int, placements: Placements | None = None) -> None:
        """Set gradients that depend on the step alone; by default placed like the parameters."""
        random = torch.Generator().manual_seed(100 + step)
        for p in self.parameters():
            g = torch.randn(p.shape, generator=random).to(p.device, p.dtype)
            if isinstance(p, DTensor):
                where = fits(tuple(p.shape), placements) if placements is not None else p.placements
                if any(isinstance(q, Partial) for q in where):
                    # a sum of two powers of two times g is exact
                    g = DTensor.from_local(g / p.device_mesh.size(), p.device_mesh, where, run_check=False)
                else:
                    g = distribute_tensor(g, p.device_mesh, where, src_data_rank=None)
            p.grad = g


def make(state: str, on: DeviceMesh | None = None, placements: Placements = ()) -> tuple[Model, Lion]:
    """Return a model and its optimizer: whole, placed on a mesh, or there, without placements, in shards of FSDP2."""
    options = dict(STATES[state])
    model = Model(options.pop("dtype"), on if placements else None, placements)
    if on is not None and not placements:
        fully_shard(model, mesh=on)
    return model, Lion(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def train(model: Model, optimizer: Lion, steps: range, placements: Placements | None = None) -> None:
    for step in steps:
        model.gradients(step, placements)
        optimizer.step()


Trained = tuple[Model, Lion]


def check_equal(a: Trained, b: Trained) -> None:
    """Compare parameters bit for bit, but for those whose momentum is int8 in one alone: its blocks cross shards."""
    for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True):
        alike = a[1].state[x]["exp_avg"].dtype == b[1].state[y]["exp_avg"].dtype
        assert alike or any(d == torch.int8 for d in (a[1].state[x]["exp_avg"].dtype, b[1].state[y]["exp_avg"].dtype))
        if x.is_cuda and a[1].defaults["cautious"]:
            # the kernel of one device divides by the mean in another way
            torch.testing.assert_close(whole(y), whole(x))
        else:
            assert not alike or torch.equal(whole(x), whole(y)), tuple(x.shape)


def check_states(whole_one: Lion, sharded: Lion) -> None:
    for s, t in zip(whole_one.state.values(), sharded.state.values(), strict=True):
        if s["exp_avg"].dtype != t["exp_avg"].dtype:
            continue  # blocks that would cross shards: a momentum without codes
        assert s.keys() == t.keys()
        for key, value in gatherable(t).items():
            assert torch.equal(whole(value).reshape(s[key].shape).to(s[key].dtype), s[key]), key


# how parameters are placed, on a mesh of one dimension or two, and how their gradients are
WHERE: dict[str, tuple[Placements, Placements | None]] = {
    "0": ([Shard(0)], None), "1": ([Shard(1)], None), "whole": ([R], None),
    "0, a sum": ([Shard(0)], [Partial()]), "0, whole": ([Shard(0)], [R]), "0, 1": ([Shard(0)], [Shard(1)]),
    "whole, a sum": ([R], [Partial()]), "whole, 1": ([R], [Shard(1)]), "whole, 0": ([R], [Shard(0)]),
    "0 and 1": ([Shard(0), Shard(1)], None), "0 and whole": ([Shard(0), R], None),
    "whole and 0": ([R, Shard(0)], None), "0 and 0": ([Shard(0), Shard(0)], None), "fully_shard": ([], None),
}  # fmt: skip


@many("steps", {"state": [*STATES], "where": [*WHERE]})
def _(state: str, where: str) -> None:
    placements, gradients = WHERE[where]
    on = mesh(2, dist.get_world_size() // 2) if len(placements) == 2 else mesh()
    a, b = make(state), make(state, on, placements)
    train(*a, range(3))
    train(*b, range(3), gradients)
    check_equal(a, b)
    if not (device_type() == "cuda" and a[1].defaults["cautious"]):
        check_states(a[1], b[1])


@case("int8 is int8")
def _() -> None:
    model, optimizer = make("int8", mesh(), [Shard(0)])
    train(model, optimizer, range(1))
    kinds = [optimizer.state[p]["exp_avg"].dtype == torch.int8 for p in model.parameters()]
    two = dist.get_world_size() == 2
    # 20 rows of 864 elements: 8 rows fill 27 blocks, and 20 rows are no whole number of them
    assert kinds[:5] == [True, True, True, True, True] if two else all(kinds[:4])
    assert not any(kinds[5:])
    for p, coded in zip(model.parameters(), kinds, strict=True):
        if coded:
            state = optimizer.state[p]
            assert state["exp_avg"].to_local().numel() == 256 * state["exp_avg_scale"].to_local().numel()


@case("clipping of partial gradients")
def _() -> None:
    a, b = make("fp32"), make("fp32", mesh(), [Shard(0)])
    for model, optimizer, where in ((*a, None), (*b, [Partial()])):
        model.gradients(0, where)
        norm = clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        expected = torch.linalg.vector_norm(torch.cat([whole(p.grad).flatten() for p in model.parameters()]))
        torch.testing.assert_close(norm, expected)
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        torch.testing.assert_close(whole(p), whole(q))


@case("a plain gradient of a sharded parameter is refused")
def _() -> None:
    class Odd:
        grad = torch.ones(4, 4)
        to_local = placements = None

    # torch itself refuses to set such a gradient, but some wrappers give one
    with pytest.raises(ValueError, match="a DTensor and its gradient a plain tensor"):
        placed_gradients([{"params": [Odd()]}])


@case("a state placed otherwise is refused")
def _() -> None:
    model, optimizer = make("fp32", mesh(), [Shard(0)])
    train(model, optimizer, range(1))
    p = model.get_parameter("p0")
    optimizer.state[p]["exp_avg"] = distribute_tensor(whole(p), mesh(), [R])
    with pytest.raises(ValueError, match="equal placements"):
        train(model, optimizer, range(1, 2))


def saved(model: Model, optimizer: Lion, name: str) -> str:
    p, s = get_state_dict(model, optimizer)
    # the folder of the group's store, the same on all ranks
    dcp.save({"p": p, "s": s}, checkpoint_id=(path := str(Path(sys.argv[1], name))))
    return path


def load(model: Model, optimizer: Lion, path: str, *, alone: bool = False) -> None:
    p, s = get_state_dict(model, optimizer)
    state = {"p": p, "s": s}
    dcp.load(state, checkpoint_id=path, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=state["p"], optim_state_dict=state["s"])


@many("checkpoint on other ranks", {"state": ["fp32", "int8 remainder", "half cautious"]})
def _(state: str) -> None:
    a = make(state, mesh(), [Shard(0)])
    train(*a, range(3))
    path = saved(*a, f"dcp-{state}")
    train(*a, range(3, 5))
    alone = mesh(dist.get_world_size(), 1)["b"]
    fewer: list[tuple[DeviceMesh, list[Placement]]] = [(alone, [Shard(0)]), (mesh(), [Shard(0)])]
    if dist.get_world_size() == 4:
        fewer.append((mesh(2, 2)["b"], [Shard(0)]))
    if "int8" not in state:
        fewer.append((mesh(), [Shard(1)]))
    for i, (on, placements) in enumerate(fewer):
        b = make(state, on, placements)
        load(*b, path, alone=i == 0)
        train(*b, range(3, 5))
        check_equal(a, b)


@case("a checkpoint of whole tensors, whose remainders are int16, on shards")
def _() -> None:
    a, b = make("remainder"), make("remainder", mesh(), [Shard(0)])
    train(*a, range(3))
    path = saved(*a, "whole")
    train(*a, range(3, 5))
    load(*b, path)
    train(*b, range(3, 5))
    check_equal(a, b)


@many("full state dict", {"state": ["int8", "int8 remainder", "wide momentum"]})
def _(state: str) -> None:
    a = make(state, mesh(), [Shard(0)])
    train(*a, range(3))
    p, s = get_state_dict(*a, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    box = [(p, s)]
    dist.broadcast_object_list(box, src=0)
    p, s = box[0]
    train(*a, range(3, 5))
    # whole tensors, and shards again
    for b in (make(state), make(state, mesh(), [Shard(0)])):
        # a whole momentum is int8 where its shards were not
        set_state_dict(*b, model_state_dict=p, optim_state_dict=s, options=StateDictOptions(full_state_dict=True))
        train(*b, range(3, 5))
        check_equal(a, b)


@many("an older state: int16 remainders, codes of whole tensors", {"state": ["remainder", "int8 remainder"]})
def _(state: str) -> None:
    a = make(state)
    train(*a, range(3))
    old = a[1].state_dict()
    assert all(s["remainder"].dtype == torch.int16 for s in old["state"].values())
    b = make(state, mesh(), [Shard(0)])
    for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True):
        y.data.copy_(distribute_tensor(x.detach(), mesh(), [Shard(0)], src_data_rank=None))
    b[1].load_state_dict(old)
    train(*a, range(3, 5))
    train(*b, range(3, 5))
    check_equal(a, b)
