"""Caches for decoding: what causal layers keep of earlier tokens.

All tensors have a fixed size and all lengths are tensors, so that a CUDA graph can repeat a step. A step makes the
choices of the full forward, because a share's running threshold and budget do not depend on the length. Layers are
typed as Any, because they import this module.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.ops.causal_choice.definition import fraction, ranked
from onepass.ops.routing.op import gather
from onepass.ops.span_attention.op import rotary

from .calls import Layer
from .count import check_dtype, check_int, count
from .packed import check_mask
from .router import RouterOutput, k_for

# torch's first choice on Hopper, cuDNN, takes 6 ms to plan each new number of keys
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Clock(nn.Module):
    """How many tokens each sequence has: on the device for the layers, and on the host, which decides what a step does.

    Attributes:
        position: ``(batch,)`` int64.
        counts: the same numbers on the host.
        lengths: ``(batch,)`` int64: tokens of each prompt while prompts are read; None in a step.
        read: how many tokens of each sequence this call reads, on the host; empty between calls.
        choices, last: of a prompt, until its end: each router's choice; what `last_in` returned.
        pending: buffers and their contents after the prompt, copied at its end.
        periods: block and window sizes of the layers; see `turns`.
        forced: what `turns` returns while a graph is captured; None: the counts decide.
    """

    position: Tensor

    def __init__(self, batch: int, max_tokens: int, device: torch.device) -> None:
        super().__init__()
        self.max_tokens, self.counts = max_tokens, [0] * batch
        self.periods: set[int] = set()
        self.forced: bool | None = None
        self.register_buffer("position", torch.zeros(batch, dtype=torch.int64, device=device))
        self.lengths: Any = None
        self.read: list[int] = []
        self.choices: dict[ChoiceCache, RouterOutput] = {}
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.last: dict[int, Tensor] = {}

    def turns(self, period: int) -> bool:
        """Return whether the next token of some sequence is in the first `period` tokens or begins a period."""
        return any(c < period or c % period == 0 for c in self.counts) if self.forced is None else self.forced

    def any_turns(self) -> bool:
        """Return whether `turns` is True for some layer."""
        return any(self.turns(period) for period in self.periods)

    def check_room(self, n: int) -> None:
        """Raise ValueError unless the caches are whole and can hold n more tokens of each sequence."""
        if self.read and self.lengths is None and self.periods:
            raise ValueError("decoding: a step raised halfway, and some of its choices are counted: make a new cache")
        if (last := max(self.counts) + n) > self.max_tokens:
            have = f"the cache holds max_tokens = {self.max_tokens} tokens, got token {last}"
            raise ValueError(f"decoding: {have}: make one with a larger max_tokens")

    def begin(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Check tokens (batch, n, …) that the layers are about to read, a prompt or one more of each sequence."""
        batch, n = len(self.counts), x.shape[1]
        if len(x) != batch:
            raise ValueError(f"decoding: the cache holds {batch} sequences, got {len(x)}: make a cache for as many")
        if x.device != self.position.device:
            raise ValueError(f"decoding: the cache is on {self.position.device}, got tokens on {x.device}: move one")
        if n > 1 and any(self.counts):
            raise ValueError(f"decoding: a prompt needs a new cache, got one of {max(self.counts)} tokens")
        self.check_room(n)
        self.choices, self.pending, self.last = {}, [], {}
        lengths = torch.full_like(self.position, n) if mask is None else mask.sum(-1)
        if mask is not None:
            prefix = torch.arange(n, device=x.device) < lengths[:, None]
            if not bool((mask == prefix).all() & mask[:, 0].all()):
                raise ValueError("decoding: a prompt's mask must be True at its first tokens, at least one, then False")
        # the host waits before the layers have work, not after
        self.read = [n] * batch if mask is None else lengths.tolist()
        self.lengths = None if n == 1 else lengths

    def end(self) -> None:
        """Count the tokens that were read, and fill the buffers that wait for the end of a prompt."""
        if self.lengths is not None:
            _fill_choices(self)
            buffers, new = zip(*self.pending, strict=True)
            torch._foreach_copy_(list(buffers), list(new))
            self.choices, self.pending, self.last = {}, [], {}
        self.counts = [c + n for c, n in zip(self.counts, self.read, strict=True)]
        self.position += 1 if self.lengths is None else self.lengths
        self.lengths, self.read = None, []

    def clear(self) -> None:
        """Forget all tokens."""
        self.position.zero_()
        self.counts, self.lengths, self.read = [0] * len(self.counts), None, []

    def last_in(self, places: int) -> Tensor:
        """Return (batch, places): in column c the prompt's last token i with i mod places = c; negative: none."""
        if places not in self.last:
            last = self.lengths[:, None] - 1
            self.last[places] = last - (last - torch.arange(places, device=last.device)) % places
        return self.last[places]

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.counts, self.read = self.position.tolist(), []


class _Cache(nn.Module):
    """Buffers of a layer; the clock belongs to the whole model."""

    clock: Clock

    def __init__(self, clock: Clock, **buffers: Tensor) -> None:
        super().__init__()
        # not registered as a submodule, because many layers share it
        self.__dict__["clock"] = clock
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def put(self, at: Tensor, due: Tensor | None = None, **new: Tensor) -> None:
        """Write `new` tokens (batch, m, …) to the places `at` (batch, m) of buffers of these names, where `due`."""
        rows = torch.arange(len(at), device=at.device)[:, None]
        for name, tokens in new.items():
            buffer = getattr(self, name)
            tokens = tokens.to(buffer.dtype)
            buffer.index_put_((rows, at), tokens if due is None else torch.where(due, tokens, buffer[rows, at]))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, unused memory included."""
        return sum(b.nbytes for b in self.buffers())


def clear(buffers: Sequence[tuple[str, Tensor]]) -> None:
    """Forget all tokens in the named buffers of caches."""
    for dtype in {b.dtype for _, b in buffers}:
        torch._foreach_zero_([b for _, b in buffers if b.dtype == dtype])
    if lowest := [b for name, b in buffers if name.endswith(("scores", "threshold"))]:
        torch._foreach_add_(lowest, -math.inf)


class ChoiceCache(_Cache):
    """What a `CausalRouter` keeps.

    Attributes:
        scores: ``(batch, memory)``: those of the last tokens, token i in column i mod memory; −∞ in unused columns.
        threshold: ``(batch,)``: of the last token's block.
        taken: ``(batch,)`` int64: how many tokens were chosen.
    """

    scores: Tensor
    threshold: Tensor
    taken: Tensor

    def __init__(self, router: Any, share: float, clock: Clock) -> None:
        dtype, batch = torch.promote_types(router.weight.dtype, torch.float32), len(clock.counts)
        lowest = torch.full((batch, router.memory), -math.inf, dtype=dtype, device=router.weight.device)
        taken = torch.zeros(batch, dtype=torch.int64, device=lowest.device)
        super().__init__(clock, scores=lowest, threshold=lowest[:, 0].clone(), taken=taken)
        self.share, self.block = fraction(share), router.block
        clock.periods.add(router.block)

    def choose(self, router: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Take scores (batch, 1) of one more token; return its position or −1, and its gate or 0, (batch, 1)."""
        self.refresh(router)
        numerator, denominator = self.share
        i, score, block = self.clock.position, scores[:, 0].to(self.scores.dtype), router.block
        budget = ((i // block + 1) * (block * numerator) + denominator - 1) // denominator
        chosen = (score > self.threshold) & (self.taken < budget)
        gates = ((self.threshold - score) / router.eps).exp().add(1).reciprocal()
        self.scores.scatter_(1, (i % router.memory)[:, None], score[:, None])
        self.taken += chosen
        return torch.where(chosen, i, -1)[:, None], torch.where(chosen, gates, 0.0)[:, None]

    def refresh(self, router: Any) -> None:
        """Compute the threshold anew for sequences whose next token begins a block, or is in the first one."""
        if self.clock.turns(router.block):
            i = self.clock.position
            due = (i < router.block) | (i % router.block == 0)
            self.threshold.copy_(torch.where(due, ranked(self.scores, self.share), self.threshold))

    def fill(self, layer: Any, x: Tensor, routing: RouterOutput) -> None:
        """Keep the routing of a prompt: at its end the cache becomes what steps through its tokens would leave."""
        self.clock.choices[self] = routing


def _fill_choices(clock: Clock) -> None:
    """Fill all choice caches after a prompt; routers of one block, share and shape are computed as one batch."""
    groups: dict[Any, list[tuple[ChoiceCache, RouterOutput]]] = defaultdict(list)
    for cache, output in clock.choices.items():
        groups[cache.block, cache.share, cache.scores.shape, cache.scores.dtype].append((cache, output))
    for (block, share, (_, memory), dtype), group in groups.items():
        scores = torch.stack([output.scores.to(dtype) for _, output in group])
        taken = (torch.stack([output.indices for _, output in group]) >= 0).sum(-1)
        start = (clock.lengths - 1) // block * block
        earlier = start[:, None] - 1 - torch.arange(memory, device=scores.device)
        # in the first block each step computes its own threshold
        new = _scores_at(scores, clock.last_in(memory)), ranked(_scores_at(scores, earlier), share), taken
        for name, rows in zip(("scores", "threshold", "taken"), new, strict=True):
            torch._foreach_copy_([getattr(cache, name) for cache, _ in group], list(rows))


def _scores_at(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the scores (routers, batch, m) of tokens (batch, m), −∞ where there is none."""
    return torch.where(tokens >= 0, scores.gather(2, tokens.clamp_min(0).expand(len(scores), -1, -1)), -math.inf)


def _keys_and_values(layer: Any, weight: Tensor, places: int, clock: Clock) -> dict[str, Tensor]:
    """Return empty places in the dtype that a layer computes in; quantised weights are integers, or no tensors."""
    like = next(p for p in (weight, *layer.parameters()) if isinstance(p, Tensor) and p.is_floating_point())
    shape = len(clock.counts), places, layer.heads, layer.dim_head
    return {name: torch.zeros(shape, dtype=like.dtype, device=like.device) for name in ("keys", "values")}


class KeyCache(_Cache):
    """Keys and values of a causal `LocalAttention` or `TransformerBlock`: of the last two windows, or of all tokens.

    Attributes:
        keys, values: ``(batch, places, heads, dim_head)``: token i's in place i mod places, keys rotated. There are
            2·window places, or max_tokens without a window.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: Any, clock: Clock) -> None:
        places = 2 * layer.window if layer.window else clock.max_tokens
        super().__init__(clock, **_keys_and_values(layer, layer.qkv.weight, places, clock))
        self.window = layer.window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of one more token (batch, 1, heads, dim_head), whose query and key are rotated."""
        i, places = self.clock.position, self.keys.shape[1]
        self.put((i % places)[:, None], keys=k, values=v)
        used = places if self.clock.forced is not None else min(places, max(self.clock.counts) + 1)
        age = (i[:, None] - torch.arange(used, device=i.device)) % places
        # the tokens of this window and of the one before
        max_age = i if self.window is None else (i % self.window + self.window).minimum(i)
        return _attend(q, self.keys[:, :used], self.values[:, :used], age <= max_age[:, None])

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Keep rotated keys and values (batch, n, heads, dim_head) of a prompt: all, or those of the last windows."""
        for buffer, new in ((self.keys, k), (self.values, v)):
            if self.window is None:
                self.clock.pending.append((buffer[:, : new.shape[1]], new))
            else:
                last = gather(new.flatten(2), self.clock.last_in(buffer.shape[1]))
                self.clock.pending.append((buffer, last.view(buffer.shape)))


class HeavyCache(_Cache):
    """What a causal `HeavyAttention` keeps.

    Attributes:
        keys, values: ``(batch, places, heads, dim_head)``: rotated keys, and gated values, that earlier windows gave.
        quota: how many each window gives.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: Any, window: int, quota: int, clock: Clock) -> None:
        # a window gives its keys to later windows alone, so the last one needs no places
        places = max(1, (clock.max_tokens - 1) // window) * quota
        super().__init__(clock, **_keys_and_values(layer, layer.kv.weight, places, clock))
        self.window, self.quota = window, quota
        clock.periods.add(window)

    def attend(self, q: Tensor, kv: Tensor, chosen: RouterOutput) -> Tensor:
        """Return the attention (batch, 1, heads, dim_head) of one more token to the keys of earlier windows.

        kv: ``(batch, m, 2, heads, dim_head)``: keys and values of the `chosen` tokens (batch, m) of the window before;
        m = 0 where no sequence begins a window.
        """
        if kv.shape[1]:
            self.give(kv, chosen)
        i = self.clock.position
        used = self.keys.shape[1]
        if self.clock.forced is None:
            used = max(1, min(used, max(self.clock.counts) // self.window * self.quota))
        count = (i // self.window * self.quota)[:, None]
        visible = torch.arange(used, device=i.device) < count
        y = _attend(rotary(q, i[:, None]), self.keys[:, :used], self.values[:, :used], visible)
        return torch.where(count[..., None, None] > 0, y, 0.0)

    def give(self, kv: Tensor, chosen: RouterOutput) -> None:
        """Keep the keys and values that the window before gives, for sequences that begin a window."""
        i = self.clock.position
        due = ((i % self.window == 0) & (i > 0))[:, None, None, None]
        window = (i // self.window - 1).clamp_min(0)[:, None]
        places = (window * self.quota + torch.arange(self.quota, device=i.device)) % self.keys.shape[1]
        k, v = rotary(kv[:, :, 0], chosen.indices), kv[:, :, 1] * chosen.gates.to(kv.dtype)[..., None, None]
        self.put(places, due, keys=k, values=v)

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Keep the rotated keys and gated values (batch, m, heads, dim_head) that the windows of a prompt gave."""
        n = min(self.keys.shape[1], keys.shape[1])
        torch._foreach_copy_([self.keys[:, :n], self.values[:, :n]], [keys[:, :n], values[:, :n]])


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return the attention of (batch, 1, heads, width) to keys (batch, n, heads, width) where `visible` (batch, n)."""
    q, k, v = (t.transpose(1, 2) for t in (q.to(k.dtype), k, v))
    with sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, visible[:, None, None]).transpose(1, 2)


class AttentionCache(_Cache):
    """What a causal `RoutedAttention` keeps.

    Attributes:
        queries, light, heavy: the caches of its parts.
        tokens: ``(batch, window, dim)``: the tokens of this window, token i in place i mod window.
    """

    tokens: Tensor

    def __init__(self, layer: Any, clock: Clock) -> None:
        light, quota = KeyCache(layer.light, clock), count(layer.k_kv, layer.window)
        super().__init__(clock, tokens=light.keys.new_zeros(len(clock.counts), layer.window, layer.dim))
        self.queries = ChoiceCache(layer.router_q, layer.k_q, clock)
        self.light, self.heavy = light, HeavyCache(layer.heavy, layer.window, quota, clock)

    def previous_window(self, layer: Any, begins_window: bool) -> tuple[Tensor, RouterOutput]:
        """Return the tokens (batch, m, dim) that the window before gives, and their routing.

        m = 0 where no sequence begins a window; where some do, `HeavyCache.attend` leaves out the tokens of the others.
        """
        if not begins_window:
            empty, scores = self.clock.position[:, None][:, :0], self.queries.scores[:, :0]
            return self.tokens[:, :0], RouterOutput(empty, empty.to(scores.dtype), scores)
        window = layer.window
        indices, gates, scores = layer.router_kv(self.tokens, k_for(layer.router_kv, layer.k_kv, window))
        start = (self.clock.position // window - 1) * window
        return gather(self.tokens, indices), RouterOutput(indices + start[:, None], gates, scores)

    def begin_window(self, layer: Any) -> None:
        """Keep what the window before gives, before kernels compute the step of a token that begins a window."""
        if self.clock.turns(layer.window):
            memories, chosen = self.previous_window(layer, True)
            heavy = layer.heavy
            kv = heavy.kv(heavy.norm_kv(memories)).unflatten(-1, (2, heavy.heads, heavy.dim_head))
            self.heavy.give(kv, chosen)

    def fill(self, layer: Any, x: Tensor, routing: Any) -> None:
        """Keep the last tokens of a prompt x (batch, n, dim) and its choice of queries; the parts keep their own."""
        self.queries.fill(layer, x, routing.q)
        self.clock.pending.append((self.tokens, gather(x, self.clock.last_in(layer.window))))

    def keep(self, x: Tensor) -> None:
        """Keep one more token (batch, 1, dim)."""
        self.put((self.clock.position % self.tokens.shape[1])[:, None], tokens=x)


class BlockCache(_Cache):
    """What a causal `RoutedBlock` or `TransformerBlock` keeps of the tokens before; ``cache.nbytes`` is its size.

    A module of buffers: ``state_dict``, ``load_state_dict``, ``to`` and ``copy.deepcopy`` save, move and copy it.
    """

    # `AttentionCache` and `ChoiceCache`, or `KeyCache` and None
    attention: Any
    feed_forward: Any

    def __init__(self, attention: Any, feed_forward: Any, sizes: str, owns_clock: bool) -> None:
        super().__init__(attention.clock)
        self.attention, self.feed_forward, self.sizes, self.owns_clock = attention, feed_forward, sizes, owns_clock
        if owns_clock:
            del self.__dict__["clock"]
            self.clock = attention.clock

    @property
    def position(self) -> int:
        """How many tokens the longest sequence has."""
        return max(self.clock.counts)


class Block(Layer):
    """Attention and a feed-forward, each added to x, with dropout on what they add; a causal one can decode."""

    dropout: float
    # the layers inside make DTensors plain, not the block: dropout then draws for the whole DTensor
    opens = False
    # caches(clock) → new caches of attention and feed-forward, or None; sizes: what they must agree on with the block
    caches: Any
    sizes: str

    def dropped(self, y: Tensor) -> Tensor:
        """Return y with dropout, in training."""
        return F.dropout(y, self.dropout, self.training)

    @contextmanager
    def reading(self: Any, x: Tensor, mask: Tensor | None, cache: Any) -> Iterator[None]:
        """Check a call before the cache changes; count its tokens (batch, n, dim), unless the model counts them."""
        name, sizes = type(self).__name__, self.sizes.format(self.attention, self.feed_forward)
        if (got := getattr(cache, "sizes", type(cache).__name__)) != sizes:
            wrong = ValueError if isinstance(cache, BlockCache) else TypeError
            raise wrong(f"{name}: cache must be what its own new_cache returned, with {sizes}; got {got}")
        check_mask(name, x, mask)
        light, light_cache = (getattr(part, "light", part) for part in (self.attention, cache.attention))
        for each, tensor in (("x", x), ("the cache", light_cache.keys)):
            check_dtype(name, tensor, light.qkv, each)
        if cache.owns_clock:
            cache.clock.begin(x, mask)
        yield
        if cache.owns_clock:
            cache.clock.end()

    def new_cache(self, batch: int, max_tokens: int = 4096, *, clock: Clock | None = None) -> BlockCache:
        """Return the cache of `batch` sequences without tokens, for ``block(x, mask, cache=cache)`` and `Decoder`.

        A first call may read prompts (batch, n, dim), each later one one more token (batch, 1, dim) of each sequence.
        Prompts of unequal lengths are padded at the end; mask ``(batch, n)`` is True at their tokens. Choices
        are those of the full forward of all tokens so far, outputs equal it to rounding. Hooks run, nothing is
        differentiable, and torch.compile leaves the call eager. The cache has the device and dtype of the weights, and
        room for `max_tokens` of each sequence, or for two windows. Blocks with one `clock` leave it to their model to
        count tokens.

        Raises:
            TypeError: batch or max_tokens is not an int; of a `RoutedBlock` a k is an int, or a part's class or forward
                is another one. In a call: cache and weights have two dtypes, as after ``block.half()`` (no autocast).
            ValueError: the block is not causal, or a size is < 1. In a call: the cache is full, of another batch or of
                a block of other sizes, a prompt comes after other tokens, or a `RoutedBlock`'s step raised before.

        Example:
            >>> import torch
            >>> from onepass.nn import RoutedBlock
            >>> block = RoutedBlock(32, k=1 / 4, heads=2, dim_head=16, window=8, causal=True).eval()
            >>> x, cache = torch.randn(2, 21, 32), block.new_cache(2)
            >>> steps = torch.cat([block(x[:, i : i + 1], cache=cache) for i in range(21)], 1)
            >>> torch.allclose(steps, block(x), atol=1e-5)
            True
        """
        check_int(type(self).__name__, "batch", batch)
        check_int(type(self).__name__, "max_tokens", max_tokens)
        self.check_decodes()
        device = next(self.parameters()).device
        attention, feed_forward = self.caches(clock or Clock(batch, max_tokens, device))
        return BlockCache(attention, feed_forward, self.sizes.format(self.attention, self.feed_forward), clock is None)

    def check_decodes(self) -> None:
        """Raise unless steps can compute what the full forward computes."""
        if not self.attention.causal:  # type: ignore[union-attr]
            name = type(self).__name__
            raise ValueError(f"{name}: decoding needs causal=True; this block's tokens see later ones")
