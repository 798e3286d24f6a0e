"""colt5-attention's routed attention of sequences; see `contrib.colt5`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn.count import check_int
from onepass.nn.packed import check_mask, check_tokens
from onepass.ops.routing.op import gather, scatter_add

from .heavy import HeavyAttention, LocalAttention
from .router import CoordinateDescentRouter, RouterReturn, add_heavy


class RoutedHeavy(nn.Module):
    """What the attention modules share: two routers, the heavy branch, and the output of tokens that are not chosen."""

    def __init__(
        self, dim: int, k_q: int, k_kv: int, routes: int, heads: int, dim_head: int, straight_through: bool,
        router_kwargs: dict[str, Any] | None, multiply_keys: bool, null: bool, multiply_queries: bool = False,
        rotary_emb: bool = False, route_block_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        module = type(self).__name__
        for name, size in (("number of heavy query tokens", k_q), ("number of heavy key tokens", k_kv)):
            check_int(module, name, size)
        check_int(module, "number of routed key sets", routes)
        if heads % routes:
            raise ValueError(f"{module}: heads of the heavy branch must be a multiple of {routes} routes, got {heads}")
        options: dict[str, Any] = {"straight_through": straight_through, **(router_kwargs or {})}
        self.null_q_token = nn.Parameter(torch.randn(dim)) if null else None
        self.q_router = CoordinateDescentRouter(dim, **options)
        if route_block_size is not None:
            options["route_block_size"] = route_block_size
        self.kv_router = CoordinateDescentRouter(dim, num_routing_tokens=routes, **options)
        self.heavy_attn = HeavyAttention(dim, heads, dim_head, multiply_keys)
        self.dim, self.multiply_queries_by_score = dim, multiply_queries
        self.rotary_emb: Frequencies | None = Frequencies(dim_head) if rotary_emb else None
        self.num_heavy_tokens_q, self.num_heavy_tokens_kv = k_q, k_kv

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, *context: Tensor, **options: Any) -> Tensor: ...

    def counts(self, k_q: int | None, k_kv: int | None) -> tuple[int, int]:
        """Return the numbers of a call: those of the module where the call gives none."""
        return self.num_heavy_tokens_q if k_q is None else k_q, self.num_heavy_tokens_kv if k_kv is None else k_kv

    def check(self, x: Tensor, mask: Tensor | None = None, name: str = "x") -> None:
        """Raise an error unless x is (batch, n, dim) and mask is None or (batch, n)."""
        module = type(self).__name__
        check_tokens(module, x, self.dim, name)
        check_mask(module, x, mask, "mask" if name == "x" else f"{name}_mask")

    def heavy(self, light: Tensor, q: RouterReturn, kv: RouterReturn, starts: Tensor | None = None) -> Tensor:
        """Return light (batch, n, dim) plus the heavy branch; `starts`: position of each row's first query."""
        positions = None
        if self.rotary_emb is not None:
            of_q, of_kv = _positions(q), _positions(kv)
            positions = (of_q if starts is None else of_q + starts[:, None]), of_kv
        out = self.heavy_attn(
            q.routed_tokens, kv.routed_tokens, mask=kv.routed_mask, gates_kv=kv.scores,
            gates_q=q.scores if self.multiply_queries_by_score else None, positions=positions,
        )  # fmt: skip
        if q.indices is None or self.null_q_token is None:
            return add_heavy(light, out, q)
        # a chosen token gets its gated output in place of null
        null = self.null_q_token.to(light.dtype)
        return scatter_add(light + null, out * q.scores[..., None] - self.null_q_token, None, q.indices)


class Frequencies(nn.Module):
    """Holds `inv_freq`, a key of the original's state_dict; the rotation computes its angles itself, in float64."""

    def __init__(self, dim_head: int) -> None:
        super().__init__()
        if dim_head % 2:
            raise ValueError(f"rotary_emb: heavy_dim_head must be even, got {dim_head}")
        self.register_buffer("inv_freq", 10000.0 ** (torch.arange(0, dim_head, 2) / -dim_head))


class ConditionalRoutedAttention(RoutedHeavy):
    """Local attention for every token; routed tokens attend to routed tokens, as ``colt5_attention``'s.

    Args:
        dim: width of the tokens.
        num_heavy_tokens_q, num_heavy_tokens_kv: how many tokens attend, and how many each route is attended to.
        num_routed_kv: routes of keys and values, which share the heavy heads.
        has_light_attn: False leaves out the local attention.
        light_dim_head, light_heads: channels and number of the local attention's heads.
        light_window_size: a token sees half as many tokens to either side.
        heavy_dim_head, heavy_heads: channels and number of the heavy heads.
        router_straight_through, router_kwargs: arguments of `CoordinateDescentRouter`.
        multiply_keys_by_score, multiply_queries_by_score: gates multiply keys and queries too.
        use_null_q_tokens: tokens that are not chosen get a learned output; else 0.
        rotary_emb: rotate queries and keys of the heavy branch by their positions.
        use_triton, use_flash_attn: accepted and ignored. onepass picks the path itself.

    Shapes: ``attention(x, *, num_heavy_tokens_q=None, num_heavy_tokens_kv=None, mask=None)`` with x
    ``(batch, n, dim)``, mask ``(batch, n)`` bool, True at real tokens, gives y like x. There is no residual inside.

    Raises:
        TypeError: a size is not an int, or x is not a floating-point tensor.
        ValueError: a size is out of range, or shapes don't fit.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedAttention
        >>> attention = ConditionalRoutedAttention(16, num_heavy_tokens_q=4, num_heavy_tokens_kv=8, light_window_size=8)
        >>> attention(torch.randn(2, 40, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(
        self, dim: int, *, num_heavy_tokens_q: int, num_heavy_tokens_kv: int, num_routed_kv: int = 1,
        has_light_attn: bool = True, light_dim_head: int = 64, light_heads: int = 8, light_window_size: int = 128,
        heavy_dim_head: int = 64, heavy_heads: int = 8, router_straight_through: bool = True,
        router_kwargs: dict[str, Any] | None = None, multiply_keys_by_score: bool = False,
        multiply_queries_by_score: bool = False, use_triton: bool = False, use_null_q_tokens: bool = True,
        use_flash_attn: bool = False, rotary_emb: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_heavy_tokens_q, num_heavy_tokens_kv, num_routed_kv, heavy_heads, heavy_dim_head,
            router_straight_through, router_kwargs, multiply_keys_by_score, use_null_q_tokens,
            multiply_queries_by_score, rotary_emb,
        )  # fmt: skip
        self.light_attn = None
        if has_light_attn:
            if light_window_size < 2:
                raise ValueError(f"ConditionalRoutedAttention: light_window_size must be ≥ 2, got {light_window_size}")
            self.light_attn = LocalAttention(dim, light_heads, light_dim_head, light_window_size // 2, causal=False)

    def forward(
        self, x: Tensor, *, num_heavy_tokens_q: int | None = None, num_heavy_tokens_kv: int | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.check(x, mask)
        k_q, k_kv = self.counts(num_heavy_tokens_q, num_heavy_tokens_kv)
        light = torch.zeros_like(x) if self.light_attn is None else self.light_attn(x, mask)
        q, kv = (r(x, num_tokens=k, mask=mask) for r, k in ((self.q_router, k_q), (self.kv_router, k_kv)))
        return self.heavy(light, q, kv)


class ConditionalRoutedAutoregressiveAttention(RoutedHeavy):
    """Causal local attention; routed tokens of a window attend to routed tokens of earlier windows.

    As ``colt5_attention``'s: the choice of queries within a window reads the whole window, so a token's output depends
    on later tokens of its window. `onepass.nn.RoutedAttention` with ``causal=True`` never reads a later token.

    Args:
        dim: width of the tokens.
        num_heavy_tokens_q: how many tokens of each window attend.
        num_heavy_tokens_kv: how many earlier tokens each route of a window is attended to.
        light_window_size: a token sees its own local window up to itself, and the one before.
        heavy_window_size: tokens of a window of queries; default: ``light_window_size``. Tokens of the first window
            get the local attention alone.
        num_routed_kv, light_dim_head, light_heads, heavy_dim_head, heavy_heads, router_straight_through,
            router_kwargs, multiply_keys_by_score, multiply_queries_by_score, use_triton, use_null_q_tokens,
            use_flash_attn, rotary_emb: as in `ConditionalRoutedAttention`.

    Shapes: ``attention(x, *, num_heavy_tokens_q=None, num_heavy_tokens_kv=None, random_route=False)`` with x
    ``(batch, n, dim)`` gives y like x. There is no residual inside.

    Raises:
        TypeError, ValueError: as `ConditionalRoutedAttention`.

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedAutoregressiveAttention
        >>> attention = ConditionalRoutedAutoregressiveAttention(
        ...     16, num_heavy_tokens_q=4, num_heavy_tokens_kv=8, light_window_size=8
        ... )
        >>> attention(torch.randn(2, 40, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(
        self, dim: int, *, num_heavy_tokens_q: int, num_heavy_tokens_kv: int, num_routed_kv: int = 1,
        light_dim_head: int = 64, light_heads: int = 8, light_window_size: int = 128,
        heavy_window_size: int | None = None, heavy_dim_head: int = 64, heavy_heads: int = 8,
        router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None,
        multiply_keys_by_score: bool = False, multiply_queries_by_score: bool = False, use_triton: bool = False,
        use_null_q_tokens: bool = True, use_flash_attn: bool = False, rotary_emb: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_heavy_tokens_q, num_heavy_tokens_kv, num_routed_kv, heavy_heads, heavy_dim_head,
            router_straight_through, router_kwargs, multiply_keys_by_score, use_null_q_tokens,
            multiply_queries_by_score, rotary_emb,
        )  # fmt: skip
        self.heavy_window_size = light_window_size if heavy_window_size is None else heavy_window_size
        for name, size in (("light_window_size", light_window_size), ("heavy_window_size", self.heavy_window_size)):
            check_int("ConditionalRoutedAutoregressiveAttention", name, size)
        self.light_attn = LocalAttention(dim, light_heads, light_dim_head, light_window_size, causal=True)

    def forward(
        self, x: Tensor, *, num_heavy_tokens_q: int | None = None, num_heavy_tokens_kv: int | None = None,
        random_route: bool = False,
    ) -> Tensor:  # fmt: skip
        self.check(x)
        k_q, k_kv = self.counts(num_heavy_tokens_q, num_heavy_tokens_kv)
        light = self.light_attn(x)
        batch, n, dim = x.shape
        w = self.heavy_window_size
        later = -(-n // w) - 1
        if later < 1 or not batch:
            return light  # type: ignore[no-any-return]
        missing = (later + 1) * w - n
        x = F.pad(x, (0, 0, 0, missing))
        at = torch.arange(x.shape[1], device=x.device).view(later + 1, w)[1:]
        q = self.q_router(
            x[:, w:].reshape(-1, w, dim), num_tokens=k_q, mask=(at < n).repeat(batch, 1), random_route=random_route
        )
        starts = at[:, 0].repeat(batch)
        kv = self._earlier(x, k_kv, starts, later, random_route)
        # one row per window
        windows = F.pad(light[:, w:], (0, 0, 0, missing)).reshape(-1, w, dim)
        y = self.heavy(windows, q, kv, starts).view(batch, later * w, dim)
        return torch.cat((light[:, :w], y[:, : n - w]), 1)

    def _earlier(self, x: Tensor, k: int, starts: Tensor, later: int, random_route: bool) -> RouterReturn:
        """Return the chosen keys before each window's start; scores are computed once, and no window copies x."""
        batch, n, dim = x.shape
        routes = self.kv_router.num_routing_tokens
        seen = torch.arange(n, device=x.device) < starts[:, None]
        if n <= k:
            return self.kv_router(
                x[:, None].expand(-1, later, -1, -1).flatten(0, 1), num_tokens=k, mask=seen, keep_one_route_dim=True
            )
        scores = self.kv_router.score(x)[:, None].expand(-1, later, -1, -1).flatten(0, 1)
        indices, gates = self.kv_router.choose(scores, k, seen, random_route)
        tokens = gather(x, indices.view(batch, later * routes, -1)).view(*indices.shape, dim)
        return RouterReturn(indices, gates, tokens, indices >= 0)


class ConditionalRoutedCrossAttention(RoutedHeavy):
    """Routed tokens attend to routed tokens of a context, as ``colt5_attention``'s is meant to.

    Args:
        dim: width of the tokens and of the context.
        num_tokens_q, num_tokens_kv: how many tokens attend, and how many of the context each route is attended to.
        num_sets_kv: accepted and ignored, as in the original; ``kv_routing_tokens`` is the number of routes.
        dim_head, heads: channels and number of the heads.
        kv_routing_tokens: routes of keys and values, which share the heads.
        route_block_size: choose from each block of the context (see `CoordinateDescentRouter`).
        router_straight_through, router_kwargs, multiply_keys_by_score, use_triton, use_null_q_tokens, use_flash_attn:
            as in `ConditionalRoutedAttention`.

    Shapes: ``attention(x, context, *, num_tokens_q=None, num_tokens_kv=None, mask=None, context_mask=None)`` with x
    ``(batch, n, dim)``, context ``(batch, m, dim)``, masks ``(batch, n)`` and ``(batch, m)`` bool, gives y like x.

    Raises:
        TypeError, ValueError: as `ConditionalRoutedAttention`.

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedCrossAttention
        >>> attention = ConditionalRoutedCrossAttention(16, num_tokens_q=4, num_tokens_kv=8)
        >>> attention(torch.randn(2, 40, 16), torch.randn(2, 50, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(
        self, dim: int, *, num_tokens_q: int, num_tokens_kv: int, num_sets_kv: int = 1, dim_head: int = 64,
        heads: int = 8, router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None,
        kv_routing_tokens: int = 1, multiply_keys_by_score: bool = False, use_triton: bool = False,
        use_null_q_tokens: bool = True, use_flash_attn: bool = False, route_block_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_tokens_q, num_tokens_kv, kv_routing_tokens, heads, dim_head, router_straight_through,
            router_kwargs, multiply_keys_by_score, use_null_q_tokens, route_block_size=route_block_size,
        )  # fmt: skip

    def forward(
        self, x: Tensor, context: Tensor, *, num_tokens_q: int | None = None, num_tokens_kv: int | None = None,
        mask: Tensor | None = None, context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.check(x, mask)
        self.check(context, context_mask, "context")
        k_q, k_kv = self.counts(num_tokens_q, num_tokens_kv)
        q = self.q_router(x, num_tokens=k_q, mask=mask)
        kv = self.kv_router(context, num_tokens=k_kv, mask=context_mask)
        return self.heavy(torch.zeros_like(x), q, kv)


def _positions(routed: RouterReturn) -> Tensor:
    """Return the positions of the chosen tokens; of all tokens, if there was nothing to choose."""
    if routed.indices is not None:
        return routed.indices
    shape = routed.scores.shape
    return torch.arange(shape[-1], device=routed.scores.device).expand(shape)
