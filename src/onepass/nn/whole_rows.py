"""Layers called with DTensors of whole rows: each device computes its own rows on plain tensors."""

from __future__ import annotations

import math
import sys
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .packed import check_mask


def takes_whole_rows(layer: nn.Module, *tokens: Any) -> bool:
    """Return whether tokens are DTensors and no module inside has hooks, which (in tensor parallelism) need DTensors.

    Raises:
        ValueError: tokens are sharded within rows, or with hooks inside, torch's operators would fail on DTensors: a
            weight is plain, or the devices do not divide the rows.
    """
    # the module is looked up, not imported, which takes time: until somebody imports it, there are no DTensors
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    placed = [] if tensors is None else [x for x in tokens if isinstance(x, tensors.DTensor)]
    if not placed:
        return False
    for x in placed:
        if any(getattr(p, "dim", None) == 1 for p in x.placements):
            raise ValueError(
                f"{type(layer).__name__}: rows must be whole on a device, got {tuple(x.shape)} on {x.placements}; "
                "write distribute_tensor(x, mesh, [Shard(0)]), or x.redistribute(placements=[Replicate()])"
            )
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


def whole_rows(kind: Any, layer: nn.Module, *args: Any, **options: Any) -> Any:
    """Return kind.forward(layer, *args, **options) for DTensors: each device computes its own rows.

    The first half of `args` are tokens (batch, n, dim), the second their masks. Other placements than Replicate and
    those of the batch are redistributed, as for torch's own operators.
    """
    if torch.compiler.is_compiling():
        # dynamo would trace collectives for a minute, or fail
        return torch.compiler.disable(_whole_rows)(kind, layer, *args, **options)  # type: ignore[no-untyped-call]
    return _whole_rows(kind, layer, *args, **options)


def _whole_rows(kind: Any, layer: nn.Module, *args: Any, **options: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    name, half = type(layer).__name__, len(args) // 2
    keys = ("x", "mask") if half == 1 else ("x", "context", "mask", "context_mask")
    for key, t in zip(keys, args, strict=True):
        if t is not None and not isinstance(t, DTensor):
            raise TypeError(f"{name}: {key} must be a DTensor, as the other tensors are; use distribute_tensor")
    for t, mask, key in zip(args[:half], args[half:], keys[half:], strict=True):
        check_mask(name, t, mask, key)
    x = args[0]
    mesh, batch = x.device_mesh, x.shape[0]
    placements = tuple(p if type(p) is Shard and p.dim == 0 else Replicate() for p in x.placements)
    parts: list[Any] = [
        None if t is None else t.redistribute(placements=placements).to_local(grad_placements=placements) for t in args
    ]
    local_rows = parts[0].shape[0]
    if not local_rows:
        # a device without rows computes one of zeros, so that all devices have gradients of the same weights
        parts = [None if t is None else F.pad(t, (0, 0) * (t.dim() - 1) + (0, 1)) for t in parts]
    weights = opened(name, mesh, placements, parameters(layer))
    named = *layer.named_parameters(), *layer.named_buffers()
    plain = {f"layer.{n}": weights.get(id(p), p) for n, p in named}

    def leave(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return getattr(result, "_make", tuple)(map(leave, result))
        result = result[:local_rows].contiguous()
        shape = torch.Size((batch, *result.shape[1:]))
        return DTensor.from_local(result, mesh, placements, run_check=False, shape=shape, stride=result.stride())

    return leave(functional_call(_Forward(kind, layer), plain, (), {**dict(zip(keys, parts, strict=True)), **options}))


class _Forward(nn.Module):
    """Calls ``kind.forward``: the layer's hooks, and a subclass's forward, have run on the DTensors already."""

    def __init__(self, kind: Any, layer: nn.Module) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer

    def forward(self, **inputs: Any) -> Any:
        return self.kind.forward(self.layer, **inputs)


def opened(name: str, mesh: Any, placements: Any, weights: list[Any]) -> dict[int, Tensor]:
    """Return DTensor weights as plain tensors, by id; one all-reduce sums their gradients over all devices' rows."""
    from torch.distributed.tensor import DTensor

    local_weights: dict[int, Tensor] = {}
    trained = {}
    for p in (p for p in weights if isinstance(p, DTensor)):
        if p.device_mesh != mesh:
            raise ValueError(f"{name}: weights are on {p.device_mesh} but x is on {mesh}; use one mesh")
        if p.requires_grad and torch.is_grad_enabled():
            trained[id(p)] = p
        else:
            local_weights[id(p)] = _local(_whole(p))
    if trained:
        groups = [mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard()]
        plain = _Opened.apply(groups, *trained.values())  # type: ignore[no-untyped-call]
        local_weights.update(zip(trained, plain, strict=True))
    return local_weights


def parameters(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, shared ones repeatedly: `module.parameters()` takes five times as long."""
    inner = (p for m in module._modules.values() if m is not None for p in parameters(m))
    return [p for p in (*module._parameters.values(), *module._buffers.values(), *inner) if p is not None]


def _whole(p: Any) -> Any:
    """Return a parameter as every device has it."""
    from torch.distributed.tensor import Replicate

    replicated = all(q.is_replicate() for q in p.placements)
    return p if replicated else p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)


def _local(t: Any) -> Tensor:
    # `to_local` would make a view; the result of a collective may still be on its way
    part = t._local_tensor
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]


class _Opened(torch.autograd.Function):
    """Whole weights as plain tensors; their gradients are summed by one all-reduce."""

    @staticmethod
    def forward(ctx: Any, groups: list[Any], *weights: Any) -> tuple[Tensor, ...]:
        whole = [_whole(w) for w in weights]
        ctx.groups, ctx.specs, ctx.placements = groups, [w._spec for w in whole], [w.placements for w in weights]
        ctx.set_materialize_grads(False)
        # aliases, because autograd marks the tensors that a Function returns
        return tuple(_local(w).detach() for w in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor

        # `from_local` takes four times as long, for each weight; typed since torch 2.14
        make: Any = DTensor
        gradients = [
            None if g is None else make(g, copy(spec), requires_grad=False)
            for g, spec in zip(total(grads, ctx.groups), ctx.specs, strict=True)
        ]
        return None, *(
            g if g is None or g.placements == placed else g.redistribute(placements=placed)
            for g, placed in zip(gradients, ctx.placements, strict=True)
        )


def total(grads: tuple[Tensor | None, ...], groups: list[Any]) -> list[Tensor | None]:
    """Return the sums of tensors over the devices of the groups: one all-reduce for each dtype and group."""
    import torch.distributed as dist

    out: list[Tensor | None] = [None] * len(grads)
    for dtype in {g.dtype: None for g in grads if g is not None}:
        # each tensor begins at a multiple of 128 bytes, so that kernels load whole vectors
        grain = 128 // dtype.itemsize
        pairs = [(i, g) for i, g in enumerate(grads) if g is not None and g.dtype == dtype]
        sizes = [size for _, g in pairs for size in (g.numel(), -g.numel() % grain)]
        flat = pairs[0][1].new_zeros(sum(sizes))
        pieces: Any = torch.split_with_sizes(flat, sizes)
        views = [t if g.dim() == 1 else t.view(g.shape) for t, (_, g) in zip(pieces[::2], pairs, strict=True)]
        torch._foreach_copy_(views, [g for _, g in pairs])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for (i, _), t in zip(pairs, views, strict=True):
            out[i] = t
    return out
