"""One token after another through causal routed layers: what they keep of the tokens before, and their steps.

A step makes the choices of the full forward, because a share's running threshold and budget do not depend on the
length. A step reads little of the past: the scores of the last `memory` tokens, the keys and values of the last two
windows, and those of the few tokens that each earlier window gave to the heavy attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.ops.causal_choice.reference import fraction, ranked
from onepass.ops.routing.op import gather, score
from onepass.ops.span_attention.op_rotary import rotary

from .causal import CausalRouter
from .router import NORM_EPS, Router, RouterOutput

if TYPE_CHECKING:
    from .attention import RoutedAttention
    from .block import RoutedBlock
    from .routed import RoutedFeedForward

# keys that a new cache has memory for; a full cache doubles it
LEAST = 64
# torch's first choice on Hopper, cuDNN, takes 6 ms to plan each new number of keys
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Cache:
    """Tensors that a layer keeps between steps."""

    def parts(self) -> list[Any]:
        return list(self.__dict__.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, unused memory included."""
        return sum(p.nbytes for p in self.parts() if isinstance(p, (Tensor, _Cache)))


@dataclass
class ChoiceCache(_Cache):
    """What a `CausalRouter` keeps of the tokens before.

    Attributes:
        scores: ``(batch, memory)``: those of the last tokens, token i in column i mod memory; −∞ in unused columns.
        threshold: ``(batch,)``: of the last token's block.
        taken: ``(batch,)`` int64: how many tokens were chosen.
        gates: ``(batch,)``: of the last step's tokens; 0 for those that were not chosen.
        position: how many tokens there were.
    """

    scores: Tensor
    threshold: Tensor
    taken: Tensor
    gates: Tensor
    position: int = 0


@dataclass
class AttentionCache(_Cache):
    """What a causal `RoutedAttention` keeps of the tokens before.

    Attributes:
        queries: the choice of queries.
        near: ``(2, batch, 2·window, light heads, dim_head)``: rotated keys, and values, of the window before and of
            this one.
        tokens: ``(batch, window, dim)``: the tokens of this window.
        scores: ``(batch, window)``: their scores as keys.
        far: ``(2, batch, places, heads, dim_head)``: rotated keys, and gated values, that earlier windows gave.
        at: ``(batch, places)`` int64: the positions of those.
        count: how many places of `far` and `at` are in use.
    """

    queries: ChoiceCache
    near: Tensor
    tokens: Tensor
    scores: Tensor
    far: Tensor
    at: Tensor
    count: int = 0


@dataclass
class BlockCache(_Cache):
    """What a causal `RoutedBlock` keeps of the tokens before: one cache per layer."""

    attention: AttentionCache
    feed_forward: ChoiceCache

    @property
    def position(self) -> int:
        """How many tokens there were."""
        return self.feed_forward.position


def check_router(layer: nn.Module, name: str, k: int | float, kind: type[Router]) -> Any:
    """Return a layer's router; raise TypeError unless its class is `kind` and k is a share."""
    caller, router = type(layer).__name__, getattr(layer, name)
    if type(router) is not kind:
        raise TypeError(f"{caller}: decoding needs a {kind.__name__} as {name}, got {type(router).__name__}")
    which = {"router_q": "k_q", "router_kv": "k_kv"}.get(name, "k")
    if not isinstance(k, float):
        raise TypeError(
            f"{caller}: decoding needs {which} as a share, a float 0 < {which} ≤ 1; got the int {k}, which is a share "
            "of a length that is not known yet"
        )
    return router


def _check_step(layer: nn.Module, x: Tensor, dim: int, batch: int) -> None:
    if x.shape != (batch, dim):
        raise ValueError(f"{type(layer).__name__}: step takes x as (batch, dim) = {(batch, dim)}, got {tuple(x.shape)}")


def _check_prefill(layer: nn.Module, x: Tensor, position: int, batch: int) -> None:
    if position:
        raise ValueError(f"{type(layer).__name__}: prefill needs a new cache, got one of {position} tokens")
    if x.dim() != 3 or len(x) != batch:
        raise ValueError(f"{type(layer).__name__}: prefill takes x as ({batch}, n, dim), got {tuple(x.shape)}")


def new_choice(router: CausalRouter, batch: int) -> ChoiceCache:
    """Return the cache of a router that has seen no token."""
    weight = router.weight
    options: dict[str, Any] = {
        "dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device
    }  # fmt: skip
    return ChoiceCache(
        torch.full((batch, router.memory), -math.inf, **options), torch.full((batch,), -math.inf, **options),
        torch.zeros(batch, dtype=torch.int64, device=weight.device), torch.zeros(batch, **options),
    )  # fmt: skip


def choose(router: CausalRouter, share: float, scores: Tensor, cache: ChoiceCache) -> Tensor:
    """Take the scores (batch,) of one more token; return its gates (batch,), 0 where it is not chosen."""
    numerator, denominator = fraction(share)
    i, scores = cache.position, scores.to(cache.scores.dtype)
    if i < router.block or i % router.block == 0:
        cache.threshold = ranked(cache.scores, (numerator, denominator))
    start = i // router.block * router.block
    budget = -(-(start + router.block) * numerator // denominator)
    chosen = (scores > cache.threshold) & (cache.taken < budget)
    gates = ((cache.threshold - scores) / router.eps).exp().add(1).reciprocal()
    cache.scores[:, i % router.memory] = scores
    cache.taken = cache.taken + chosen
    cache.position, cache.gates = i + 1, torch.where(chosen, gates, 0.0)
    return cache.gates


def chosen_rows(gates: Tensor) -> Tensor | slice | None:
    """Return the rows that the heavy branch runs on: the chosen ones, or on a GPU all, of which the others add 0.

    To read which rows are chosen, the host would wait for the GPU longer than the branch takes for a few tokens. None
    means no row. All rows are a slice, which copies no keys and values.
    """
    if gates.device.type != "cpu":
        return slice(None)
    rows = gates.nonzero()[:, 0]
    if not len(rows):
        return None
    return slice(None) if len(rows) == len(gates) else rows


def add_to_rows(y: Tensor, update: Tensor, gates: Tensor, rows: Tensor | slice) -> Tensor:
    """Return y with each of the rows' update added, times its gate."""
    update = (update * gates[rows, None]).to(y.dtype)
    return y + update if isinstance(rows, slice) else y.index_add(0, rows, update)


def fill_choice(router: CausalRouter, share: float, output: RouterOutput, cache: ChoiceCache) -> None:
    """Fill the cache as steps through the n > 0 tokens of a full forward would."""
    scores, n = output.scores.to(cache.scores.dtype), output.scores.shape[1]
    start = (n - 1) // router.block * router.block
    # the threshold of the last block; in the first block each step computes its own
    past = scores[:, max(0, start - router.memory) : start]
    cache.threshold = ranked(F.pad(past, (1, 0), value=-math.inf), fraction(share))
    last = torch.arange(max(0, n - router.memory), n, device=scores.device)
    cache.scores[:, last % router.memory] = scores[:, last]
    cache.taken = (output.indices >= 0).sum(-1)
    cache.gates = torch.where(output.indices == n - 1, output.gates, 0.0).sum(-1).to(cache.gates.dtype)
    cache.position = n


def feed_forward_step(layer: RoutedFeedForward, x: Tensor, cache: ChoiceCache) -> Tensor:
    """Return the layer's output (batch, dim) for one more token (batch, dim)."""
    router = check_router(layer, "router", layer.k, CausalRouter)
    _check_step(layer, x, router.dim, len(cache.taken))
    gates = choose(router, float(layer.k), router.scores(x[:, None])[:, 0], cache)
    y: Tensor = layer.light(x)
    rows = chosen_rows(gates)
    return y if rows is None else add_to_rows(y, layer.heavy(x[rows]), gates, rows)


def new_attention(layer: RoutedAttention, batch: int) -> AttentionCache:
    """Return the cache of a layer that has seen no token."""
    if not layer.causal:
        raise ValueError("RoutedAttention: decoding needs causal=True; this layer's tokens see later ones")
    router_q = check_router(layer, "router_q", layer.k_q, CausalRouter)
    check_router(layer, "router_kv", layer.k_kv, Router)
    light, heavy, w = layer.light, layer.heavy, layer.window
    options: dict[str, Any] = {"dtype": light.qkv.weight.dtype, "device": light.qkv.weight.device}
    wide = torch.promote_types(options["dtype"], torch.float32)
    return AttentionCache(
        new_choice(router_q, batch), torch.zeros(2, batch, 2 * w, light.heads, light.dim_head, **options),
        torch.zeros(batch, w, layer.dim, **options), torch.zeros(batch, w, dtype=wide, device=options["device"]),
        torch.zeros(2, batch, LEAST, heavy.heads, heavy.dim_head, **options),
        torch.zeros(batch, LEAST, dtype=torch.int64, device=options["device"]),
    )  # fmt: skip


def attention_step(layer: RoutedAttention, x: Tensor, cache: AttentionCache) -> Tensor:
    """Return the layer's output (batch, dim) for one more token (batch, dim)."""
    router_q = check_router(layer, "router_q", layer.k_q, CausalRouter)
    router_kv = check_router(layer, "router_kv", layer.k_kv, Router)
    _check_step(layer, x, layer.dim, len(cache.at))
    i, w, heavy = cache.queries.position, layer.window, layer.heavy
    token, slot = x[:, None], i % layer.window
    y = _near(layer, token, cache, i)[:, 0] + layer.null
    # as queries and as keys, in one read
    scores = score(token, torch.cat((router_q.directions(), router_kv.directions())), eps=NORM_EPS)[..., 0]
    gates = choose(router_q, float(layer.k_q), scores[:, 0], cache.queries)
    rows = chosen_rows(gates)
    if rows is not None:
        of_rows, update = token[rows], -layer.null.to(y.dtype)
        if cache.count:
            q = heavy.q(heavy.norm_q(of_rows)).unflatten(-1, (heavy.heads, heavy.dim_head))
            keys, values = cache.far[:, rows, : cache.count]
            update = update + heavy.out(_attend(_rotated(q, i), keys, values).flatten(2))[:, 0]
        y = add_to_rows(y, update.expand(len(of_rows), -1), gates, rows)
    cache.tokens[:, slot], cache.scores[:, slot] = x, scores[:, 1].to(cache.scores.dtype)
    if slot == w - 1:
        chosen = router_kv.decide(cache.scores, layer.k_kv)
        _give(layer, cache.tokens, chosen.indices, chosen.gates, i + 1 - w, cache)
    return y


def _near(layer: RoutedAttention, token: Tensor, cache: AttentionCache, i: int) -> Tensor:
    """Return the local attention of token i (batch, 1, dim), and keep its key and value."""
    light, w = layer.light, layer.window
    heads = light.qkv(light.norm(token)).unflatten(-1, (3, light.heads, light.dim_head)).flatten(2, 3)
    # queries and keys turn in one call
    qk, v = _rotated(heads[:, :, : 2 * light.heads], i), heads[:, 0, 2 * light.heads :]
    if i % w == 0:
        # this window becomes the one before
        cache.near[:, :, :w] = cache.near[:, :, w:].clone()
    end = w + i % w + 1
    cache.near[0, :, end - 1], cache.near[1, :, end - 1] = qk[:, 0, light.heads :], v
    keys, values = cache.near[:, :, (0 if i >= w else w) : end]
    return light.out(_attend(qk[:, :, : light.heads], keys, values).flatten(2))  # type: ignore[no-any-return]


def _rotated(x: Tensor, position: int) -> Tensor:
    return rotary(x, torch.full((1,), position, device=x.device))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of (batch, 1, heads, width) to keys and values (batch, n, heads, width)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _give(layer: RoutedAttention, tokens: Tensor, at: Tensor, gates: Tensor, start: int, cache: AttentionCache) -> None:
    """Append keys and values of the tokens (batch, n, dim) at `at` (batch, m); `start`: the first one's position."""
    heavy, m = layer.heavy, at.shape[1]
    rows = heavy.kv(heavy.norm_kv(gather(tokens, at)))
    k, v = rows.unflatten(-1, (2, heavy.heads, heavy.dim_head)).unbind(2)
    end = cache.count + m
    if end > cache.at.shape[1]:
        more = max(end, 2 * cache.at.shape[1]) - cache.at.shape[1]
        cache.far, cache.at = F.pad(cache.far, (0, 0, 0, 0, 0, more)), F.pad(cache.at, (0, more))
    new = slice(cache.count, end)
    cache.far[0, :, new], cache.at[:, new] = rotary(k, at + start), at + start
    cache.far[1, :, new] = v * gates.to(v.dtype)[..., None, None]
    cache.count = end


def attention_prefill(layer: RoutedAttention, x: Tensor, cache: AttentionCache) -> Tensor:
    """Return the layer's outputs (batch, n, dim) by its full forward, and fill the cache."""
    _check_prefill(layer, x, cache.queries.position, len(cache.at))
    router_q = check_router(layer, "router_q", layer.k_q, CausalRouter)
    check_router(layer, "router_kv", layer.k_kv, Router)
    if not x.shape[1]:
        return layer(x)
    y, routing = layer(x, return_routing=True)
    n, w, light = x.shape[1], layer.window, layer.light
    fill_choice(router_q, float(layer.k_q), routing.q, cache.queries)
    first, whole = (n - 1) // w * w, n // w * w
    # a whole last window has given its keys too
    quota = routing.kv.indices.shape[1] // -(-n // w)
    given = whole // w * quota
    if given:
        _give(layer, x, routing.kv.indices[:, :given], routing.kv.gates[:, :given], 0, cache)
    cache.tokens[:, : n - first] = x[:, first:]
    cache.scores[:, : n - first] = routing.kv.scores[:, first:].to(cache.scores.dtype)
    begin = max(0, first - w)
    _, k, v = light.qkv(light.norm(x[:, begin:])).unflatten(-1, (3, light.heads, light.dim_head)).unbind(2)
    slots = slice(begin - first + w, n - first + w)
    cache.near[0, :, slots] = rotary(k, torch.arange(begin, n, device=x.device))
    cache.near[1, :, slots] = v
    return y


def feed_forward_prefill(layer: RoutedFeedForward, x: Tensor, cache: ChoiceCache) -> Tensor:
    """Return the layer's outputs (batch, n, dim) by its full forward, and fill the cache."""
    _check_prefill(layer, x, cache.position, len(cache.taken))
    router = check_router(layer, "router", layer.k, CausalRouter)
    if not x.shape[1]:
        return layer(x)
    y, routing = layer(x, return_routing=True)
    fill_choice(router, float(layer.k), routing, cache)
    return y


def new_block(layer: RoutedBlock, batch: int) -> BlockCache:
    """Return the cache of a block that has seen no token."""
    if isinstance(batch, bool) or not isinstance(batch, int):
        raise TypeError(f"RoutedBlock: batch must be an int, got {type(batch).__name__}")
    if batch < 0:
        raise ValueError(f"RoutedBlock: batch must be ≥ 0, got {batch}")
    if not layer.attention.causal:
        raise ValueError("RoutedBlock: decoding needs causal=True; this block's tokens see later ones")
    attention = new_attention(layer.attention, batch)
    router = check_router(layer.feed_forward, "router", layer.feed_forward.k, CausalRouter)
    return BlockCache(attention, new_choice(router, batch))


__all__ = ["AttentionCache", "BlockCache", "ChoiceCache", "attention_prefill", "attention_step", "new_block"]
