"""Routed layers over a sequence that is spread over devices: scores travel, and tokens only to balance the work.

Everything here runs on plain tensors, the part of each device; scores and choices alone are DTensors.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onepass.ops.routing.op import gather, scatter_add

from .explore import explore_part
from .router import Router, RouterOutput, asked

if TYPE_CHECKING:
    from .attention import AttentionRouting, RoutedAttention
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


class Part:
    """One device's tokens of a DTensor (batch, n, dim) that is spread along an axis of its mesh, and what it needs."""

    def __init__(self, x: Any, axis: int) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        self._dtensor = DTensor
        self.mesh, self.placements, self.axis = x.device_mesh, x.placements, axis
        self.shape, self.n = x.shape, x.shape[1]
        self.tokens: Tensor = x.to_local(grad_placements=x.placements)
        self.here = self.tokens.shape[1]
        self.group, self.rank = self.mesh.get_group(axis), self.mesh.get_local_rank(axis)
        self.ranges = parts(self.n, self.mesh.size(axis))
        self.begin, end = self.ranges[self.rank]
        if end - self.begin != self.here:
            raise ValueError(
                f"of {self.n} tokens over {len(self.ranges)} devices number {self.rank} must have "
                f"{end - self.begin}, as distribute_tensor places them; it has {self.here}"
            )
        self.everywhere = [Replicate() if i == axis else p for i, p in enumerate(self.placements)]
        # each device has its own part of a gradient of what all of them read
        self._of_choices = [Partial() if i == axis else p for i, p in enumerate(self.placements)]
        self._of_weights = [Partial() if p.is_shard() else p for p in self.placements]
        self._whole = [Replicate()] * self.mesh.ndim

    def weight(self, parameter: Any) -> Tensor:
        """Return a whole parameter; its gradient is this device's part of a sum.

        A plain one is whole already, and whoever handed it here adds the parts up, as FSDP2 and DDP do.
        """
        if not isinstance(parameter, self._dtensor):
            return parameter  # type: ignore[no-any-return]
        return parameter.redistribute(placements=self._whole).to_local(grad_placements=self._of_weights)  # type: ignore[no-any-return]

    def run(self, module: nn.Module, *args: Any) -> Tensor:
        """Return module(*args) with whole parameters."""
        return functional_call(module, {n: self.weight(p) for n, p in module.named_parameters()}, args)  # type: ignore[no-any-return]

    def over_tokens(self, router: nn.Module, *args: Any) -> Any:
        """Return router(*args) for DTensor tokens, which a router's plain parameters could not meet."""
        beside = {n: self._beside(p) for n, p in router.named_parameters() if not isinstance(p, self._dtensor)}
        return functional_call(router, beside, args) if beside else router(*args)

    def _beside(self, parameter: Tensor) -> Tensor:
        return _Beside.apply(parameter, self.mesh, self._whole)  # type: ignore[no-any-return, no-untyped-call]

    def choice(self, t: Any) -> Tensor:
        """Return whole rows of indices, gates or scores; a router that reads no tokens has them already."""
        if not isinstance(t, self._dtensor):
            return t  # type: ignore[no-any-return]
        whole = t.redistribute(placements=self.everywhere)
        return whole.to_local(grad_placements=self._of_choices) if t.is_floating_point() else whole.to_local()  # type: ignore[no-any-return]

    def everyone(self, t: Tensor) -> Tensor:
        """Return whole rows, which each device has, as a DTensor."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((self.shape[0], *t.shape[1:]))
        t = t.contiguous()
        return DTensor.from_local(
            t, self.mesh, self.everywhere, run_check=False, shape=shape, stride=t.stride()
        )  # fmt: skip

    def own(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens among indices (…, k) that are here, as few as the row with the most of them allows.

        Returns:
            Their places among the tokens of this device (−1: none), which of the k they are, and which exist.
        """
        places = indices - self.begin
        own = (places >= 0) & (places < self.here)
        most = int(own.sum(-1).max()) if own.numel() else 0
        slots = own.logical_not().sort(dim=-1, stable=True).indices[..., :most]
        own = own.gather(-1, slots)
        return torch.where(own, places.gather(-1, slots), -1), slots, own

    def counts(self, indices: Tensor) -> Tensor:
        """Return how many of the tokens among indices (…, k) each device has."""
        size = -(-self.n // len(self.ranges))
        edges = (size * torch.arange(len(self.ranges) + 1, device=indices.device)).clamp_max(self.n)
        return torch.searchsorted(indices.flatten().sort().values, edges).diff()

    def explored(self, y: Tensor, router: nn.Module, k: int | float, mask: Any) -> Tensor:
        """Return y, whose backward also gives the router a gradient from tokens that were not chosen."""
        stride = router.explore_stride(k, self.n) if isinstance(router, Router) and y.requires_grad else 0
        if not (isinstance(router, Router) and stride):
            return y
        real = None if mask is None else mask.redistribute(placements=self.placements).to_local()
        weight = self.weight(router.weight)
        return explore_part(y, self.tokens, router, weight, stride, real, self.begin, self.group)

    def spread(self, y: Tensor) -> Tensor:
        """Return the DTensor of which y is this device's part."""
        from torch.distributed.tensor import DTensor

        strides = (self.n * self.shape[2], self.shape[2], 1)
        return DTensor.from_local(
            y, self.mesh, self.placements, run_check=False, shape=self.shape, stride=strides
        )  # fmt: skip


class _Beside(torch.autograd.Function):
    """A plain parameter as a DTensor; its gradient is this device's part of a sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, mesh: Any, placements: list[Any]) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(parameter, mesh, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        # along other axes than those of the sum, each device has the whole gradient
        same = math.prod(grad.device_mesh.size(i) for i, p in enumerate(grad.placements) if p.is_replicate())
        return grad.to_local() / same, None, None


class _Scores(nn.Module):
    """The scores of a router, as a module."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        return self.router.scores(x)


def parts(n: int, devices: int) -> list[tuple[int, int]]:
    """Return where the tokens of each device begin and end, as distribute_tensor places them."""
    size = -(-n // devices)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(devices)]


def routed_over_sequence(layer: Routed, x: Any, k: int | float, mask: Any, axis: int) -> tuple[Tensor, RouterOutput]:
    """Return what `Routed` returns for a DTensor x whose tokens are spread along one axis of its mesh.

    The scores are gathered, 4 bytes a token, and every device chooses from the whole row. The heavy branch then runs
    where the chosen tokens are, on as many as the row with the most of them has there, or, with `balance`, in even
    parts. The host reads that number, and with `balance` how many tokens each device has.
    """

    def heavy(tokens: Tensor) -> Tensor:
        update = part.run(layer.heavy, tokens)
        layer.same_shape("heavy", update, tokens.shape)
        return update

    part = Part(x, axis)
    routing: RouterOutput = part.over_tokens(layer.router, x, k, mask)
    y = part.run(layer.light, part.tokens)
    layer.same_shape("light", y, part.tokens.shape)
    if routing.indices.shape[-1]:
        indices = part.choice(routing.indices)
        # before the host waits in `own`: then it waits once
        counts = part.counts(indices) if layer.balance else None
        places, slots, own = part.own(indices)
        chosen = gather(part.tokens, places)
        if counts is None:
            update = heavy(chosen.flatten(1, -2)).reshape(chosen.shape)
        else:
            from .balance import evenly

            update = evenly(heavy, chosen, own, counts, part.rank, part.group)
        gates = torch.where(own, part.choice(routing.gates).gather(-1, slots), 0)
        y = scatter_add(y, update, gates, places)
    return part.spread(part.explored(y, layer.router, k, mask)), routing


def attention_over_sequence(
    layer: RoutedAttention, x: Any, mask: Any, axis: int
) -> tuple[Tensor, AttentionRouting]:  # fmt: skip
    """Return what `RoutedAttention` returns for a DTensor x whose tokens are spread along one axis of its mesh.

    Windows need the tokens of up to two windows on either side from the devices there. Queries are computed where they
    are; keys and values are projected where they are and gathered, those of the chosen tokens alone.
    """
    from . import halo
    from .attention import AttentionRouting
    from .causal import choose_per_block

    part = Part(x, axis)
    n, heavy, window = part.n, layer.heavy, layer.window
    real = None if mask is None else mask.redistribute(placements=part.everywhere).to_local()
    q = part.over_tokens(layer.router_q, x, asked(layer.router_q, layer.k_q, n), mask)
    if layer.causal and n:
        if not isinstance(layer.router_kv, Router):
            raise ValueError(
                "RoutedAttention: over a sequence that is spread over devices, router_kv must be a Router with causal"
            )
        scores: Any = part.over_tokens(_Scores(layer.router_kv), x)
        scores = scores.redistribute(placements=part.everywhere).to_local()
        kv = choose_per_block(layer.router_kv.decide, scores, layer.quota(n), window, real)
        kv = RouterOutput(*map(part.everyone, kv))
    else:
        kv = part.over_tokens(layer.router_kv, x, asked(layer.router_kv, layer.k_kv, n), mask)
    routing = AttentionRouting(q, kv)

    wants = [halo.wanted(*r, n, window, layer.causal) for r in part.ranges]
    around = halo.fetch(part.tokens, part.ranges, wants, part.group)
    first, last = wants[part.rank]
    left = part.begin - first
    y = part.run(layer.light, around, None if real is None else real[:, first:last])[:, left : left + part.here]
    null = part.weight(layer.null)
    y = y + null.to(y.dtype)
    if q.indices.shape[1]:
        at_q, at_kv = part.choice(q.indices), part.choice(kv.indices)
        places, slots, own = part.own(at_kv)
        rows = part.run(heavy.kv, part.run(heavy.norm_kv, gather(part.tokens, places)))
        rows = torch.where(own[..., None], rows, 0)
        memories = rows.new_zeros(*at_kv.shape, rows.shape[-1])
        memories = halo.total(memories.scatter_add(1, slots[..., None].expand_as(rows), rows), part.group)
        places, slots, own = part.own(at_q)
        mine = RouterOutput(
            torch.where(own, at_q.gather(-1, slots), -1),
            torch.where(own, part.choice(q.gates).gather(-1, slots), 0), at_q,
        )  # fmt: skip
        local = AttentionRouting(mine, RouterOutput(at_kv, part.choice(kv.gates), at_kv))
        queries = part.run(heavy.q, part.run(heavy.norm_q, gather(part.tokens, places)))
        until, seen = layer.seen(local, n, real)
        update = part.run(heavy.out, heavy.attend(queries, memories, local, until, turned=True, mask=seen).flatten(2))
        y = scatter_add(y, update - null.to(update.dtype), mine.gates, places)
    return part.spread(part.explored(y, layer.router_q, layer.k_q, mask)), routing


__all__ = ["Part", "attention_over_sequence", "parts", "routed_over_sequence", "sequence_axis"]
