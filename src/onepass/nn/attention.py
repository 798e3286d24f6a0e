"""`RoutedAttention`: every token attends to its neighbours, a few routed queries also to a few routed keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.core.eager import plain
from onepass.fused.attention import routed_attention, with_keys
from onepass.fused.norms import fits_one_program
from onepass.fused.plans import AttentionPlan
from onepass.ops.routing.op import gather, scatter_add
from onepass.ops.span_attention.op import rotary, span_attention

from .causal import CausalRouter, choose_per_block, router_of_windows
from .count import check_count, check_dtype, count
from .explore import explore
from .feed_forward import branch_dtype, has_no_overrides
from .local_attention import LocalAttention, check_heads
from .norm import RMSNorm
from .packed import packed
from .router import NORM_EPS, Router, RouterOutput, asked
from .whole_rows import takes_whole_rows, whole_rows

if TYPE_CHECKING:
    from .cache import AttentionCache, HeavyCache
    from .calls import RoutedCall


class AttentionRouting(NamedTuple):
    """The choices of `RoutedAttention` and `RoutedCrossAttention`: two `RouterOutput`.

    Attributes:
        q: the tokens that attend, and the gates on their outputs.
        kv: the tokens (cross-attention: memories) that they attend to, and the gates on the values.
    """

    q: RouterOutput
    kv: RouterOutput


class HeavyAttention(nn.Module):
    """Attention of chosen queries (batch, k_q, dim) to chosen memories (batch, k_kv, dim), both normed; gated values.

    It returns ``out(attention) − null``, because the caller adds `null` to every token. A query sees the first `last`
    memories, ``(k_q,)`` or ``(batch, k_q)``, except those where `mask` is False. With `turned`, queries and keys are
    rotated by the positions in the routing.
    """

    def __init__(
        self, dim: int, heads: int, dim_head: int, *, dim_context: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        dim_context = dim if dim_context is None else dim_context
        inner = heads * dim_head
        self.norm_q = RMSNorm(dim, device=device, dtype=dtype)
        self.norm_kv = RMSNorm(dim_context, device=device, dtype=dtype)
        self.q = nn.Linear(dim, inner, bias=False, device=device, dtype=dtype)
        self.kv = nn.Linear(dim_context, 2 * inner, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(inner, dim, bias=False, device=device, dtype=dtype)

    def forward(
        self, queries: Tensor, memories: Tensor, routing: AttentionRouting, null: Tensor, last: Tensor, *, turned: bool,
        mask: Tensor | None, cache: HeavyCache | None = None,
    ) -> Tensor:  # fmt: skip
        check_dtype("HeavyAttention", queries, self.q)
        q, kv = self.q(queries), self.kv(memories)
        if cache is not None and cache.clock.lengths is None:
            heads = kv.unflatten(-1, (2, self.heads, self.dim_head))
            y = cache.attend(q.unflatten(-1, (self.heads, self.dim_head)), heads, routing.kv)
        else:
            y = self.attend(q, kv, routing, last, turned=turned, mask=mask, cache=cache)
        y = self.out(y.flatten(2))
        return y - null.to(y.dtype)  # type: ignore[no-any-return]

    def attend(
        self, q: Tensor, kv: Tensor, routing: AttentionRouting, last: Tensor, *, turned: bool, mask: Tensor | None,
        cache: HeavyCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Return (batch, k_q, heads, dim_head) for projected queries, and keys and values (batch, k_kv, …)."""
        q = q.view(*q.shape[:2], self.heads, self.dim_head)
        k, v = kv.view(*kv.shape[:2], 2, self.heads, self.dim_head).unbind(2)
        if turned:
            # a missing token (−1) gets some angle too; its result is not used
            q, k = rotary(q, routing.q.indices), rotary(k, routing.kv.indices)
        # gates scale the values, not the logits: flash attention needs no bias, and a token with gate 0 contributes
        # nothing
        v = v * routing.kv.gates.to(v.dtype)[..., None, None]
        if cache is not None:
            cache.fill(k, v)
        return span_attention(q, k, v, torch.zeros_like(last), last, mask=mask)


class RoutedAttention(nn.Module):
    r"""Local attention for every token; for k_q routed tokens also attention to k_kv routed tokens from anywhere.

    .. math::
        y_i = \mathrm{local}(x)_i + (1 - g_i)\,\nu + g_i\,
              \mathrm{out}\Big(\sum_{j \in K} \mathrm{softmax}_j(q_i\cdot k_j)\, h_j v_j\Big)

    with g the gates of the routed queries (0 for all others), h those of the routed keys and values K, and ν the
    learned output (`null`) of tokens that are not routed. Both branches norm their own inputs and apply rotary
    embedding by the original positions. There is no residual inside: write ``x + attention(x)``.

    With ``causal=True`` no output depends on a later token, bit for bit, if tokens are finite. Local windows reach back
    only. A running threshold chooses queries (`CausalRouter`). Each window gives a quota of ``max(1, round(m·k_kv))``
    keys and values of its m real tokens or, for an int, ``max(1, round(window·k_kv/n))``. A query of window b sees
    those of the windows before b. They are the first entries of one list, so nothing is copied per window.

    Args:
        dim: width of the tokens.
        k_q, k_kv: how many tokens attend, and how many are attended to: ints, or shares 0 < k ≤ 1 of the
            real tokens (see `Routed`).
        heads, dim_head: heads of the heavy branch, and their channels (even).
        light_heads: heads of the local attention; default: heads.
        window: tokens of a local window (see `LocalAttention`).
        causal: no output depends on a later token: for language models.
        router_q, router_kv: default `Router` (causal queries: `CausalRouter`); modules with their call signature and
            one route. With causal, router_kv is called on windows as if each were a sequence, and router_q must be
            causal and list tokens in their order; a plain `Router` is refused.
        device, dtype: of all parameters.

    Shapes: ``attention(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype, mask ``(batch, n)`` bool, True
    at real tokens, gives y like x; ``attention(x, mask, return_routing=True)`` gives ``(y, AttentionRouting)``.
    Masked tokens are neither chosen nor seen, and count as zeros whatever they hold. No row depends on another. Packed
    sequences (``cu_seqlens=``, ``max_seqlen=``): as `Routed`.

    Raises:
        TypeError: k_q or k_kv is neither int nor float, or a size is not an int.
        ValueError: a size is out of range, a router has several routes, or router_q is a plain `Router` with causal.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedAttention
        >>> attention = RoutedAttention(32, k_q=1 / 16, k_kv=1 / 8, heads=2, dim_head=16, window=16)
        >>> y, routing = attention(torch.randn(2, 128, 32), return_routing=True)
        >>> y.shape, routing.q.indices.shape, routing.kv.indices.shape
        (torch.Size([2, 128, 32]), torch.Size([2, 8]), torch.Size([2, 16]))
    """

    def __init__(
        self, dim: int, k_q: int | float, k_kv: int | float, *, heads: int = 8, dim_head: int = 64,
        light_heads: int | None = None, window: int = 256, causal: bool = False, router_q: nn.Module | None = None,
        router_kv: nn.Module | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("RoutedAttention", dim, heads, dim_head)
        check_count("RoutedAttention", "k_q", k_q)
        check_count("RoutedAttention", "k_kv", k_kv)
        check_routers("RoutedAttention", router_q, router_kv)
        if causal and type(router_q) is Router:
            raise ValueError("RoutedAttention: with causal, router_q must be as CausalRouter: a Router looks ahead")
        self.dim, self.k_q, self.k_kv, self.window, self.causal = dim, k_q, k_kv, window, causal
        self.light = LocalAttention(
            dim, heads=heads if light_heads is None else light_heads, dim_head=dim_head, window=window, causal=causal,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.heavy = HeavyAttention(dim, heads, dim_head, device=device, dtype=dtype)
        if router_q is None:
            router_q = (
                router_of_windows(dim, window, device, dtype) if causal else Router(dim, device=device, dtype=dtype)
            )
        self.router_q = router_q
        self.router_kv = Router(dim, device=device, dtype=dtype) if router_kv is None else router_kv
        self.null = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `null` to 0; submodules have their own `reset_parameters`."""
        nn.init.zeros_(self.null)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False, *,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, cache: AttentionCache | None = None,
    ) -> Tensor | tuple[Tensor, AttentionRouting]:  # fmt: skip
        if cu_seqlens is not None or max_seqlen is not None:
            return packed(RoutedAttention, self, x, mask, return_routing, cu_seqlens, max_seqlen)  # type: ignore[no-any-return]
        self._check_tokens(x)
        dtype = self._fused_dtype(x, mask)
        if cache is not None and x.shape[1] == 1:
            y, routing = self._step(x, cache)
        elif dtype is not None:
            y, routing = self._fused(x, mask, dtype, cache=cache)
            if cache is not None:
                cache.fill(self, x, routing)
                cache.light.fill(self.light, x)
        elif cache is None and takes_whole_rows(self, x):
            return whole_rows(RoutedAttention, self, x, mask, return_routing=return_routing)  # type: ignore[no-any-return]
        else:
            y, routing = self._composed(x, mask, cache)
            y = explore(y, x, self.router_q, self.k_q, mask).view(x.shape)
        return (y, routing) if return_routing else y

    if TYPE_CHECKING:
        __call__: RoutedCall[AttentionRouting]

    def _check_tokens(self, x: Tensor) -> None:
        check.floating("RoutedAttention", "x", x)
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"RoutedAttention: x must be (batch, n, {self.dim}), got {tuple(x.shape)}")

    def _composed(
        self, x: Tensor, mask: Tensor | None, cache: AttentionCache | None = None
    ) -> tuple[Tensor, AttentionRouting]:
        """Return the output as (batch·n, dim) and the routing, computed module by module."""
        routing = self._choose(x, mask)
        of_light, of_heavy = ({}, {}) if cache is None else ({"cache": cache.light}, {"cache": cache.heavy})
        if cache is not None:
            cache.fill(self, x, routing)
        y = self.light(x, mask, **of_light).flatten(0, 1)
        y = y + self.null.to(y.dtype)
        q, kv = routing.q.indices, routing.kv.indices
        if q.shape[1] or not x.numel():
            heavy = self.heavy
            tokens = heavy.norm_q(gather(x, q)), heavy.norm_kv(gather(x, kv))
            last, seen = self.seen(routing, x.shape[1], mask)
            update = heavy(*tokens, routing, self.null, last, turned=True, mask=seen, **of_heavy)
            y = scatter_add(y, update, routing.q.gates, q, inplace=plain())
        return y, routing

    def _step(self, x: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionRouting]:
        """Return the outputs (batch, 1, dim) of one more token of each sequence; indices are positions, or −1."""
        heavy, q = self.heavy, self.router_q(x, self.k_q, cache=cache.queries)
        y = self.light(x, cache=cache.light)
        y = y + self.null.to(y.dtype)
        # a CPU skips a branch that no token chose; on a GPU the host would wait longer than the branch takes
        begins = cache.clock.turns(self.window)
        if begins or x.device.type != "cpu" or bool((q.indices >= 0).any()):
            memories, kv = cache.given(self, begins)
            routing = AttentionRouting(q, kv)
            tokens = heavy.norm_q(x), heavy.norm_kv(memories)
            last = q.indices[:, 0] // self.window
            update = heavy(*tokens, routing, self.null, last, turned=True, mask=None, cache=cache.heavy)
            y = y + (update * q.gates[..., None]).to(y.dtype)
        else:
            routing = AttentionRouting(q, RouterOutput(q.indices[:, :0], q.gates[:, :0], q.scores[:, :0]))
        cache.keep(x)
        return y, routing

    def _choose(self, x: Tensor, mask: Tensor | None) -> AttentionRouting:
        n = x.shape[1]
        q = self.router_q(x, asked(self.router_q, self.k_q, n), mask)
        if not self.causal or n == 0:
            return AttentionRouting(q, self.router_kv(x, asked(self.router_kv, self.k_kv, n), mask))
        return AttentionRouting(q, choose_per_block(self.router_kv, x, self.quota(n), self.window, mask))

    def _fused(
        self, x: Tensor, mask: Tensor | None, dtype: torch.dtype, residual: bool = False,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, AttentionRouting]:  # fmt: skip
        """Return the same (x + y with `residual`) by one autograd node, or one operator through the dispatcher."""
        light, heavy, q, kv = self.light, self.heavy, self.router_q, self.router_kv
        n = x.shape[1]
        assert isinstance(q, Router)
        assert isinstance(kv, Router)
        q.check(x, 0, mask)
        keys = kv.choice(self.quota(n), self.window) if self.causal else kv.choice(self.k_kv, n)
        plan = AttentionPlan(
            dtype, light.heads, heavy.heads, heavy.dim_head, light.window, self.causal, q.choice(self.k_q, n), keys,
            q.explore_stride(self.k_q, n), q.explore, residual, light.norm.eps_for(x), NORM_EPS,
        )  # fmt: skip
        weights = (
            light.norm.weight, heavy.norm_q.weight, heavy.norm_kv.weight, self.null, light.qkv.weight, light.out.weight,
            heavy.q.weight, heavy.kv.weight, heavy.out.weight,
        )  # fmt: skip
        if cache is not None:
            (y, *choice), *chosen = with_keys(plan, x, q.weight, kv.weight, weights[0], mask, *weights[1:])
            cache.heavy.fill(*chosen)
        else:
            y, *choice = routed_attention(plan, x, q.weight, kv.weight, weights[0], mask, *weights[1:])
        at_q, gates_q, at_kv, gates_kv, scores = choice
        scores_q, scores_kv = scores.unbind(0)
        return y, AttentionRouting(
            RouterOutput(at_q, gates_q, scores_q), RouterOutput(at_kv, gates_kv, scores_kv)
        )  # fmt: skip

    def seen(self, routing: AttentionRouting, n: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return how many of the chosen keys each chosen query sees, and which of them exist (None: all)."""
        q, kv, there = routing.q.indices, routing.kv.indices, self._there(routing, n, mask)
        if not self.causal:
            return torch.full(q.shape[1:], kv.shape[1], dtype=torch.int32, device=q.device), there
        quota = kv.shape[1] // max(1, -(-n // self.window))
        # missing queries come last and see every key, so that `last` never decreases
        return torch.where(q >= 0, q // self.window * quota, kv.shape[1]), there

    def _there(self, routing: AttentionRouting, n: int, mask: Tensor | None) -> Tensor | None:
        """Return which of the chosen keys exist; None: all."""
        # without a mask, a Router always finds k tokens
        whole = mask is None and type(self.router_kv) is Router and not (self.causal and n % self.window)
        return None if whole else routing.kv.indices >= 0

    def quota(self, n: int) -> int | float:
        """Return how many keys and values each window gives for n > 0 tokens, or which share of its real tokens."""
        if isinstance(self.k_kv, float):
            return asked(self.router_kv, self.k_kv, self.window)
        k = count(self.k_kv, n)
        return min(self.window, max(1, round(self.window * k / n))) if k else 0

    def _fused_dtype(self, x: Tensor, mask: Tensor | None) -> torch.dtype | None:
        """Return the branches' dtype where `_fused` gives the same as `_composed`, else None.

        None if something intercepts the call (a compiler, a transform, a hook), if a branch or router is not the
        default one, or if there is nothing to choose.
        """
        if not (x.numel() and self.k_q and self.k_kv and fits_one_program(x.shape[-1])):
            return None
        # read `_modules`: attributes and `modules()` take longer than everything else here
        own = self._modules
        branches = own["light"], own["heavy"]
        inner: list[Any] = [m for branch in branches for m in branch._modules.values()]  # type: ignore[union-attr]
        parts: list[Any] = [self, own["router_kv"], *branches, *inner, own["router_q"]]
        # subclasses, as FSDP2 makes them, and hooks of the layer itself see the same inputs and outputs either way
        _, *kinds, of_q = map(type, parts)
        if kinds != _KINDS or of_q not in (Router, CausalRouter) or not has_no_overrides(*parts[1:]):
            return None
        if "null" in self.__dict__ or self.__dict__["_buffers"]:
            return None
        norms = [m for m in parts if type(m) is RMSNorm]
        # the fused node has one eps and multiplies by the norms' weights alone
        if len({m.eps for m in norms}) > 1 or any(m.offset or m.rounding != "once" for m in norms):
            return None
        if any(m._parameters.get("bias") is not None for m in inner):
            return None
        weights = [p for m in parts for p in m._parameters.values() if p is not None]
        return branch_dtype(x, mask, weights, weights)

    def extra_repr(self) -> str:
        return f"{self.dim}, k_q={self.k_q}, k_kv={self.k_kv}, window={self.window}, causal={self.causal}"


def check_routers(module: str, router_q: nn.Module | None, router_kv: nn.Module | None) -> None:
    """Raise ValueError for a router with several routes: attention has one list of queries and one of keys."""
    for name, router in (("router_q", router_q), ("router_kv", router_kv)):
        if isinstance(router, Router) and router.num_routes != 1:
            raise ValueError(f"{module}: {name} must have one route, got num_routes = {router.num_routes}")


# the modules that `_fused` replaces, in the order in which `_fused_dtype` lists them; router_q has two accepted types
_KINDS = [
    Router, LocalAttention, HeavyAttention, RMSNorm, nn.Linear, nn.Linear, RMSNorm, RMSNorm, nn.Linear, nn.Linear,
    nn.Linear,
]  # fmt: skip
