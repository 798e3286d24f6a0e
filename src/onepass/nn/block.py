"""`RoutedBlock`: routed attention, then a routed feed-forward, each added to the residual stream."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from onepass.fused import decoding

from .attention import AttentionRouting, HeavyAttention, RoutedAttention
from .cache import AttentionCache, Block, BlockCache, ChoiceCache, Clock
from .calls import has_no_overrides
from .causal import CausalRouter, router_of_windows
from .count import check_count, check_number, refuse_gone
from .local_attention import LocalAttention
from .routed import RoutedFeedForward
from .router import NORM_EPS, Router, RouterOutput

if TYPE_CHECKING:
    from .calls import RoutedCall


class BlockRouting(NamedTuple):
    """The choices of a `RoutedBlock`.

    Attributes:
        attention: an `AttentionRouting`: queries, and keys with values.
        feed_forward: the `RouterOutput` of the feed-forward.
    """

    attention: AttentionRouting
    feed_forward: RouterOutput


class RoutedBlock(Block):
    r"""A transformer block that spends heavy compute on k tokens: ``h = x + attention(x)``, ``y = h + ff(h)``.

    `RoutedAttention` and `RoutedFeedForward` with pre-norm residuals (the norms are inside, one per branch).

    A step over few tokens waits for the host: docs/performance.md compares it with a dense one; `graphed` helps.

    Args:
        dim: width of the tokens.
        k: how many tokens the heavy feed-forward sees: an int, or a share 0 < k ≤ 1 of the real tokens.
        k_q: how many queries the heavy attention sees; default: k.
        k_kv: how many keys and values it sees; default: 2·k (a share: at most 1).
        heads, dim_head, light_heads, window: as `RoutedAttention`.
        light_mult, heavy_mult, bias: as `RoutedFeedForward`. With dim 256 and 512, ``light_mult=2`` was better
            in both tasks of docs/lab/ablate.md.
        dropout: probability of a zero in what a layer adds, in training; above 0 additions are not fused.
        causal: no output depends on a later token: for language models.
        device, dtype: of all parameters.

    Shapes: ``block(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype, mask ``(batch, n)`` bool, True at
    real tokens, gives y like x, ``block(x, mask, return_routing=True)`` ``(y, BlockRouting)``. Packed sequences: as
    `Routed`. Works under autocast, `torch.compile` and activation checkpointing.

    Raises:
        TypeError: a k is neither int nor float, or a size is not an int.
        ValueError: a size is out of range.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedBlock
        >>> block = RoutedBlock(32, k=1 / 16, heads=2, dim_head=16, window=16)
        >>> mask = torch.arange(128) < torch.tensor([[128], [90]])
        >>> y, routing = block(torch.randn(2, 128, 32), mask, return_routing=True)
        >>> y.shape, routing.feed_forward.indices.shape, routing.attention.kv.indices.shape
        (torch.Size([2, 128, 32]), torch.Size([2, 8]), torch.Size([2, 16]))
    """

    def __init__(
        self, dim: int, k: int | float, *, k_q: int | float | None = None, k_kv: int | float | None = None,
        heads: int = 8, dim_head: int = 64, light_heads: int | None = None, window: int = 256, light_mult: float = 0.5,
        heavy_mult: float = 4, bias: bool = True, causal: bool = False, dropout: float = 0.0,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **gone: NoReturn,
    ) -> None:  # fmt: skip
        super().__init__()
        check_count("RoutedBlock", "k", k)
        refuse_gone("RoutedBlock", gone)
        check_number("RoutedBlock", "dropout", dropout, "between 0 and 1", lambda dropout: 0 <= dropout <= 1)
        if k_kv is None:
            k_kv = min(1.0, 2 * k) if isinstance(k, float) else 2 * k
        self.attention = RoutedAttention(
            dim, k if k_q is None else k_q, k_kv, heads=heads, dim_head=dim_head, light_heads=light_heads,
            window=window, causal=causal, device=device, dtype=dtype,
        )  # fmt: skip
        self.feed_forward = RoutedFeedForward(
            dim, k, router=router_of_windows(dim, window, device, dtype) if causal else None, light_mult=light_mult,
            heavy_mult=heavy_mult, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.dropout = dropout

    sizes = "window {0.window}, heads {0.light.heads}, {0.heavy.heads} of {0.heavy.dim_head}, k {1.k} {0.k_q} {0.k_kv}"
    if TYPE_CHECKING:
        __call__: RoutedCall[BlockRouting]

    def composed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, BlockRouting]:
        """Compute layer by layer."""
        x, attention = self._added(self.attention, x, mask)
        x, feed_forward = self._added(self.feed_forward, x, mask)
        return x, BlockRouting(attention, feed_forward)

    @torch.no_grad()
    def cached(self, x: Tensor, mask: Tensor | None, cache: BlockCache, return_routing: bool) -> tuple[Tensor, Any]:
        """Read a prompt, or one more token of each sequence; a step by kernels returns None for the routing."""
        self.check_decodes()
        self.attention.check(x)
        with self.reading(x, mask, cache):
            kernels = self._fits_kernels(x)
            if x.shape[1] == 1 and not return_routing and kernels:
                cache.attention.begin_window(self.attention)
                x = decoding.attention(self.attention, cache.attention, x, NORM_EPS)
                return decoding.feed_forward(self.feed_forward, cache.feed_forward, x, NORM_EPS), None
            y, attention = self.attention(x, mask, return_routing=True, cache=cache.attention)  # type: ignore[call-overload]
            h = x + self.dropped(y)
            y, feed_forward = self.feed_forward(h, mask, return_routing=True, cache=cache.feed_forward)  # type: ignore[call-overload]
            if kernels and x.shape[1] > 1:
                # a threshold is a token's score: keep scores with the bits of a step's kernel, so that equal tokens tie
                choices, routers = (attention.q, feed_forward), (self.attention.router_q, self.feed_forward.router)
                caches = cache.attention.queries, cache.feed_forward
                for choice_cache, router, tokens, output in zip(caches, routers, (x, h), choices, strict=True):
                    choice_cache.fill(router, tokens, output._replace(scores=decoding.scores(router, tokens, NORM_EPS)))
            return h + self.dropped(y), BlockRouting(attention, feed_forward)

    def _fits_kernels(self, x: Tensor) -> bool:
        """Return whether kernels can compute a step: default modules in one dtype, without hooks."""
        attention, feed_forward = self.attention, self.feed_forward
        return (
            decoding.fits(x)
            and not (self.training and self.dropout)
            and has_no_overrides(attention, feed_forward)
            and attention.fused_dtype(x, None) is not None
            and feed_forward.fused_dtype(x, None) is not None
        )

    def caches(self, clock: Clock) -> tuple[AttentionCache, ChoiceCache]:
        """Return the caches of both layers."""
        router, k = self.feed_forward.router, self.feed_forward.k
        return AttentionCache(self.attention, clock), ChoiceCache(router, k, clock)

    def check_decodes(self) -> None:
        """Raise TypeError unless each part has the class whose forward a step replaces, and each k is a share."""
        super().check_decodes()
        for name, kind in _CLASSES:
            module = attrgetter(name)(self) if name else self
            if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in module.__dict__:
                got = type(module).__name__ if type(module) is not kind else "one whose forward is overridden"
                raise TypeError(
                    f"RoutedBlock: decoding needs {name or 'itself'} to be a {kind.__name__}, got {got}: a step would "
                    "not run its forward; use hooks, which run in steps too"
                )
        for name, k in (("k_q", self.attention.k_q), ("k_kv", self.attention.k_kv), ("k", self.feed_forward.k)):
            if not isinstance(k, float):
                raise TypeError(
                    f"RoutedBlock: decoding needs {name} as a share, a float 0 < {name} ≤ 1; got the int {k}, which is "
                    "a share of a length that is not known yet"
                )

    def _added(self, layer: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Return x + layer(x) and the routing: from one fused node where no dropout or hook needs layer(x) itself."""
        drops = self.training and self.dropout > 0
        if not drops and type(layer) in (RoutedAttention, RoutedFeedForward) and has_no_overrides(layer):
            layer.check(x)
            dtype = layer.fused_dtype(x, mask)
            if dtype is not None:
                return layer.fused(x, mask, dtype, residual=True)  # type: ignore[no-any-return]
        y, routing = layer(x, mask, return_routing=True)
        return x + self.dropped(y), routing


# a step runs its own code in place of the forward of these classes
_CLASSES: list[tuple[str, type[nn.Module]]] = [
    ("", RoutedBlock), ("attention", RoutedAttention), ("attention.light", LocalAttention),
    ("attention.heavy", HeavyAttention), ("attention.router_q", CausalRouter), ("attention.router_kv", Router),
    ("feed_forward", RoutedFeedForward), ("feed_forward.router", CausalRouter),
]  # fmt: skip
