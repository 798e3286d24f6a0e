"""A routed layer over a sequence that is spread over devices: tokens stay where they are, only scores travel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onepass.ops.routing.op import gather, scatter_add

from .explore import explore_part
from .router import Router, RouterOutput

if TYPE_CHECKING:
    from .routed import Routed


def sequence_axis(x: Tensor) -> int | None:
    """Return the axis of the mesh along which the tokens (batch, n, dim) are spread; None: not, or along several."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(x, tensors.DTensor) or x.dim() != 3:
        return None
    # a plain Shard: strided shards of torch are other classes
    axes = [i for i, p in enumerate(x.placements) if type(p) is tensors.Shard and p.dim == 1]
    known = all(type(p) in (tensors.Shard, tensors.Replicate) and not p.is_shard(2) for p in x.placements)
    return axes[0] if len(axes) == 1 and known else None


def routed_over_sequence(layer: Routed, x: Any, k: int, mask: Any, axis: int) -> tuple[Tensor, RouterOutput]:
    """Return what `Routed` returns for a DTensor x (batch, n, dim) whose tokens are spread along one axis of its mesh.

    The scores are gathered, 4 bytes a token, and every device chooses from the whole row. The heavy branch then runs
    where the chosen tokens are, on as many as the row with the most of them has there. The host reads that number.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = x.device_mesh, x.placements
    tokens = x.to_local(grad_placements=placements)
    here, n = tokens.shape[1], x.shape[1]
    begin = _begin(n, mesh.size(axis), mesh.get_local_rank(axis), here)
    routing: RouterOutput = layer.router(x, k, mask)
    everywhere = [Replicate() if i == axis else p for i, p in enumerate(placements)]
    # each device has its own part of a gradient of what all of them read
    of_gates = [Partial() if i == axis else p for i, p in enumerate(placements)]
    of_weights = [Partial() if p.is_shard() else p for p in placements]

    def local(parameter: Any) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
        return whole.to_local(grad_placements=of_weights)  # type: ignore[no-any-return]

    def run(branch: nn.Module, tokens: Tensor) -> Tensor:
        return functional_call(branch, {n: local(p) for n, p in branch.named_parameters()}, (tokens,))  # type: ignore[no-any-return]

    y = run(layer.light, tokens)
    layer.same_shape("light", y, tokens.shape)
    if routing.indices.shape[-1]:
        indices = routing.indices.redistribute(placements=everywhere).to_local() - begin  # type: ignore[attr-defined]
        gates = routing.gates.redistribute(placements=everywhere).to_local(grad_placements=of_gates)  # type: ignore[attr-defined]
        indices, gates = _own(indices, gates, here)
        chosen = gather(tokens, indices).flatten(1, -2)
        update = run(layer.heavy, chosen)
        layer.same_shape("heavy", update, chosen.shape)
        y = scatter_add(y, update.reshape(*indices.shape, tokens.shape[-1]), gates, indices)
    router = layer.router
    if isinstance(router, Router) and router.explores(k, n) and y.requires_grad:
        real = None if mask is None else mask.redistribute(placements=placements).to_local()
        y = explore_part(y, tokens, router, local(router.weight), n // k, real, begin, mesh.get_group(axis))
    shape, strides = x.shape, (n * x.shape[2], x.shape[2], 1)
    return DTensor.from_local(y, mesh, placements, run_check=False, shape=shape, stride=strides), routing


def _begin(n: int, devices: int, rank: int, here: int) -> int:
    """Return the place in the row of a device's first token."""
    size = -(-n // devices)
    begin = min(rank * size, n)
    if here != min(size, n - begin):
        raise ValueError(
            f"Routed: of {n} tokens over {devices} devices number {rank} must have {min(size, n - begin)}, as "
            f"distribute_tensor places them; it has {here}"
        )
    return begin


def _own(indices: Tensor, gates: Tensor, here: int) -> tuple[Tensor, Tensor]:
    """Return the indices from 0 to `here` and their gates, in their order; index −1 and gate 0 pad shorter rows."""
    own = (indices >= 0) & (indices < here)
    most = int(own.sum(-1).max()) if own.numel() else 0
    first = own.logical_not().sort(dim=-1, stable=True).indices[..., :most]
    own = own.gather(-1, first)
    return torch.where(own, indices.gather(-1, first), -1), torch.where(own, gates.gather(-1, first), 0)


__all__ = ["routed_over_sequence", "sequence_axis"]
