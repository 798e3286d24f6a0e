"""`routing_stats`: what the routers of a model do, as numbers for a training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from onepass.ops._shared import arguments

from .attention import AttentionRouting
from .block import BlockRouting
from .router import RouterOutput

BINS = 16
SATURATED = 1e-3

Routing = RouterOutput | AttentionRouting | BlockRouting


@torch.no_grad()
def routing_stats(
    passes: Sequence[Sequence[Routing] | Mapping[str, Routing]], masks: Sequence[Tensor | None] | None = None,
    context_masks: Sequence[Tensor | None] | None = None, *, total: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:  # fmt: skip
    r"""Count what routers chose in some passes: share, positions, agreement between layers, saturated gates.

    With real tokens R, chosen tokens A ⊆ R (for R routes: by any of them) and gates g of the chosen, summed over all
    passes:

    .. math::
        \text{share} = \frac{|A|}{|R|}, \qquad
        \text{entropy} = -\frac{1}{\log 16}\sum_{b=1}^{16} p_b \log p_b, \qquad
        \text{overlap} = \frac{|A \cap B|}{|A|}

    - ``share`` of the real tokens that were chosen.
    - ``entropy``: p_b is the share of the choices in the b-th sixteenth of their sequence's real tokens. 1: all
      positions alike; 0: all in one sixteenth. To reach 1 takes some hundred choices in sequences of 16 or more.
    - ``overlap``: B is what the router of the same role (feed-forward, queries, keys) in the layer before chose.
      Independent layers overlap by about B's share.
    - ``saturated``, ``closed``: chosen gates ≥ 1 − 0.001 and ≤ 0.001, which give their router next to no gradient. (Of
      ``gate="straight_through"`` all gates are 1.)

    Args:
        passes: for each pass what the layers of a model returned with ``return_routing=True``: a list in their order,
            or a dict with their names, of a `RouterOutput`, `AttentionRouting` or `BlockRouting` each.
        masks: for each pass ``(batch, n)`` bool, True at real tokens, as the layers got it, or None.
        context_masks: of the memories, if these are `RoutedCrossAttention` layers.
        total: returns the sum of an int64 tensor over processes, each of which calls this.

    Returns:
        Numbers as ``{"blocks.0.feed_forward.router/share": 0.0625, …}``, without undefined ones, such as the first
        layer's overlap. The host waits for the device once.

    Raises:
        TypeError: a routing is none of these, or a mask is not bool.
        ValueError: a mask does not fit a routing, or there are not as many masks as passes.

    Source: shares and router entropy as reported for mixtures of experts (Switch Transformer, arXiv:2101.03961).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedFeedForward, routing_stats
        >>> layers, passes = [RoutedFeedForward(32, k=1 / 8) for _ in range(2)], []
        >>> for _ in range(3):
        ...     x, routings = torch.randn(4, 256, 32), []
        ...     for layer in layers:
        ...         x, routing = layer(x, return_routing=True)
        ...         routings.append(routing)
        ...     passes.append(routings)
        >>> numbers = routing_stats(passes)
        >>> numbers["0.router/share"], "1.router/overlap" in numbers
        (0.125, True)
    """
    totals: dict[str, Tensor] = {}
    no_masks = [None] * len(passes)
    for name, per_pass in (("masks", masks), ("context_masks", context_masks)):
        if per_pass is not None and len(per_pass) != len(passes):
            raise ValueError(f"routing_stats: {name} must be one for each of {len(passes)} passes, got {len(per_pass)}")
    for routings, mask, context_mask in zip(passes, masks or no_masks, context_masks or no_masks, strict=True):
        named = routings if isinstance(routings, Mapping) else {str(i): each for i, each in enumerate(routings)}
        before: dict[str, Tensor] = {}
        for name, routing in named.items():
            if not isinstance(routing, Routing):
                raise TypeError(
                    "routing_stats: routing must be a RouterOutput, AttentionRouting or BlockRouting, got "
                    f"{type(routing).__name__}"
                )
            for path, output in _outputs(routing):
                router, role = f"{name}.{path}", path.rpartition(".")[2]
                is_context = context_mask is not None and path == "router_kv"
                counts, before[role] = _count(output, context_mask if is_context else mask, before.get(role))
                totals[router] = totals[router] + counts if router in totals else counts
    if not totals:
        return {}
    device = next(iter(totals.values())).device
    sums = torch.stack([counts.to(device) for counts in totals.values()])
    rows = (sums if total is None else total(sums)).tolist()
    out = {}
    for name, (real, chosen, compared, both, gates, high, low, *bins) in zip(totals, rows, strict=True):
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


def _count(output: RouterOutput, mask: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a router's counts, int64, and which tokens it chose; `before`: those that the layer before chose."""
    indices, gates, scores = output
    batch, n = scores.shape[0], scores.shape[-1]
    arguments.mask_of("routing_stats", mask, "(batch, n)", (batch, n), "the scores", scores)
    real = scores.new_ones((batch, n), dtype=torch.bool) if mask is None else mask
    present, flat = indices >= 0, indices.flatten(1)
    # column n takes the missing choices
    chosen = real.new_zeros((batch, n + 1)).scatter_(1, flat.where(flat >= 0, n), True)[:, :n] & real
    # bins divide the real tokens, so padding moves no token to another bin
    place, length = (real.cumsum(1) - 1).clamp_min(0), real.sum(1, keepdim=True).clamp_min(1)
    bins = flat.new_zeros(BINS).scatter_add_(0, (place * BINS // length).flatten(), chosen.flatten().long())
    total, zero = chosen.sum(), flat.new_zeros(())
    before = None if before is None or before.shape != chosen.shape else before.to(chosen.device)
    compared = (zero, zero) if before is None else (total, (chosen & before).sum())
    counts = [
        real.sum(), total, *compared, present.sum(),
        (present & (gates >= 1 - SATURATED)).sum(), (present & (gates <= SATURATED)).sum(),
    ]  # fmt: skip
    return torch.cat([torch.stack(counts), bins]), chosen


def _outputs(routing: Routing) -> Iterator[tuple[str, RouterOutput]]:
    """Yield each router's name inside its layer, and its output."""
    if isinstance(routing, RouterOutput):
        yield "router", routing
    elif isinstance(routing, AttentionRouting):
        yield from (("router_q", routing.q), ("router_kv", routing.kv))
    else:
        yield from ((f"attention.{path}", output) for path, output in _outputs(routing.attention))
        yield "feed_forward.router", routing.feed_forward
