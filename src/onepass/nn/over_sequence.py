"""Routed layers over a sequence that is spread over devices: DTensors at the door, plain tensors inside.

`Door` takes the tokens and all weights out of their DTensors, once for a layer or block. The layer then runs as on one
device, in its fused form with a `Row`; `Routed` composes branches that have none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from onepass.fused.packing import Packing
from onepass.fused.parts import parts
from onepass.fused.row import Row

from .padding import check_bounds, check_mask

# the calls of a layer that its devices have agreed on
_agreed: WeakKeyDictionary[nn.Module, set[Any]] = WeakKeyDictionary()


def sequence_axis(x: Tensor) -> int | None:
    """Return the axis of the mesh along which the tokens (batch, n, dim) are spread; None: not, or along several."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(x, tensors.DTensor) or x.dim() != 3:
        return None
    # a plain Shard: strided shards of torch are other classes
    axes = [i for i, p in enumerate(x.placements) if type(p) is tensors.Shard and p.dim == 1]
    known = all(type(p) in (tensors.Shard, tensors.Replicate) and not p.is_shard(2) for p in x.placements)
    return axes[0] if len(axes) == 1 and known else None


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as `torch.compile` leaves it to eager: it would trace collectives for a minute, or fail."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)  # type: ignore[no-untyped-call]
        return function(*args, **options)

    return call


class Bounds(NamedTuple):
    """Where packed sequences begin and end; layers take it for a mask. Every device has the same."""

    cu_seqlens: Tensor
    max_seqlen: int | None

    def fault(self, caller: str, device: torch.device) -> TypeError | ValueError | None:
        """Return the error for bounds that no values could make right."""
        if hasattr(self.cu_seqlens, "to_local"):
            return TypeError(f"{caller}: cu_seqlens must be a plain tensor, the same everywhere; write .full_tensor()")
        try:
            check_bounds(caller, *self, device)
        except (TypeError, ValueError) as e:
            return e
        return None

    def longest(self, n: int) -> int:
        """Return max_seqlen, or what the host reads in its place."""
        # wrong ones too lead to a size: they are named when all devices know of them
        if self.max_seqlen is not None:
            return max(1, self.max_seqlen)
        longest: int = max((1, *self.cu_seqlens.diff().tolist()))
        return min(n, longest)


class Door:
    """One device's tokens of a DTensor (batch, n, dim) that is spread along an axis of its mesh, and whole weights.

    Attributes:
        tokens: those of this device; one of zeros where it has none.
        mask: theirs.
        packing: of packed sequences; None: a row is one.
        length: that of the longest sequence.
    """

    def __init__(self, module: nn.Module, x: Any, axis: int, mask: Any) -> None:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        self._dtensor, self.x, self.name = DTensor, x, type(module).__name__
        self.mesh, self.placements, self.shape, self.n = x.device_mesh, x.placements, x.shape, x.shape[1]
        self.group = self.mesh.get_group(axis)
        self.everywhere = [Replicate() if i == axis else p for i, p in enumerate(self.placements)]
        # each device has its own part of a gradient of what all of them read
        self._of_choices = [Partial() if i == axis else p for i, p in enumerate(self.placements)]
        self.whole = [Replicate()] * self.mesh.ndim
        self.tokens: Tensor = x.to_local(grad_placements=x.placements)
        self.rows, self.here = self.tokens.shape[:2]
        weights = parameters(module)
        self._agree(module, mask, weights)
        self.length, self.packing = self.n, None  # type: int, Packing | None
        if isinstance(mask, Bounds):
            self.length = mask.longest(self.n)
            begin, end = parts(self.n, self.mesh.size(axis))[self.mesh.get_local_rank(axis)]
            self.packing = Packing(self.name, mask.cu_seqlens, self.length, self.n, begin, end)
            mask = None
        check_mask(self.name, x, mask)
        self.mask: Tensor | None = None
        if mask is not None:
            self.mask = mask.redistribute(placements=self.placements).to_local()
        if not self.tokens.numel():
            # a token of zeros, so that every device takes part in each sum
            more = (0, int(not self.here), 0, int(not self.rows))
            self.tokens = F.pad(self.tokens, (0, 0, *more))
            self.mask = None if self.mask is None else F.pad(self.mask, more)
        self._weights = opened(self.name, self.mesh, self.placements, weights)

    def _agree(self, module: nn.Module, mask: Any, weights: list[Tensor]) -> None:
        """Raise an error on every device if one has another call than the others, where such a call is new here.

        A layer asks the others once for each kind of call, so that none waits for one that raised an error alone.
        """
        import torch.distributed as dist

        fault = mask.fault(self.name, self.tokens.device) if isinstance(mask, Bounds) else None
        if isinstance(mask, Bounds):
            of_mask: Any = str(fault or "cu_seqlens")
        else:
            of_mask = None if mask is None else (tuple(mask.shape), getattr(mask, "placements", "a plain tensor"))
        kinds = frozenset(p.dtype for p in weights)
        modes = module.training, torch.is_grad_enabled(), torch.is_autocast_enabled(self.tokens.device.type)
        seen = self.group.group_name, self.here, self.shape, self.x.dtype, self.placements, of_mask, kinds, modes
        agreed = _agreed.setdefault(module, set())
        if seen in agreed:
            return
        call = {
            "x": f"{tuple(self.shape)}, {self.x.dtype}, {self.placements}",
            "mask and cu_seqlens": str(of_mask),
            "weights": sorted(map(str, kinds)),
            "layer": f"{module}, (training, gradients, autocast) = {modes}",
        }
        every: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(every, (call, self.here), group=self.group)
        for key in call:
            if any(other[key] != every[0][0][key] for other, _ in every):
                said = "; ".join(f"device {i}: {other[key]}" for i, (other, _) in enumerate(every))
                raise ValueError(f"{self.name}: devices that share a sequence must agree on {key}; {said}")
        sizes = [b - a for a, b in parts(self.n, len(every))]
        if sizes != [here for _, here in every]:
            raise ValueError(
                f"{self.name}: {self.n} tokens over {len(every)} devices must be placed as distribute_tensor places "
                f"them, {sizes}; got {[here for _, here in every]}"
            )
        if fault is not None:
            raise fault
        if mask is not None and not isinstance(mask, (self._dtensor, Bounds)):
            raise TypeError(f"{self.name}: mask must be a DTensor beside a DTensor x; use distribute_tensor")
        agreed.add(seen)

    def weight(self, parameter: Any) -> Any:
        """Return a whole parameter; its gradient is this device's part of a sum.

        A plain one is whole already, and whoever handed it here adds the parts up, as FSDP2 and DDP do.
        """
        return self._weights.get(id(parameter), parameter)

    def fused(self, layer: Any, x: Tensor, residual: bool = False, dtype: torch.dtype | None = None) -> Any:
        """Return a layer's y (x + y with `residual`) at tokens x, and its routing; `dtype`: its branches', if known."""
        dtype = dtype or layer._fused_dtype(x, self.mask, spread=True)
        if dtype is None:
            raise ValueError(
                f"{type(layer).__name__}: over a sequence that is spread over devices, routers, branches and norms "
                "must be the default ones without hooks, dim ≤ 4096, every k ≥ 1, and weights and x of one dtype or "
                f"under autocast; got x {x.dtype} and {layer}"
            )
        return layer._fused(x, self.mask, dtype, residual, self)

    def row(self) -> Row:
        """Return the row for one call of a fused layer."""
        return Row(self.n, self.group, self.packing)

    def cut(self, t: Tensor) -> Tensor:
        """Return t (batch, tokens, …) without the token that stands in for none."""
        return t if self.here and self.rows else t[: self.rows, : self.here]

    def leave(self, y: Tensor) -> Any:
        """Return the DTensor of which y is this device's part."""
        strides = (self.n * self.shape[2], self.shape[2], 1)
        return self._dtensor.from_local(
            self.cut(y), self.mesh, self.placements, run_check=False, shape=self.shape, stride=strides
        )  # fmt: skip

    def routing(self, found: Any) -> Any:
        """Return a routing of whole rows, which each device has, as one of DTensors."""

        def everyone(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return self.routing(t)
            shape = t.shape if self.packing is not None else torch.Size((self.shape[0], *t.shape[1:]))
            t = (t if self.rows else t[:0]).contiguous()
            return self._dtensor.from_local(
                t, self.mesh, self.everywhere, run_check=False, shape=shape, stride=t.stride()
            )  # fmt: skip

        return found._make(map(everyone, found))

    def run(self, module: nn.Module, *args: Any) -> Tensor:
        """Return module(*args) with whole parameters."""
        return functional_call(module, {n: self.weight(p) for n, p in named(module)}, args)  # type: ignore[no-any-return]

    def route(self, router: nn.Module, x: Any, k: int | float, mask: Any) -> Any:
        """Return router(x, k, mask) for DTensor tokens, which a router's plain parameters could not meet."""
        beside = {
            n: _Beside.apply(p, self.mesh, self.whole)  # type: ignore[no-untyped-call]
            for n, p in router.named_parameters()
            if not isinstance(p, self._dtensor)
        }
        args = x, k, mask if self.packing is None else self.packing
        return functional_call(router, beside, args) if beside else router(*args)

    def choice(self, t: Any) -> Tensor:
        """Return whole rows of indices or gates; a router that reads no tokens has them already."""
        if not isinstance(t, self._dtensor):
            return t  # type: ignore[no-any-return]
        whole = t.redistribute(placements=self.everywhere)
        part = whole.to_local(grad_placements=self._of_choices) if t.is_floating_point() else whole.to_local()
        # nothing is chosen in a row that stands in for none
        return part if self.rows else F.pad(part, (0, 0) * (part.dim() - 1) + (0, 1), value=-1)  # type: ignore[no-any-return]


@uncompiled
def spread_rows(layer: Any, x: Any, axis: int, mask: Any, return_routing: bool) -> Any:
    """Return what a fused layer returns for tokens that are spread along an axis of their mesh."""
    door = Door(layer, x, axis, mask)
    y, routing = door.fused(layer, door.tokens)
    return (door.leave(y), door.routing(routing)) if return_routing else door.leave(y)


def opened(name: str, mesh: Any, placements: Any, weights: list[Any]) -> dict[int, Tensor]:
    """Return weights of DTensors as plain tensors, by id; their gradients are summed over all parts of x at once."""
    from torch.distributed.tensor import DTensor

    found: dict[int, Tensor] = {}
    learn = {}
    for p in (p for p in weights if isinstance(p, DTensor)):
        if p.device_mesh != mesh:
            raise ValueError(f"{name}: weights are on {p.device_mesh} but x is on {mesh}; use one mesh")
        if p.requires_grad and torch.is_grad_enabled():
            learn[id(p)] = p
        else:
            found[id(p)] = _local(_whole(p))
    if learn:
        groups = [mesh.get_group(i) for i, p in enumerate(placements) if p.is_shard()]
        plain = _Opened.apply(groups, *learn.values())  # type: ignore[no-untyped-call]
        found.update(zip(learn, plain, strict=True))
    return found


def parameters(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers, shared ones each time: torch's own walk takes five times as long."""
    inner = (p for m in module._modules.values() if m is not None for p in parameters(m))
    return [p for p in (*module._parameters.values(), *module._buffers.values(), *inner) if p is not None]


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _whole(p: Any) -> Any:
    """Return a parameter as every device has it."""
    from torch.distributed.tensor import Replicate

    replicated = all(q.is_replicate() for q in p.placements)
    return p if replicated else p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)


def _local(t: Any) -> Tensor:
    # at hand, where `to_local` makes a view; the result of a collective may still be on its way
    part = t._local_tensor
    return part.wait() if hasattr(part, "wait") else part  # type: ignore[no-any-return]


class _Opened(torch.autograd.Function):
    """Whole weights as plain tensors; their gradients are summed by one all-reduce."""

    @staticmethod
    def forward(ctx: Any, groups: list[Any], *weights: Any) -> tuple[Tensor, ...]:
        whole = [_whole(w) for w in weights]
        ctx.groups, ctx.specs, ctx.placements = groups, [w._spec for w in whole], [w.placements for w in weights]
        ctx.set_materialize_grads(False)
        # an alias: autograd marks what a Function returns
        return tuple(_local(w).detach() for w in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor

        # `from_local` takes four times as long, for each weight; typed since torch 2.14
        make: Any = DTensor
        found = [
            None if g is None else make(g, copy(spec), requires_grad=False)
            for g, spec in zip(total(grads, ctx.groups), ctx.specs, strict=True)
        ]
        return None, *(
            g if g is None or g.placements == placed else g.redistribute(placements=placed)
            for g, placed in zip(found, ctx.placements, strict=True)
        )


def total(grads: tuple[Tensor | None, ...], groups: list[Any]) -> list[Tensor | None]:
    """Return the sums of tensors over the devices of the groups: one all-reduce for each dtype and group."""
    import torch.distributed as dist

    out: list[Tensor | None] = [None] * len(grads)
    for dtype in {g.dtype: None for g in grads if g is not None}:
        # each begins at a whole number of 128 bytes, as kernels like it
        grain = 128 // dtype.itemsize
        some = [(i, g) for i, g in enumerate(grads) if g is not None and g.dtype == dtype]
        sizes = [size for _, g in some for size in (g.numel(), -g.numel() % grain)]
        flat = some[0][1].new_zeros(sum(sizes))
        pieces: Any = torch.split_with_sizes(flat, sizes)
        views = [t if g.dim() == 1 else t.view(g.shape) for t, (_, g) in zip(pieces[::2], some, strict=True)]
        torch._foreach_copy_(views, [g for _, g in some])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for (i, _), t in zip(some, views, strict=True):
            out[i] = t
    return out


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
