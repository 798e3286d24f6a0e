"""colt5-attention's transformer block, image attention and vision transformer; see `contrib.colt5`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.nn.count import check_int
from onepass.nn.norm import LayerNorm

from .attention import ConditionalRoutedAttention, RoutedHeavy
from .heavy import WindowAttention
from .router import ConditionalRoutedFeedForward


class ConditionalRoutedTransformerBlock(nn.Module):
    """``x + attention(x)``, then ``x + feed_forward(x)``, both routed, as ``colt5_attention``'s.

    Args:
        dim: width of the tokens.
        num_heavy_attn_tokens_q, num_heavy_attn_tokens_kv: numbers of heavy tokens of `ConditionalRoutedAttention`.
        num_heavy_ff_tokens: number of heavy tokens of `ConditionalRoutedFeedForward`.
        num_routed_kv, light_dim_head, light_heads, light_window_size, heavy_dim_head, heavy_heads, light_ff_mult,
            heavy_ff_mult, router_straight_through, router_kwargs, multiply_keys_by_score, multiply_queries_by_score,
            use_triton, use_null_q_tokens, use_flash_attn: as in those two.

    Shapes: ``block(x, mask=None, num_heavy_attn_tokens_q=None, num_heavy_attn_tokens_kv=None,
    num_heavy_ff_tokens=None)`` with x ``(batch, n, dim)``, mask ``(batch, n)`` bool, gives y like x.

    Raises:
        TypeError, ValueError: as those two.

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedTransformerBlock
        >>> block = ConditionalRoutedTransformerBlock(
        ...     16, num_heavy_attn_tokens_q=4, num_heavy_attn_tokens_kv=8, num_heavy_ff_tokens=4, light_window_size=8
        ... )
        >>> block(torch.randn(2, 40, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(
        self, dim: int, *, num_heavy_attn_tokens_q: int, num_heavy_attn_tokens_kv: int, num_routed_kv: int = 1,
        num_heavy_ff_tokens: int, light_dim_head: int = 64, light_heads: int = 8, light_window_size: int = 128,
        heavy_dim_head: int = 64, heavy_heads: int = 8, light_ff_mult: float = 0.5, heavy_ff_mult: float = 4,
        router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None,
        multiply_keys_by_score: bool = False, multiply_queries_by_score: bool = False, use_triton: bool = False,
        use_null_q_tokens: bool = True, use_flash_attn: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.conditional_ff = ConditionalRoutedFeedForward(
            dim, num_heavy_tokens=num_heavy_ff_tokens, light_ff_mult=light_ff_mult, heavy_ff_mult=heavy_ff_mult,
            router_straight_through=router_straight_through, router_kwargs=router_kwargs,
        )  # fmt: skip
        self.conditional_attn = ConditionalRoutedAttention(
            dim, num_heavy_tokens_q=num_heavy_attn_tokens_q, num_heavy_tokens_kv=num_heavy_attn_tokens_kv,
            num_routed_kv=num_routed_kv, light_dim_head=light_dim_head, light_heads=light_heads,
            light_window_size=light_window_size, heavy_dim_head=heavy_dim_head, heavy_heads=heavy_heads,
            router_straight_through=router_straight_through, router_kwargs=router_kwargs,
            multiply_keys_by_score=multiply_keys_by_score, multiply_queries_by_score=multiply_queries_by_score,
            use_null_q_tokens=use_null_q_tokens,
        )  # fmt: skip

    def forward(
        self, x: Tensor, mask: Tensor | None = None, num_heavy_attn_tokens_q: int | None = None,
        num_heavy_attn_tokens_kv: int | None = None, num_heavy_ff_tokens: int | None = None,
    ) -> Tensor:  # fmt: skip
        x = x + self.conditional_attn(
            x, mask=mask, num_heavy_tokens_q=num_heavy_attn_tokens_q, num_heavy_tokens_kv=num_heavy_attn_tokens_kv
        )
        return x + self.conditional_ff(x, mask, num_heavy_ff_tokens)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, **numbers: int | None) -> Tensor: ...


class ConditionalRoutedImageAttention(RoutedHeavy):
    """Attention within square windows of an image; routed pixels of a window also attend to routed ones of the window.

    Args:
        dim: number of channels.
        num_heavy_tokens_q, num_heavy_tokens_kv: how many pixels of each window attend, and are attended to.
        light_window_size: side of a window. It must divide height and width.
        channel_first: images are ``(batch, dim, height, width)``; else ``(batch, height, width, dim)``.
        num_routed_kv, light_dim_head, light_heads, heavy_dim_head, heavy_heads, router_straight_through,
            router_kwargs, multiply_keys_by_score, multiply_queries_by_score, use_triton, use_null_q_tokens,
            use_flash_attn: as in `ConditionalRoutedAttention`.

    Shapes: ``attention(x, *, num_heavy_tokens_q=None, num_heavy_tokens_kv=None, mask=None)`` gives y like x. The mask
    is ``(batch · windows, pixels of a window)`` bool, windows row by row. Only the routers read it.

    Raises:
        TypeError, ValueError: as `ConditionalRoutedAttention`.

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedImageAttention
        >>> attention = ConditionalRoutedImageAttention(
        ...     16, num_heavy_tokens_q=4, num_heavy_tokens_kv=8, light_window_size=4, channel_first=True
        ... )
        >>> attention(torch.randn(2, 16, 8, 12)).shape
        torch.Size([2, 16, 8, 12])
    """

    def __init__(
        self, dim: int, *, num_heavy_tokens_q: int, num_heavy_tokens_kv: int, num_routed_kv: int = 1,
        light_dim_head: int = 64, light_heads: int = 8, light_window_size: int = 128, heavy_dim_head: int = 64,
        heavy_heads: int = 8, router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None,
        multiply_keys_by_score: bool = False, multiply_queries_by_score: bool = False, use_triton: bool = False,
        use_null_q_tokens: bool = True, use_flash_attn: bool = False, channel_first: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_heavy_tokens_q, num_heavy_tokens_kv, num_routed_kv, heavy_heads, heavy_dim_head,
            router_straight_through, router_kwargs, multiply_keys_by_score, use_null_q_tokens,
            multiply_queries_by_score,
        )  # fmt: skip
        check_int("ConditionalRoutedImageAttention", "light_window_size", light_window_size)
        self.light_window_size, self.channel_first = light_window_size, channel_first
        self.light_attn = WindowAttention(dim, light_heads, light_dim_head)

    def forward(
        self, x: Tensor, *, num_heavy_tokens_q: int | None = None, num_heavy_tokens_kv: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        module, w = "ConditionalRoutedImageAttention", self.light_window_size
        check.floating(module, "x", x)
        if x.dim() != 4:
            raise ValueError(f"{module}: x must be an image batch of 4 dimensions, got {tuple(x.shape)}")
        if self.channel_first:
            x = x.movedim(1, -1)
        batch, height, width, dim = x.shape
        if height % w or width % w:
            raise ValueError(f"{module}: height and width must be multiples of {w}, got {(height, width)}")
        windows = _tiles(x, w, w).reshape(-1, w * w, dim)
        self.check(windows, mask)
        k_q, k_kv = self.counts(num_heavy_tokens_q, num_heavy_tokens_kv)
        q = self.q_router(windows, num_tokens=k_q, mask=mask)
        kv = self.kv_router(windows, num_tokens=k_kv, mask=mask)
        y = self.heavy(self.light_attn(windows), q, kv)
        y = y.reshape(batch, height // w, width // w, w, w, dim).transpose(2, 3).reshape(x.shape)
        return y.movedim(-1, 1) if self.channel_first else y


class ConditionalRoutedViT(nn.Module):
    """A vision transformer of `ConditionalRoutedImageAttention` and `ConditionalRoutedFeedForward`.

    Args:
        image_size, patch_size: a side, or (height, width).
        num_classes, dim, depth, channels: numbers of classes, of channels inside, of blocks, of the image's channels.
        attn_num_heavy_tokens_q, attn_num_heavy_tokens_kv, attn_heavy_dim_head, attn_heavy_heads, attn_light_dim_head,
            attn_light_heads, attn_light_window_size, attn_num_routed_kv: arguments of the attention, without ``attn_``.
        ff_num_heavy_tokens, ff_heavy_mult, ff_light_mult: arguments of the feed-forward.
        default_coor_descent_eps: eps of the routers, unless ``router_kwargs`` has one.
        router_straight_through, router_kwargs: arguments of `CoordinateDescentRouter`.
        router_use_triton, flash_attn: accepted and ignored. onepass picks the path itself.

    Shapes: ``vit(images)`` with ``(batch, channels, height, width)`` gives ``(batch, num_classes)``.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, dim is no multiple of 4, or patches don't divide the image.

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedViT
        >>> vit = ConditionalRoutedViT(
        ...     image_size=16, patch_size=2, num_classes=10, dim=16, depth=1, attn_num_heavy_tokens_q=4,
        ...     attn_num_heavy_tokens_kv=8, attn_heavy_dim_head=8, attn_heavy_heads=2, attn_light_dim_head=8,
        ...     attn_light_heads=2, attn_light_window_size=4, ff_num_heavy_tokens=8, ff_heavy_mult=4, ff_light_mult=0.5
        ... )
        >>> vit(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, *, image_size: int | tuple[int, int], patch_size: int | tuple[int, int], num_classes: int, dim: int,
        depth: int, attn_num_heavy_tokens_q: int, attn_num_heavy_tokens_kv: int, attn_heavy_dim_head: int,
        attn_heavy_heads: int, attn_light_dim_head: int, attn_light_heads: int, attn_light_window_size: int,
        ff_num_heavy_tokens: int, ff_heavy_mult: float, ff_light_mult: float, channels: int = 3,
        router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None,
        router_use_triton: bool = False, flash_attn: bool = True, attn_num_routed_kv: int = 1,
        default_coor_descent_eps: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        image, patch = _pair("image_size", image_size), _pair("patch_size", patch_size)
        if image[0] % patch[0] or image[1] % patch[1]:
            raise ValueError(f"ConditionalRoutedViT: image_size must be a multiple of patch_size, got {image}, {patch}")
        check_int("ConditionalRoutedViT", "dim", dim)
        if dim % 4:
            raise ValueError(f"ConditionalRoutedViT: dim must be a multiple of 4, got {dim}")
        width = channels * patch[0] * patch[1]
        self.to_patch_embedding = nn.Sequential(
            _Patches(*patch), LayerNorm(width), nn.Linear(width, dim), LayerNorm(dim)
        )
        kwargs = {"eps": default_coor_descent_eps, **(router_kwargs or {})}
        layers = nn.ModuleList()
        for _ in range(depth):
            attention = ConditionalRoutedImageAttention(
                dim, num_heavy_tokens_q=attn_num_heavy_tokens_q, num_heavy_tokens_kv=attn_num_heavy_tokens_kv,
                num_routed_kv=attn_num_routed_kv, light_dim_head=attn_light_dim_head, light_heads=attn_light_heads,
                light_window_size=attn_light_window_size, heavy_dim_head=attn_heavy_dim_head,
                heavy_heads=attn_heavy_heads, router_straight_through=router_straight_through, router_kwargs=kwargs,
            )  # fmt: skip
            feed_forward = ConditionalRoutedFeedForward(
                dim, num_heavy_tokens=ff_num_heavy_tokens, light_ff_mult=ff_light_mult, heavy_ff_mult=ff_heavy_mult,
                router_straight_through=router_straight_through, router_kwargs=kwargs,
            )  # fmt: skip
            layers.append(nn.ModuleList([attention, feed_forward]))
        self.transformer = nn.ModuleDict({"layers": layers})
        self.linear_head = nn.Sequential(_Mean(), LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, img: Tensor) -> Tensor:
        x: Tensor = self.to_patch_embedding(img)
        x = x + _positions(x)
        for attention, feed_forward in self.transformer["layers"]:  # type: ignore[attr-defined]
            x = x + attention(x)
            x = x + feed_forward(x.flatten(1, 2)).view(x.shape)
        return self.linear_head(x)  # type: ignore[no-any-return]

    if TYPE_CHECKING:

        def __call__(self, img: Tensor) -> Tensor: ...


class _Patches(nn.Module):
    """Images (batch, channels, height, width) as patches (batch, rows, columns, height · width · channels of each)."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, img: Tensor) -> Tensor:
        if img.dim() != 4 or img.shape[2] % self.height or img.shape[3] % self.width:
            raise ValueError(
                f"ConditionalRoutedViT: images must be (batch, channels, height, width) in patches of "
                f"{(self.height, self.width)}, got {tuple(img.shape)}"
            )
        return _tiles(img.movedim(1, -1), self.height, self.width).flatten(3)


class _Mean(nn.Module):
    """The mean over the patches of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


def _tiles(x: Tensor, height: int, width: int) -> Tensor:
    """Cut (batch, H, W, dim) into (batch, rows, columns, height, width, dim)."""
    batch, rows, columns, dim = x.shape
    return x.reshape(batch, rows // height, height, columns // width, width, dim).transpose(2, 3)


def _positions(x: Tensor) -> Tensor:
    """Return sines and cosines of row and column for (batch, rows, columns, dim), computed in fp32."""
    _, rows, columns, dim = x.shape
    steps = torch.arange(dim // 4, device=x.device) / max(dim // 4 - 1, 1)
    omega = 1.0 / (10000**steps)
    down = torch.arange(rows, device=x.device)[:, None, None] * omega
    across = torch.arange(columns, device=x.device)[:, None] * omega
    parts = [part.expand(rows, columns, -1) for angle in (across, down) for part in (angle.sin(), angle.cos())]
    return torch.cat(parts, -1).to(x.dtype)


def _pair(name: str, size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = size if isinstance(size, tuple) else (size, size)
    check_int("ConditionalRoutedViT", name, height)
    check_int("ConditionalRoutedViT", name, width)
    return height, width
