"""Layers of DTensors whose rows are whole on each device."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .over_sequence import named, opened, parameters, uncompiled
from .padding import check_mask


def takes_whole_rows(layer: nn.Module, *tokens: Any) -> bool:
    """Return whether tokens are DTensors and no hook inside makes DTensors again, as those of tensor parallelism do.

    Raises:
        ValueError: hooks inside would meet what torch's operators on DTensors do not take.
    """
    # without an import of torch.distributed
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    placed = [] if tensors is None else [x for x in tokens if isinstance(x, tensors.DTensor)]
    if not placed:
        return False
    if not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules() if m is not layer):
        return True
    x = placed[0]
    devices = math.prod(x.device_mesh.size(i) for i, p in enumerate(x.placements) if p.is_shard(0))
    if len(x) % devices or not all(isinstance(p, tensors.DTensor) for p in parameters(layer)):
        raise ValueError(
            f"{type(layer).__name__}: with hooks inside, which see DTensors, all weights must be DTensors "
            f"(distribute_module) and the devices must divide the rows; got {len(x)} rows on {devices} devices"
        )
    return False


@uncompiled
def whole_rows(kind: Any, layer: nn.Module, *given: Any, **options: Any) -> Any:
    """Return kind.forward(layer, *given, **options) for DTensors: each device computes the rows that it has.

    The first half of `given` are tokens (batch, n, dim), the second their masks. Other placements than Replicate and
    those of the batch are redistributed, as for torch's own operators.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    name, half = type(layer).__name__, len(given) // 2
    keys = ("x", "mask") if half == 1 else ("x", "context", "mask", "context_mask")
    for key, t in zip(keys, given, strict=True):
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(f"{name}: {key} must be a DTensor, as the other tensors are; use distribute_tensor")
    for t, mask, key in zip(given[:half], given[half:], keys[half:], strict=True):
        check_mask(name, t, mask, key)
    x = given[0]
    mesh, batch = x.device_mesh, x.shape[0]
    placements = tuple(p if type(p) is Shard and p.dim == 0 else Replicate() for p in x.placements)
    parts: list[Any] = [
        None if t is None else t.redistribute(placements=placements).to_local(grad_placements=placements) for t in given
    ]
    here = parts[0].shape[0]
    if not here:
        # a row of zeros, so that all devices have gradients of the same weights
        parts = [None if t is None else F.pad(t, (0, 0) * (t.dim() - 1) + (0, 1)) for t in parts]
    weights = opened(name, mesh, placements, parameters(layer))
    plain = {f"layer.{n}": weights.get(id(p), p) for n, p in named(layer)}

    def leave(found: Any) -> Any:
        if not isinstance(found, Tensor):
            return getattr(found, "_make", tuple)(map(leave, found))
        found = found[:here].contiguous()
        shape = torch.Size((batch, *found.shape[1:]))
        return DTensor.from_local(found, mesh, placements, run_check=False, shape=shape, stride=found.stride())

    return leave(functional_call(_Forward(kind, layer), plain, tuple(parts), options))


class _Forward(nn.Module):
    """The forward of a layer's class: its hooks, and the forward of a subclass, have seen DTensors already."""

    def __init__(self, kind: Any, layer: nn.Module) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.kind.forward(self.layer, *args, **options)
