"""`LocalAttention`: every token attends to the tokens near it; the light branch of `RoutedAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onepass.fused.runs import cached_for, neighbours
from onepass.ops.span_attention.op import rotary, rotary_attention

from .count import check_dtype, check_int
from .norm import RMSNorm
from .packed import check_tokens, zero_padding
from .whole_rows import takes_whole_rows, whole_rows

if TYPE_CHECKING:
    from .cache import KeyCache


class LocalAttention(nn.Module):
    r"""Attention within windows: a token sees its own window, the one before and, unless causal, the one after.

    ``y = out(attention(rotary(qkv(rms_norm(x)))))``; token i sees the tokens of the windows ⌊i/w⌋ − 1 to ⌊i/w⌋ + 1
    (causal: those of ⌊i/w⌋ − 1 and ⌊i/w⌋ up to itself). There is no residual inside.

    Args:
        dim: width of the tokens.
        heads, dim_head: number of heads, and channels of each (even).
        window: w, tokens of a window.
        causal: no token sees a later one. On a GPU a NaN or an infinity in a token may reach earlier outputs of its
            window, as in torch's attention; on a CPU it reaches none. Gradients spread it.
        device, dtype: of all parameters.

    Shapes: ``attention(x, mask=None)`` with x ``(batch, n, dim)``, mask ``(batch, n)`` bool, True at real tokens,
    gives y like x, for any n. No token sees a masked one; masked tokens count as zeros whatever they hold.

    Raises:
        TypeError: dim, heads, dim_head or window is not an int.
        ValueError: one of them is < 1, dim_head is odd, or shapes don't fit.

    Source: Beltagy et al., Longformer (arXiv:2004.05150), in blocks as in CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import LocalAttention
        >>> LocalAttention(32, heads=2, dim_head=16, window=8)(torch.randn(2, 50, 32)).shape
        torch.Size([2, 50, 32])
    """

    def __init__(
        self, dim: int, *, heads: int = 8, dim_head: int = 64, window: int = 256, causal: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("LocalAttention", dim, heads, dim_head)
        check_int("LocalAttention", "window", window)
        self.dim, self.heads, self.dim_head, self.window, self.causal = dim, heads, dim_head, window, causal
        self.norm = RMSNorm(dim, device=device, dtype=dtype)
        self.qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(heads * dim_head, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cache: KeyCache | None = None) -> Tensor:
        if cache is None and takes_whole_rows(self, x):
            return whole_rows(LocalAttention, self, x, mask)  # type: ignore[no-any-return]
        check_tokens("LocalAttention", x, self.dim)
        x = zero_padding("LocalAttention", x, mask)
        check_dtype("LocalAttention", x, self.qkv)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim_head))
        if cache is not None:
            if x.shape[1] == 1:
                q, k = rotary(qkv[:, :, :2].flatten(2, 3), cache.clock.position[:, None]).chunk(2, dim=2)
                return self.out(cache.attend(q, k, qkv[:, :, 2]).flatten(2))  # type: ignore[no-any-return]
            cache.keep(rotary(qkv[:, :, 1]), qkv[:, :, 2])
        first, last = cached_for(neighbours, (x.shape[1], self.window, self.causal), x)
        return self.out(rotary_attention(qkv, first, last, mask=mask).flatten(2))  # type: ignore[no-any-return]

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"heads={self.heads}, dim_head={self.dim_head}, window={self.window}, causal={self.causal}"


def check_heads(name: str, dim: int, heads: int, dim_head: int) -> None:
    """Raise TypeError unless the sizes are ints, ValueError unless they are ≥ 1 and dim_head is even."""
    for argument, size in (("dim", dim), ("heads", heads), ("dim_head", dim_head)):
        check_int(name, argument, size)
    if dim_head % 2:
        raise ValueError(f"{name}: dim_head must be even (rotary positions turn pairs of channels), got {dim_head}")
