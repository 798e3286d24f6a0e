"""`RoutedBlock`: routed attention, then a routed feed-forward, each added to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import decoding
from .attention import AttentionRouting, RoutedAttention
from .causal import router_of_windows
from .count import check_count, check_flag
from .feed_forward import has_no_overrides
from .packed import packed
from .routed import RoutedFeedForward
from .router import RouterOutput

if TYPE_CHECKING:
    from .calls import RoutedCall
    from .decoding import BlockCache


class BlockRouting(NamedTuple):
    """The choices of a `RoutedBlock`.

    Attributes:
        attention: an `AttentionRouting`: queries, and keys with values.
        feed_forward: the `RouterOutput` of the feed-forward.
    """

    attention: AttentionRouting
    feed_forward: RouterOutput


class RoutedBlock(nn.Module):
    r"""A transformer block that spends heavy compute on k tokens: ``h = x + attention(x)``, ``y = h + ff(h)``.

    `RoutedAttention` and `RoutedFeedForward` with pre-norm residuals (the norms are inside, one per branch).

    Args:
        dim: width of the tokens.
        k: how many tokens the heavy feed-forward sees: an int, or a share 0 < k ≤ 1 of the real tokens.
        k_q: how many queries the heavy attention sees; default: k.
        k_kv: how many keys and values it sees; default: 2·k (a share: at most 1).
        heads, dim_head, light_heads, window: as `RoutedAttention`.
        light_mult, heavy_mult, bias, balance: as `RoutedFeedForward`. With dim 256, ``light_mult=2`` was better in both
            tasks of docs/equal_time.md.
        causal: no output depends on a later token: for language models.
        device, dtype: of all parameters.

    Shapes: ``block(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype, mask ``(batch, n)`` bool, True at
    real tokens, gives y like x; ``block(x, mask, return_routing=True)`` gives ``(y, BlockRouting)``. Packed
    sequences (``cu_seqlens=``, ``max_seqlen=``): as `Routed`. Works under autocast, `torch.compile` and activation
    checkpointing.

    Raises:
        TypeError: a k is neither int nor float, a size is not an int, or balance is not a bool.
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
        self,
        dim: int,
        k: int | float,
        *,
        k_q: int | float | None = None,
        k_kv: int | float | None = None,
        heads: int = 8,
        dim_head: int = 64,
        light_heads: int | None = None,
        window: int = 256,
        light_mult: float = 0.5,
        heavy_mult: float = 4,
        bias: bool = True,
        causal: bool = False,
        balance: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("RoutedBlock", "k", k)
        check_flag("RoutedBlock", "balance", balance)
        if k_kv is None:
            k_kv = min(1.0, 2 * k) if isinstance(k, float) else 2 * k
        self.attention = RoutedAttention(
            dim,
            k if k_q is None else k_q,
            k_kv,
            heads=heads,
            dim_head=dim_head,
            light_heads=light_heads,
            window=window,
            causal=causal,
            device=device,
            dtype=dtype,
        )
        self.feed_forward = RoutedFeedForward(
            dim,
            k,
            light_mult=light_mult,
            heavy_mult=heavy_mult,
            router=router_of_windows(dim, window, device, dtype) if causal else None,
            bias=bias,
            balance=balance,
            device=device,
            dtype=dtype,
        )

    if TYPE_CHECKING:
        __call__: RoutedCall[BlockRouting]

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False, *,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> Tensor | tuple[Tensor, BlockRouting]:  # fmt: skip
        if cu_seqlens is not None or max_seqlen is not None:
            return packed(self, x, mask, return_routing, cu_seqlens, max_seqlen)  # type: ignore[no-any-return]
        x, attention = self._added(self.attention, x, mask)
        x, feed_forward = self._added(self.feed_forward, x, mask)
        return (x, BlockRouting(attention, feed_forward)) if return_routing else x

    def new_cache(self, batch: int) -> BlockCache:
        """Return the cache of `batch` sequences without tokens, for :meth:`step` and :meth:`prefill`.

        Its tensors have the device and dtype of the block's weights; ``cache.nbytes`` is their size.

        Raises:
            TypeError: a k is an int, which is a share of a length that is not known yet; a router is not a default one;
                or batch is not an int.
            ValueError: the block is not causal, or batch < 0.
        """
        return decoding.new_block(self, batch)

    @torch.no_grad()
    def step(self, x: Tensor, cache: BlockCache) -> Tensor:
        """Return the outputs (batch, dim) of one more token (batch, dim) of each sequence, and update the cache.

        The choices are those of the full forward of all tokens so far, and the output equals its last one to rounding.
        Nothing is differentiable. On a CPU heavy branches run on the chosen rows alone, on a GPU on all, so that the
        host waits for nothing.
        ``cache.attention.queries.gates`` and ``cache.feed_forward.gates`` hold this step's gates, 0 where not chosen.

        Example:
            >>> import torch
            >>> from onepass.nn import RoutedBlock
            >>> block = RoutedBlock(32, k=1 / 4, heads=2, dim_head=16, window=8, causal=True).eval()
            >>> x, cache = torch.randn(2, 21, 32), block.new_cache(2)
            >>> steps = torch.stack([block.step(x[:, i], cache) for i in range(21)], 1)
            >>> torch.allclose(steps, block(x), atol=1e-5)
            True
        """
        x = x + decoding.attention_step(self.attention, x, cache.attention)
        return x + decoding.feed_forward_step(self.feed_forward, x, cache.feed_forward)

    @torch.no_grad()
    def prefill(self, x: Tensor, cache: BlockCache) -> Tensor:
        """Return the outputs of tokens (batch, n, dim) by the full forward, and make a new cache that of their steps.

        Raises:
            ValueError: the cache has seen tokens, or shapes don't fit.
        """
        x = x + decoding.attention_prefill(self.attention, x, cache.attention)
        return x + decoding.feed_forward_prefill(self.feed_forward, x, cache.feed_forward)

    @staticmethod
    def _added(layer: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Return x + layer(x) and the routing: from one node where nothing looks at the layer's own output."""
        if type(layer) in (RoutedAttention, RoutedFeedForward) and has_no_overrides(layer):
            layer._check_tokens(x)
            dtype = layer._fused_dtype(x, mask)
            if dtype is not None:
                return layer._fused(x, mask, dtype, residual=True)  # type: ignore[no-any-return]
        y, routing = layer(x, mask, return_routing=True)
        return x + y, routing
