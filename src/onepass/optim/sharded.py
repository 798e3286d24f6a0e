"""DTensor parameters: their gradients, the blocks of their int8 momenta, means over all shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from onepass.ops.lion.definition import INT8_BLOCK

_shard = attrgetter("_local_tensor")


def is_sharded(t: Tensor | None) -> bool:
    """Return whether t is a DTensor, sharded or not."""
    return hasattr(t, "to_local")


def local(t: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; other tensors as they are."""
    to_local: Any = getattr(t, "to_local", None)
    if to_local is None:
        return t
    shard = to_local()
    # the result of a collective may still be on its way
    return shard.wait() if hasattr(shard, "wait") else shard  # type: ignore[no-any-return]


def shards(tensors: Iterable[Any]) -> list[Any]:
    """Return this rank's shard of each DTensor, the same object at every call; other tensors and None as they are.

    It reads DTensor's private field: `to_local` takes microseconds, which add up over a model's parameters.
    """
    tensors = list(tensors)
    try:
        local_tensors = list(map(_shard, tensors))
    except AttributeError:
        return [local(t) for t in tensors]
    # the result of a collective may still be on its way
    return local_tensors if {torch.Tensor}.issuperset(map(type, local_tensors)) else [local(t) for t in tensors]


def placed_gradients(groups: Iterable[dict[str, Any]]) -> dict[int, Tensor]:
    """Return {id of the parameter: its gradient, placed like the parameter}.

    A `Partial` gradient is summed over the ranks. All ranks must call this equally often.
    """
    gradients = {}
    for group in groups:
        for p in group["params"]:
            g = p.grad
            if g is not None:
                # most gradients have the parameter's placements themselves, not equal ones
                is_placed = getattr(g, "placements", p) is getattr(p, "placements", g)
                gradients[id(p)] = g if is_placed else _placed(p, g)
    return gradients


def _placed(p: Any, g: Any) -> Tensor:
    if is_sharded(p) != is_sharded(g):
        kinds = ["a DTensor" if is_sharded(t) else "a plain tensor" for t in (p, g)]
        raise ValueError(f"Lion: a parameter is {kinds[0]} and its gradient {kinds[1]}; they must be of one kind")
    if not is_sharded(p) or g.placements == p.placements:
        return g  # type: ignore[no-any-return]
    if g.device_mesh != p.device_mesh:
        raise ValueError(
            f"Lion: a parameter is on the device mesh {p.device_mesh} and its gradient on {g.device_mesh}; "
            "they must share one"
        )
    g = g.redistribute(placements=p.placements)
    # redistribute may leave a shard with gaps, which would take the slow path for odd layouts
    return _from_local(local(g).contiguous(), p, g.shape)


def _from_local(shard: Tensor, p: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the DTensor of this shape whose shards are these, placed like p."""
    from torch.distributed.tensor import DTensor

    # the strides of a contiguous tensor
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def scale_shape(p: Any) -> tuple[int, int] | None:
    """Return the shape (groups of rows, blocks of a group) of the int8 scales of a DTensor.

    A row has one index in the first dimension; a group is the fewest rows that fill whole blocks. None if a shard would
    cut a group or, sharded along the second dimension, a block. Blocks do not depend on the number of ranks then.
    """
    if not p.dim() or not p.numel():
        return None
    inner = math.prod(p.shape[1:])
    height = INT8_BLOCK // math.gcd(inner, INT8_BLOCK)
    if p.shape[0] % height:
        return None
    # a shard holds `size` rows (elements of a row) and `blocks` of the scales' rows (columns): both must end together
    lengths = {0: (p.shape[0], p.shape[0] // height), 1: (inner, inner // INT8_BLOCK)}
    # the pieces of a strided shard lie apart
    strided = any(hasattr(placement, "split_factor") for placement in p.placements)
    for axis, placement in enumerate(p.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        if dim > 1 or (dim == 1 and height > 1):
            return None
        ranks, (size, blocks) = p.device_mesh.size(axis), lengths[dim]
        unit, grain = (height, 1) if dim == 0 else (INT8_BLOCK, inner // p.shape[1])
        shard = -(-size // (grain * ranks)) * grain, -(-blocks // ranks)
        if shard[0] != shard[1] * unit or (strided and shard[0] * ranks != size):
            return None
        lengths[dim] = shard
    return p.shape[0] // height, height * inner // INT8_BLOCK


def zero_scales(p: Any) -> Tensor:
    """Return the int8 scales of a DTensor, placed like it: zeros."""
    shape = scale_shape(p)
    assert shape is not None
    shard, height = local(p), p.shape[0] // shape[0]
    local_shape = shard.shape[0] // height, height * math.prod(shard.shape[1:]) // INT8_BLOCK
    local_scales = torch.zeros(local_shape, dtype=torch.float32, device=shard.device)
    return _from_local(local_scales, p, shape)


def global_mean(p: Any, shard: Tensor) -> Tensor:
    """Return the mean of a tensor of which `shard` is the part of this rank, sharded like p."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    part = torch.stack((shard.sum(dtype=torch.float64), shard.new_full((), shard.numel(), dtype=torch.float64)))
    placements = [Replicate() if placement.is_replicate() else Partial() for placement in p.placements]
    total, count = DTensor.from_local(part, p.device_mesh, placements, run_check=False).full_tensor()
    return (total / count.clamp(min=1)).to(shard.dtype)  # type: ignore[no-any-return]


def whole(t: Any) -> Tensor:
    """Return all of a DTensor, gathered from the ranks; other tensors as they are."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[no-any-return]


def place_like(p: Any, value: Tensor) -> Tensor:
    """Return `value`, loaded for p, as a DTensor placed like p if p is one; a plain value is the whole tensor."""
    if not is_sharded(p) or getattr(value, "placements", None) == p.placements:
        return value
    if is_sharded(value):
        return value.redistribute(placements=p.placements)  # type: ignore[attr-defined, no-any-return]
    from torch.distributed.tensor import distribute_tensor

    # every rank has loaded the value, so no rank needs to send it
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
