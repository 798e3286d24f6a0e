"""Routed layers of DTensors whose rows are whole on each device."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .over_sequence import named, opened, parameters, uncompiled
from .padding import check_mask


def takes_whole_rows(layer: nn.Module, x: Tensor) -> bool:
    """Return whether x is a DTensor and no hook inside makes DTensors again, as those of tensor parallelism do."""
    # without an import of torch.distributed
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(x, tensors.DTensor):
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules() if m is not layer)


@uncompiled
def whole_rows(kind: Any, layer: nn.Module, x: Any, mask: Any, return_routing: bool) -> Any:
    """Return kind.forward(layer, x, mask) for a DTensor x (batch, n, dim): each device computes the rows that it has.

    Other placements than Replicate and those of the batch are redistributed, as for torch's own operators.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    name, mesh, batch = type(layer).__name__, x.device_mesh, x.shape[0]
    placements = tuple(p if type(p) is Shard and p.dim == 0 else Replicate() for p in x.placements)
    if mask is not None and not isinstance(mask, DTensor):
        raise TypeError(f"{name}: mask must be a DTensor beside a DTensor x; use distribute_tensor")
    check_mask(name, x, mask)
    tokens = x.redistribute(placements=placements).to_local(grad_placements=placements)
    real = None if mask is None else mask.redistribute(placements=placements).to_local()
    here = tokens.shape[0]
    if not here:
        # a row of zeros, so that all devices have gradients of the same weights
        tokens = F.pad(tokens, (0, 0, 0, 0, 0, 1))
        real = None if real is None else F.pad(real, (0, 0, 0, 1))
    weights = opened(name, mesh, placements, parameters(layer))
    plain = {f"layer.{n}": weights.get(id(p), p) for n, p in named(layer)}

    def leave(found: Any) -> Any:
        if not isinstance(found, Tensor):
            return found._make(map(leave, found))
        found = found[:here].contiguous()
        shape = torch.Size((batch, *found.shape[1:]))
        return DTensor.from_local(found, mesh, placements, run_check=False, shape=shape, stride=found.stride())

    y, routing = functional_call(_Forward(kind, layer), plain, (tokens, real))
    return (leave(y), leave(routing)) if return_routing else leave(y)


class _Forward(nn.Module):
    """The forward of a layer's class: its hooks, and the forward of a subclass, have seen DTensors already."""

    def __init__(self, kind: Any, layer: nn.Module) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        return self.kind.forward(self.layer, x, mask, return_routing=True)
