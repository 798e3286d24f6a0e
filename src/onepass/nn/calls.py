"""Which way a layer computes a call: decided here alone, in this order.

packed sequences → DTensors → a cache → the fused form → the composition of modules
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from onepass.core import check
from onepass.core.eager import plain, takes_operators

from .norm import RMSNorm
from .packed import refuse_int, unpack
from .whole_rows import takes_whole_rows, whole_rows

Routing = TypeVar("Routing", covariant=True)


class RoutedCall(Protocol[Routing]):
    """``layer(x, mask=None, return_routing=False, *, …)``, for type checkers alone; only a block takes a cache."""

    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., return_routing: Literal[False] = ..., *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ..., cache: Any = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., return_routing: Literal[True] = ..., *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ..., cache: Any = ...,
    ) -> tuple[Tensor, Routing]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, mask: Tensor | None = ..., return_routing: bool = ..., *,
        cu_seqlens: Tensor | None = ..., max_seqlen: int | None = ..., cache: Any = ...,
    ) -> Tensor | tuple[Tensor, Routing]: ...  # fmt: skip


class Layer(nn.Module):
    """A layer of tokens (batch, n, dim) that returns its output and, if asked, its choices.

    A subclass has `composed`, perhaps `fused` and `step`; each computes the whole layer and returns (y, routing).
    """

    # True: `forward` makes DTensors plain, each device's rows; False: the modules inside do
    opens = True

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False, *,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, cache: Any = None,
    ) -> Any:  # fmt: skip
        if cu_seqlens is not None or max_seqlen is not None:
            name = type(self).__name__
            check.tensor(name, "x", x)  # torch.fx gives a proxy for every argument
            if cache is not None:
                raise ValueError(f"{name}: cache and cu_seqlens exclude each other: give a batch with a mask")
            y, routing = self.packed(x, mask, cu_seqlens, max_seqlen)
            return (y, routing) if return_routing else y
        self.check(x)
        if type(x) is not Tensor and self.opens and cache is None and takes_whole_rows(self, x):
            return whole_rows(Layer, self, x, mask, return_routing=return_routing)
        if cache is not None and x.shape[1]:
            # an empty prompt leaves the cache as it is
            # caches count on the host: a program would hold how many tokens there are
            cached: Any = torch.compiler.disable(self.cached) if torch.compiler.is_compiling() else self.cached  # type: ignore[no-untyped-call]
            y, routing = cached(x, mask, cache, return_routing)
        elif (dtype := self.fused_dtype(x, mask)) is not None:
            y, routing = self.fused(x, mask, dtype)
        else:
            y, routing = self.composed(x, mask)
        return (y, routing) if return_routing else y

    fused: Any
    composed: Any
    step: Any

    def check(self, x: Tensor) -> None:
        """Raise TypeError or ValueError unless x can be tokens of this layer."""

    def fused_dtype(self, x: Tensor, mask: Tensor | None) -> torch.dtype | None:
        """Return the branches' dtype; None where a transform or a hook intercepts the call, or a module is another."""
        return None

    def packed(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> tuple[Tensor, Any]:
        """Compute packed sequences as a padded batch; the routing is that of the batch."""
        for module in (self, *self.children()):
            if getattr(module, "causal", False) or getattr(getattr(module, "router", None), "causal", False):
                for option in ("k", "k_q", "k_kv"):
                    refuse_int(type(module).__name__, option, getattr(module, option, None))
        padded, layout = unpack(type(self).__name__, x, mask, cu_seqlens, max_seqlen)
        # not self.forward: a subclass's forward has run already
        y, routing = Layer.forward(self, padded, layout.mask, True)
        return y.flatten(0, 1).index_select(0, layout.slots).view(x.shape), routing

    def cached(self, x: Tensor, mask: Tensor | None, cache: Any, return_routing: bool) -> tuple[Tensor, Any]:
        """Read a prompt, or one more token of each sequence."""
        if x.shape[1] == 1:
            return self.step(x, cache)  # type: ignore[no-any-return]
        dtype = self.fused_dtype(x, mask)
        y, routing = self.composed(x, mask, cache) if dtype is None else self.fused(x, mask, dtype, cache=cache)
        cache.fill(self, x, routing)
        return y, routing


def parts_of(layer: nn.Module, *names: str) -> list[Any]:
    """Return a layer's modules of these names, then the modules inside them."""
    # read `_modules`: attributes and `modules()` would take longer than all else before a fused call
    parts: list[Any] = [layer._modules[name] for name in names]
    return parts + [m for part in parts for m in part._modules.values()]


def as_written(parts: Sequence[nn.Module], kinds: list[type] | None) -> bool:
    """Return whether the modules have these classes, and a call of them computes only what `fused` does."""
    if [*map(type, parts)] != kinds or not has_no_overrides(*parts):
        return False
    # fused nodes take one eps for all norms, and no offset or second rounding
    norms = [m for m in parts if type(m) is RMSNorm]
    return len({m.eps for m in norms}) == 1 and not [m for m in norms if m.offset or m.rounding != "once"]


def has_no_overrides(*modules: nn.Module) -> bool:
    """Return whether a call of these modules runs only what their classes define, on their own parameters.

    False for any hook, global ones included; for a forward set on an instance; and for another tensor in place of a
    parameter, such as a hypernetwork's output, the view of a wrapper that shards or replicates, or a buffer.
    """
    if torch_module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    for m in modules:
        has = m.__dict__
        if has["_forward_hooks"] or has["_forward_pre_hooks"] or has["_backward_hooks"] or has["_backward_pre_hooks"]:
            return False
        if "forward" in has or "weight" in has or "bias" in has or "null" in has or has["_buffers"]:
            return False
    return True


def branch_dtype(
    x: Tensor, mask: Tensor | None, weights: Sequence[Tensor], multiplied: Sequence[Tensor]
) -> torch.dtype | None:
    """Return the dtype of the branches of a fused layer; None where its modules have to compute.

    That is where something intercepts the call, or where weights are on another device or, without autocast, of another
    dtype than x. The modules then raise the errors, also for what is not dense or of no float dtype.
    """
    if x.layout is not torch.strided or x.dtype not in check.FLOATS:
        return None
    if not (plain(x, mask, *weights) or takes_operators(x, mask, *weights)):
        return None
    if {w.device for w in weights} != {x.device}:
        return None
    dtypes = {w.dtype for w in multiplied}
    if torch.is_autocast_enabled(x.device.type):
        return None if torch.float64 in (x.dtype, *dtypes) else torch.get_autocast_dtype(x.device.type)
    return x.dtype if dtypes == {x.dtype} else None
