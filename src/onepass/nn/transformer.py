"""`TransformerBlock`: attention within windows or over all tokens, then a feed-forward or experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.core.eager import plain
from onepass.core.launch import next_power_of_2
from onepass.fused import decoding
from onepass.fused.runs import cached_for, neighbours
from onepass.ops.qk_norm_rope.op import qk_norm_rope
from onepass.ops.span_attention.definition import BASE
from onepass.ops.span_attention.op import span_attention

from .cache import Block, BlockCache, Clock, KeyCache
from .count import check_dtype, check_flag, check_int, check_number
from .experts import ExpertRouting, Experts
from .local_attention import check_heads
from .norm import RMSNorm
from .packed import check_tokens, checked_bounds, places, zero_padding
from .routed import FeedForward

if TYPE_CHECKING:
    from .calls import RoutedCall

# added to the mean of squares of a head
EPS = 1e-6


class Sequences(NamedTuple):
    """Packed tokens' positions in their sequences, and where each one's sequence begins and ends; (total,) int32."""

    positions: Tensor
    begin: Tensor
    end: Tensor


class SelfAttention(nn.Module):
    """``out(attention(qkv(rms_norm(x))))``: the attention of a `TransformerBlock`, without the residual.

    Queries and keys are normed per head and rotated by their positions (`onepass.qk_norm_rope`).
    """

    def __init__(self, dim: int, heads: int, dim_head: int, window: int | None, causal: bool, **factory: Any) -> None:
        super().__init__()
        self.dim, self.heads, self.dim_head, self.window, self.causal = dim, heads, dim_head, window, causal
        self.norm = RMSNorm(dim, **factory)
        self.qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False, **factory)
        self.q_weight, self.k_weight = (nn.Parameter(torch.empty(dim_head, **factory)) for _ in range(2))
        self.out = nn.Linear(heads * dim_head, dim, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights of the heads' norms to 1; submodules have their own `reset_parameters`."""
        nn.init.ones_(self.q_weight)
        nn.init.ones_(self.k_weight)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, packed: Sequences | None = None, cache: KeyCache | None = None
    ) -> Tensor:
        check_dtype("TransformerBlock", x, self.qkv)
        n, step, weights = x.shape[1], cache if x.shape[1] == 1 else None, (self.q_weight, self.k_weight)
        qkv = self.qkv(self.norm(x))
        if step is not None and decoding.fits(x):
            return self.out(decoding.attend(self, step, qkv, weights, EPS)[:, None])  # type: ignore[no-any-return]
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.dim_head)).unbind(2)
        positions = None if packed is None else packed.positions
        if step is not None:
            n, positions = step.clock.max_tokens, step.clock.position[:, None]
        cos, sin = angles(n, self.dim_head, q)
        q, k = qk_norm_rope(q, k, *weights, cos=cos, sin=sin, positions=positions, eps=EPS)
        if step is not None:
            return self.out(step.attend(q, k, v).flatten(2))  # type: ignore[no-any-return]
        if cache is not None:
            cache.keep(k, v)
        if self.window is None and mask is None and packed is None:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        else:
            # torch's attention would read a mask of n × n
            y = span_attention(q, k, v, *self.spans(n, q, packed), mask=mask)
        return self.out(y.flatten(2))  # type: ignore[no-any-return]

    def spans(self, n: int, like: Tensor, packed: Sequences | None) -> tuple[Tensor, Tensor]:
        """Return the first token that each of n tokens sees, and one past the last one, (n,) int32 each."""
        if packed is not None and self.window is None:  # a window's bounds take a GPU five launches more
            return packed.begin, packed.begin + packed.positions + 1 if self.causal else packed.end
        sizes = n, self.window or n + 1, self.causal
        return cached_for(neighbours, sizes, like) if packed is None else neighbours(*sizes, like.device, packed)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dim_head={self.dim_head}, window={self.window}, causal={self.causal}"


class TransformerBlock(Block):
    r"""A pre-norm transformer block: ``h = x + attention(x)``, ``y = h + feed_forward(h)``.

    .. math::
        h = x + \mathrm{out}(\mathrm{attention}(q, k, v)), \qquad (q, k, v) = W\,\mathrm{rms}(x), \qquad
        y = h + \mathrm{down}(\mathrm{gelu}(\mathrm{up}(\mathrm{rms}(h))))

    with queries and keys normed per head and rotated by their positions (`onepass.qk_norm_rope`).
    With a window w token i sees the windows ⌊i/w⌋ − 1 to ⌊i/w⌋ + 1 (causal: up to itself), by `span_attention`; without
    one all tokens (causal: those up to itself), by torch's attention, or with a mask or packed sequences by
    `span_attention`, whose memory is that of the tokens. A few global blocks among windows read far and cost little.

    Args:
        dim: width of the tokens.
        heads, dim_head: number of heads, default ``dim // dim_head``, and channels of each (even).
        window: w, tokens of a window; None: attention over all tokens.
        causal: no token sees a later one: for language models.
        hidden_dim: hidden width of the feed-forward, default 4·dim, or of one expert, default that of `Experts`.
        num_experts, top_k: `Experts` in place of the feed-forward, and how many a token takes; 0: none.
        dropout: probability of a zero in what a layer adds, in training.
        device, dtype: of all parameters.

    Shapes: ``block(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype, mask ``(batch, n)`` bool, True at
    real tokens, gives y like x. No token sees a masked one; masked tokens count as zeros whatever they hold.
    ``block(x, mask, return_routing=True)`` gives ``(y, ExpertRouting)``, or ``(y, None)`` without experts. Packed
    sequences: as `Routed` takes them, but nothing is padded. Works under autocast, `torch.compile`, `torch.export`,
    CUDA graphs and activation checkpointing.

    Raises:
        TypeError: a size is not an int, or causal is not a bool.
        ValueError: a size is out of range, dim is not a multiple of dim_head where heads is not given, or shapes don't
            fit.

    Source: Vaswani et al. (arXiv:1706.03762), pre-norm; windows beside global attention as in Longformer
    (arXiv:2004.05150) and Gemma 3 (arXiv:2503.19786).

    Example:
        >>> import torch
        >>> from onepass.nn import TransformerBlock
        >>> near = TransformerBlock(64, dim_head=32, window=16, causal=True)
        >>> far = TransformerBlock(64, dim_head=32, causal=True)
        >>> far(near(torch.randn(2, 100, 64))).shape
        torch.Size([2, 100, 64])
        >>> bounds = torch.tensor([0, 64, 105], dtype=torch.int32)
        >>> near(torch.randn(105, 64), cu_seqlens=bounds).shape
        torch.Size([105, 64])
    """

    def __init__(
        self, dim: int, *, heads: int | None = None, dim_head: int = 64, window: int | None = None,
        causal: bool = False, hidden_dim: int | None = None, num_experts: int = 0, top_k: int = 2,
        dropout: float = 0.0, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = "TransformerBlock"
        check_heads(name, dim, 1 if heads is None else heads, dim_head)
        if heads is None and dim % dim_head:
            raise ValueError(
                f"{name}: dim must be a multiple of dim_head where heads is not given, got dim = {dim} and dim_head = "
                f"{dim_head}: write heads="
            )
        for argument, size in (("window", window), ("hidden_dim", hidden_dim)):
            check_int(name, argument, 1 if size is None else size)
        check_int(name, "num_experts", num_experts, 0)
        check_flag(name, "causal", causal)
        check_number(name, "dropout", dropout, "between 0 and 1", lambda dropout: 0 <= dropout <= 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dropout = dropout
        self.attention = SelfAttention(dim, heads or dim // dim_head, dim_head, window, causal, **factory)
        if num_experts:
            self.feed_forward: nn.Module = Experts(dim, num_experts, top_k, hidden_dim=hidden_dim, **factory)
        else:
            self.feed_forward = FeedForward(dim, hidden_dim or 4 * dim, bias=False, **factory)

    sizes = "window {0.window}, {0.heads} heads of {0.dim_head}"
    if TYPE_CHECKING:
        __call__: RoutedCall[ExpertRouting | None]

    def check(self, x: Tensor) -> None:
        """Raise TypeError or ValueError unless x is (batch, n, dim) of a float dtype."""
        check_tokens("TransformerBlock", x, self.attention.dim)
        if hasattr(x, "to_local"):
            raise TypeError("TransformerBlock: x must be a plain tensor, got a DTensor; give each device its own rows")

    def packed(
        self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> tuple[Tensor, ExpertRouting | None]:
        """Compute packed sequences as one row, without padding."""
        cu_seqlens = checked_bounds("TransformerBlock", x, mask, cu_seqlens)
        tokens = x.reshape(1, -1, x.shape[-1])
        total = tokens.shape[1]
        real, slots = places("TransformerBlock", total, x.device, cu_seqlens, max_seqlen)
        self.check(tokens)
        row, positions = slots // max(real.shape[1], 1), slots % max(real.shape[1], 1)
        begin = torch.arange(total, device=x.device) - positions
        end = begin + real.sum(-1).index_select(0, row)
        sequences = Sequences(*(t.to(torch.int32) for t in (positions, begin, end)))
        y, routing = self.composed(tokens, None, sequences)
        return y.view(x.shape), routing

    @torch.no_grad()
    def cached(self, x: Tensor, mask: Tensor | None, cache: BlockCache, return_routing: bool) -> tuple[Tensor, Any]:
        """Read a prompt, or one more token of each sequence."""
        with self.reading(x, mask, cache):
            return self.composed(x, mask, None, cache.attention)

    def composed(
        self, x: Tensor, mask: Tensor | None, packed: Sequences | None = None, cache: KeyCache | None = None
    ) -> tuple[Tensor, ExpertRouting | None]:
        """Compute module by module."""
        x = zero_padding("TransformerBlock", x, mask)
        y, routing = self.dropped(self.attention(x, mask, packed, cache)), None
        if isinstance(getattr(self.feed_forward, "up", None), nn.Module):  # a wrapper of torch lends its attributes
            y, x = self.feed_forward(y, x)
        else:
            x = x + y
            y, routing = self.feed_forward(x, mask, return_routing=True)
        return x + self.dropped(y), routing

    def caches(self, clock: Clock) -> tuple[KeyCache, None]:
        """Return the cache of attention; a feed-forward needs none."""
        return KeyCache(self.attention, clock), None


def angles(n: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (n, width / 2) of rotary positions 0 … n − 1, in fp32 or wider."""
    rows = next_power_of_2(n) if plain(like) else n  # the cached angles serve other lengths, too
    cos, sin = cached_for(_angles, (rows, width, torch.promote_types(like.dtype, torch.float32)), like)
    return (cos, sin) if rows == n else (cos[:n], sin[:n])


def _angles(rows: int, width: int, wide: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"device": device, "dtype": torch.float64}
    angle = torch.arange(rows, **options)[:, None] * BASE ** (-torch.arange(0, width, 2, **options) / width)
    return angle.cos().to(wide), angle.sin().to(wide)
