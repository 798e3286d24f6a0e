"""`RoutingStats`: what the routers of a model do, as numbers for a training loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.ops._shared import arguments

from .attention import AttentionRouting, RoutedAttention
from .block import BlockRouting, RoutedBlock
from .causal import choose_per_block
from .cross_attention import RoutedCrossAttention
from .packed import places
from .routed import Routed
from .router import Router, RouterOutput

BINS = 16
SATURATED = 1e-3

Routing = RouterOutput | AttentionRouting | BlockRouting

_LAYERS = Routed, RoutedAttention, RoutedCrossAttention, RoutedBlock
# return_routing for the hook alone: true, but not True, when the caller did not ask for the routing
_ONLY_FOR_STATS = 2


class RoutingStats:
    r"""Count what routers choose: share, positions, agreement between blocks, saturated gates.

    With real tokens R, chosen tokens A ⊆ R (for R routes: by any of them) and gates g of the chosen, summed over all
    calls since the start or the last `reset`:

    .. math::
        \text{share} = \frac{|A|}{|R|}, \qquad
        \text{entropy} = -\frac{1}{\log 16}\sum_{b=1}^{16} p_b \log p_b, \qquad
        \text{overlap} = \frac{|A \cap B|}{|A|}

    - ``share``: the share of the real tokens that were chosen.
    - ``entropy``: p_b is the share of the choices that fall into the b-th sixteenth of their sequence's real tokens. 1:
      all positions alike; 0: all choices in one sixteenth. It needs some hundred choices to reach 1, and sequences of
      16 tokens or more.
    - ``overlap``: B are the tokens that the router of the same role (feed-forward, queries, keys) in the block before
      chose in the same pass. Blocks that choose independently overlap by about B's share.
    - ``saturated``, ``closed``: of the gates of the chosen, those with g ≥ 1 − 0.001, and those with g ≤ 0.001. They
      give their router no gradient, or nearly none. With a model, a `Router` with ``gate="straight_through"`` counts
      by its soft gates, as its gates are all 1.

    With a model, ``with stats:`` listens to its `Routed`, `RoutedFeedForward`, `RoutedAttention`,
    `RoutedCrossAttention` and `RoutedBlock` layers by forward hooks, which ask for the routing
    (``return_routing=True``) and hide it from callers that did not. Outputs keep their bits and layers their fused
    form, and one graph of `torch.compile` holds both; enter before the first compiled call, as a finished program may
    run no new hooks, and a captured one runs none. There, or without a model, give `add` the routing that a layer
    returned.

    Counts stay on the device: only `scalars` waits for it. Outside ``with``, a call of a layer costs nothing more.
    Inside, each router costs 37 small operations a call, so measure in evaluation or every hundredth step. A
    checkpointed layer counts again when it is recomputed, which changes no share.

    Args:
        model: any module with routed layers inside, or one itself; None: `add` alone.

    Raises:
        TypeError: model is not an `nn.Module`.
        ValueError: model has no routed layer.
        RuntimeError: ``with`` inside ``with`` of the same object.

    Source: shares and router entropy as reported for mixtures of experts (Switch Transformer, arXiv:2101.03961).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedFeedForward, RoutingStats
        >>> model = torch.nn.Sequential(RoutedFeedForward(32, k=1 / 8), RoutedFeedForward(32, k=1 / 8))
        >>> with RoutingStats(model) as stats, torch.no_grad():
        ...     for _ in range(3):
        ...         y = model(torch.randn(4, 256, 32))
        >>> numbers = stats.scalars()
        >>> numbers["0.router/share"], "1.router/overlap" in numbers
        (0.125, True)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"RoutingStats: model must be an nn.Module or None, got {type(model).__name__}")
        self._layers = [] if model is None else list(_outermost(model))
        if model is not None and not self._layers:
            raise ValueError(
                f"RoutingStats: {type(model).__name__} has no routed layer: no Routed, RoutedFeedForward, "
                f"RoutedAttention, RoutedCrossAttention or RoutedBlock"
            )
        self._hooks: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget all counts."""
        self._counts: dict[str, Tensor] = {}
        # the router before each router of the same role, and the last choice of each role with its router
        self._before: dict[str, str] = {}
        self._last: dict[str, tuple[str, Tensor]] = {}

    def __enter__(self) -> RoutingStats:
        if self._hooks:
            raise RuntimeError("RoutingStats: it listens already: leave its first `with` before")
        for name, layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(_ask, with_kwargs=True))
            # before the user's hooks, so that they see the output that the caller gets
            listen = self._listener(name, layer)
            self._hooks.append(layer.register_forward_hook(listen, with_kwargs=True, prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def add(self, name: str, routing: Routing, mask: Tensor | None = None, context_mask: Tensor | None = None) -> None:
        """Count what a layer returned with ``return_routing=True``.

        Args:
            name: of the layer; the numbers' names begin with it. Add the layers in the order of the model.
            routing: a `RouterOutput`, `AttentionRouting` or `BlockRouting`.
            mask: ``(batch, n)`` bool, True at real tokens, as the layer got it.
            context_mask: of a `RoutedCrossAttention`'s memories.

        Raises:
            TypeError: routing is none of these, or a mask is not bool.
            ValueError: a mask does not fit the routing.
        """
        if not isinstance(routing, RouterOutput | AttentionRouting | BlockRouting):
            raise TypeError(
                f"RoutingStats: routing must be a RouterOutput, AttentionRouting or BlockRouting, "
                f"got {type(routing).__name__}"
            )
        cross = context_mask is not None
        for path, output in _outputs(routing):
            real = context_mask if cross and path == "router_kv" else mask
            self._count(f"{name}.{path}" if name else path, _role(path, cross), output, real)

    def scalars(self, total: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Return the numbers so far as ``{"blocks.0.feed_forward.router/share": 0.0625, …}``.

        With `total`, a function that returns the sum of an int64 tensor over processes, they count the rows of all.
        Each process calls this, after at least one call of the layers, perhaps without rows.

        A name is that of the router in the model, a slash and the number's. Undefined numbers are left out,
        such as the first block's overlap, or the entropy of a router that chose nothing.
        """
        if not self._counts:
            return {}
        device = next(iter(self._counts.values())).device
        counted = torch.stack([counts.to(device) for counts in self._counts.values()])
        rows = (counted if total is None else total(counted)).tolist()
        out = {}
        for name, (real, chosen, compared, both, gates, high, low, *bins) in zip(self._counts, rows, strict=True):
            if real:
                out[f"{name}/share"] = chosen / real
            if chosen:
                # 0.0 −: an entropy of 0, not of −0
                out[f"{name}/entropy"] = 0.0 - sum(b / chosen * math.log(b / chosen, BINS) for b in bins if b)
            if compared:
                out[f"{name}/overlap"] = both / compared
            if gates:
                out[f"{name}/saturated"], out[f"{name}/closed"] = high / gates, low / gates
        return out

    def _listener(self, name: str, of: nn.Module) -> Any:
        """Return the hook that counts a layer's routing and gives the caller what it asked for.

        A copy of the layer has the hook too, and is not counted.
        """

        @torch.no_grad()
        def listen(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            y, routing = output
            wanted = y if _argument(args, kwargs, *_asked(layer)) == _ONLY_FOR_STATS else None
            if layer is not of:
                return wanted
            cross = isinstance(layer, RoutedCrossAttention)
            mask = _argument(args, kwargs, "mask", 2 if cross else 1)
            if (bounds := kwargs.get("cu_seqlens")) is not None:
                # the routing of packed sequences is that of a padded batch
                x = _argument(args, kwargs, "x", 0)
                mask = places(type(layer).__name__, x.shape[-2], x.device, bounds, kwargs.get("max_seqlen")).mask
            context_mask = _argument(args, kwargs, "context_mask", 3) if cross else None
            for path, given in _outputs(routing):
                real = context_mask if cross and path == "router_kv" else mask
                soft = _with_soft_gates(layer, path, given, real)
                self._count(f"{name}.{path}" if name else path, _role(path, cross), soft, real)
            return wanted

        return listen

    def _count(self, name: str, role: str, output: RouterOutput, mask: Tensor | None) -> None:
        indices, gates, scores = output
        batch, n = scores.shape[0], scores.shape[-1]
        if mask is not None:
            arguments.boolean("RoutingStats", mask, "real token")
            if mask.shape != (batch, n):
                raise ValueError(f"RoutingStats: mask must be (batch, n) = {(batch, n)}, got {tuple(mask.shape)}")
            check.same_device("RoutingStats", "mask", mask, "the scores", scores)
        real = scores.new_ones((batch, n), dtype=torch.bool) if mask is None else mask
        there, flat = indices >= 0, indices.flatten(1)
        # column n takes the missing choices
        chosen = real.new_zeros((batch, n + 1)).scatter_(1, flat.where(flat >= 0, n), True)[:, :n] & real
        # bins divide the real tokens, so padding moves no token to another bin
        place, length = real.cumsum(1) - 1, real.sum(1, keepdim=True).clamp_min(1)
        bins = flat.new_zeros(BINS).scatter_add_(
            0, (place.clamp_min(0) * BINS // length).flatten(), chosen.flatten().long()
        )
        last, other = self._last.get(role, ("", chosen))
        # compare with the router that came before this one in its first pass, not with the last one of an earlier pass
        same = last == self._before.setdefault(name, last) != "" and other.shape == chosen.shape
        self._last[role] = name, chosen
        total, none = chosen.sum(), flat.new_zeros(())
        compared = (total, (chosen & other.to(chosen.device)).sum()) if same else (none, none)
        counts = [
            real.sum(), total, *compared, there.sum(),
            (there & (gates >= 1 - SATURATED)).sum(), (there & (gates <= SATURATED)).sum(),
        ]  # fmt: skip
        new = torch.cat([torch.stack(counts), bins])
        # not in place: a tensor made under inference mode can't be changed outside it
        self._counts[name] = self._counts[name] + new if name in self._counts else new


def _outermost(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost routed layers, with their names: a block returns the routing of the layers inside."""
    if isinstance(model, _LAYERS):
        yield prefix, model
        return
    for name, child in model.named_children():
        yield from _outermost(child, f"{prefix}.{name}" if prefix else name)


def _outputs(routing: Routing) -> Iterator[tuple[str, RouterOutput]]:
    """Yield each router's name inside its layer, and its output."""
    if isinstance(routing, RouterOutput):
        yield "router", routing
    elif isinstance(routing, AttentionRouting):
        yield from (("router_q", routing.q), ("router_kv", routing.kv))
    else:
        yield from ((f"attention.{path}", output) for path, output in _outputs(routing.attention))
        yield "feed_forward.router", routing.feed_forward


def _role(path: str, cross: bool) -> str:
    """Return what a router chooses for: choices are compared with those of the same role."""
    return "cross " * cross + path.rpartition(".")[2]


def _asked(layer: nn.Module) -> tuple[str, int]:
    return "return_routing", 4 if isinstance(layer, RoutedCrossAttention) else 2


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, place: int) -> Any:
    """Return an argument of a call, given by place or by name; None if it was not given."""
    return args[place] if len(args) > place else kwargs.get(name)


def _ask(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call return its routing as well."""
    name, place = _asked(layer)
    if _argument(args, kwargs, name, place):
        return None
    if len(args) > place:
        return (*args[:place], _ONLY_FOR_STATS, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: _ONLY_FOR_STATS}


def _with_soft_gates(layer: nn.Module, path: str, output: RouterOutput, mask: Tensor | None) -> RouterOutput:
    """Return a router's output, with its soft gates if it used others."""
    *inside, name = path.split(".")
    owner = layer.get_submodule(".".join(inside))
    router = getattr(owner, name)
    if not isinstance(router, Router) or router.gate == "soft":
        return output
    soft, k = copy.copy(router), getattr(owner, {"router_q": "k_q", "router_kv": "k_kv"}.get(name, "k"))
    soft.gate = "soft"
    n = output.scores.shape[-1]
    if isinstance(owner, RoutedAttention) and owner.causal and name == "router_kv" and n:
        return choose_per_block(soft.decide, output.scores, owner.quota(n), owner.window, mask)
    return soft.decide(output.scores, k, mask)


__all__ = ["RoutingStats"]
