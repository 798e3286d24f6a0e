"""`RoutedAttention`: every token attends to its neighbours, a few routed queries also to a few routed keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.core.eager import plain
from onepass.core.launch import cdiv
from onepass.fused.attention import Plan, routed_attention, with_keys
from onepass.fused.choice import of_sequence, windows
from onepass.fused.norms import WIDEST
from onepass.ops.routing.op import gather, scatter_add
from onepass.ops.span_attention.op import rotary, span_attention

from .calls import Layer, as_written, branch_dtype, parts_of
from .causal import CausalRouter, router_of_windows
from .count import check_count, check_dtype, count
from .explore import explore
from .local_attention import LocalAttention, check_heads
from .norm import RMSNorm
from .packed import check_mask, check_tokens
from .router import NORM_EPS, Router, RouterOutput, k_for

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
    """Attention of chosen queries (batch, k_q, dim) to chosen memories (batch, k_kv, dim), after norms; gated values.

    It returns ``out(attention) − null``: the caller adds `null` to every token. Query i sees the first ``last[i]``
    memories where `mask` is True; `last`: ``(k_q,)`` or ``(batch, k_q)``. `turned`: rotate by the routing's positions.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, *, dim_context: int, **factory: Any) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        inner = heads * dim_head
        self.norm_q = RMSNorm(dim, **factory)
        self.norm_kv = RMSNorm(dim_context, **factory)
        self.q = nn.Linear(dim, inner, bias=False, **factory)
        self.kv = nn.Linear(dim_context, 2 * inner, bias=False, **factory)
        self.out = nn.Linear(inner, dim, bias=False, **factory)

    def forward(
        self, queries: Tensor, memories: Tensor, routing: AttentionRouting, null: Tensor, last: Tensor, *, turned: bool,
        mask: Tensor | None, cache: HeavyCache | None = None,
    ) -> Tensor:  # fmt: skip
        check_dtype("HeavyAttention", queries, self.q)
        q = self.q(self.norm_q(queries)).unflatten(-1, (self.heads, self.dim_head))
        kv = self.kv(self.norm_kv(memories)).unflatten(-1, (2, self.heads, self.dim_head))
        if cache is not None and cache.clock.lengths is None:
            y = cache.attend(q, kv, routing.kv)
        else:
            k, v = kv.unbind(2)
            if turned:
                # a missing token (index −1) is rotated too; its result is not used
                q, k = rotary(q, routing.q.indices), rotary(k, routing.kv.indices)
            # gates scale the values, not the logits: flash attention needs no bias, and a key with gate 0 adds nothing
            v = v * routing.kv.gates.to(v.dtype)[..., None, None]
            if cache is not None:
                cache.fill(k, v)
            y = span_attention(q, k, v, torch.zeros_like(last), last, mask=mask)
        y = self.out(y.flatten(2))
        return y - null.to(y.dtype)  # type: ignore[no-any-return]


class RoutedAttention(Layer):
    r"""Local attention for every token; for k_q routed tokens also attention to k_kv routed tokens from anywhere.

    .. math::
        y_i = \mathrm{local}(x)_i + (1 - g_i)\,\nu + g_i\,
              \mathrm{out}\Big(\sum_{j \in K} \mathrm{softmax}_j(q_i\cdot k_j)\, h_j v_j\Big)

    with g the gates of the routed queries (0 for all others), h those of the routed keys and values K, and ν the
    learned output (`null`) of tokens that are not routed. Both branches norm their own inputs and rotate by the
    original positions. There is no residual inside: write ``x + attention(x)``.

    With ``causal=True`` no output depends on a later token, bit for bit, if tokens are finite. Local windows reach back
    only, a running threshold chooses queries (`CausalRouter`), and each window gives ``max(1, round(m·k_kv))`` keys and
    values of its m real tokens or, for an int, ``max(1, round(window·k_kv/n))``, seen by queries of later windows.

    Args:
        dim: width of the tokens.
        k_q, k_kv: how many tokens attend, and how many are attended to: ints, or shares 0 < k ≤ 1 of the
            real tokens (see `Routed`).
        heads, dim_head: heads of the heavy branch, and their channels (even).
        light_heads: heads of the local attention; default: heads.
        window: tokens of a local window (see `LocalAttention`).
        causal: no output depends on a later token: for language models.
        router_q, router_kv: default `Router` (causal queries: `CausalRouter`); modules with their call signature and
            one route. With causal, router_kv is called on windows as if each were a sequence, and router_q must list
            tokens in their order.
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
        self.heavy = HeavyAttention(dim, heads, dim_head, dim_context=dim, device=device, dtype=dtype)
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

    if TYPE_CHECKING:
        __call__: RoutedCall[AttentionRouting]

    def check(self, x: Tensor) -> None:
        """Raise TypeError or ValueError unless x is (batch, n, dim) of a float dtype."""
        check_tokens("RoutedAttention", x, self.dim)

    def composed(
        self, x: Tensor, mask: Tensor | None, cache: AttentionCache | None = None
    ) -> tuple[Tensor, AttentionRouting]:
        """Compute module by module."""
        n, heavy = x.shape[1], self.heavy
        routing_q = self.router_q(x, k_for(self.router_q, self.k_q, n), mask)
        if self.causal and n:
            # the router sees each window as a sequence of its own
            parts, real = windows(x, mask, self.window)
            indices, gates, scores = self.router_kv(parts, self.quota(n), real)
            indices = of_sequence(indices, len(x), self.window)
            scores = scores.view(len(x), cdiv(n, self.window) * self.window)[:, :n]
            routing_kv = RouterOutput(indices, gates.view(indices.shape), scores)
        else:
            routing_kv = self.router_kv(x, k_for(self.router_kv, self.k_kv, n), mask)
        routing, q, kv = AttentionRouting(routing_q, routing_kv), routing_q.indices, routing_kv.indices
        light_cache, heavy_cache = ({}, None) if cache is None else ({"cache": cache.light}, cache.heavy)
        y = self.light(x, mask, **light_cache).flatten(0, 1)
        y = y + self.null.to(y.dtype)
        if q.shape[1] or not x.numel():
            # without a mask, a Router always finds k tokens
            always_full = mask is None and type(self.router_kv) is Router and not (self.causal and n % self.window)
            if self.causal:
                quota = kv.shape[1] // max(1, cdiv(n, self.window))
                # missing queries come last and see every key, so that `last` never decreases
                last = torch.where(q >= 0, q // self.window * quota, kv.shape[1])
            else:
                last = torch.full(q.shape[1:], kv.shape[1], dtype=torch.int32, device=q.device)
            present = None if always_full else kv >= 0
            tokens = gather(x, q), gather(x, kv)
            update = heavy(*tokens, routing, self.null, last, turned=True, mask=present, cache=heavy_cache)
            y = scatter_add(y, update, routing_q.gates, q, inplace=plain())
        return explore(y, x, self.router_q, self.k_q, mask).view(x.shape), routing

    def step(self, x: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionRouting]:
        """Return the outputs (batch, 1, dim) of one more token of each sequence; indices are positions, or −1."""
        heavy, q = self.heavy, self.router_q(x, self.k_q, cache=cache.queries)
        y = self.light(x, cache=cache.light)
        y = y + self.null.to(y.dtype)
        # a CPU skips a branch that no token chose; on a GPU the host would wait longer than the branch takes
        begins_window = cache.clock.turns(self.window)
        if begins_window or x.device.type != "cpu" or bool((q.indices >= 0).any()):
            memories, kv = cache.previous_window(self, begins_window)
            routing = AttentionRouting(q, kv)
            last = q.indices[:, 0] // self.window
            update = heavy(x, memories, routing, self.null, last, turned=True, mask=None, cache=cache.heavy)
            y = y + (update * q.gates[..., None]).to(y.dtype)
        else:
            routing = AttentionRouting(q, RouterOutput(q.indices[:, :0], q.gates[:, :0], q.scores[:, :0]))
        cache.keep(x)
        return y, routing

    def fused(
        self, x: Tensor, mask: Tensor | None, dtype: torch.dtype, residual: bool = False,
        cache: AttentionCache | None = None,
    ) -> tuple[Tensor, AttentionRouting]:  # fmt: skip
        """Compute what `composed` does, plus x with `residual`, as one autograd node or one operator."""
        n, (q, kv, light, heavy, *inner) = x.shape[1], parts_of(self, *_PARTS)
        norm, qkv, out, norm_q, norm_kv, *heavy_weights = (m._parameters["weight"] for m in inner)
        check_mask("Router", x, mask)
        keys = kv.choice(self.quota(n), self.window) if self.causal else kv.choice(self.k_kv, n)
        plan = Plan(
            dtype, light.heads, heavy.heads, heavy.dim_head, light.window, self.causal, q.choice(self.k_q, n), keys,
            q.explore_stride(self.k_q, n), q.explore, residual, inner[0].eps_for(x), NORM_EPS,
        )  # fmt: skip
        weights = q.weight, kv.weight, norm, mask, norm_q, norm_kv, self.null, qkv, out, *heavy_weights
        if cache is not None:
            (y, at_q, gates_q, at_kv, gates_kv, scores), near, far = with_keys(plan, x, *weights)
            cache.light.keep(*near)
            cache.heavy.fill(*far)
        else:
            y, at_q, gates_q, at_kv, gates_kv, scores = routed_attention(plan, x, *weights)
        scores_q, scores_kv = scores.unbind(0)
        return y, AttentionRouting(RouterOutput(at_q, gates_q, scores_q), RouterOutput(at_kv, gates_kv, scores_kv))

    def quota(self, n: int) -> int | float:
        """Return how many keys and values each window gives for n > 0 tokens, or which share of its real tokens."""
        if isinstance(self.k_kv, float):
            return k_for(self.router_kv, self.k_kv, self.window)
        k = count(self.k_kv, n)
        return min(self.window, max(1, round(self.window * k / n))) if k else 0

    def fused_dtype(self, x: Tensor, mask: Tensor | None) -> torch.dtype | None:
        """Return the branches' dtype where `fused` gives the same as `composed`, else None."""
        if not (x.numel() and self.k_q and self.k_kv and x.shape[-1] <= WIDEST):
            return None
        parts = parts_of(self, *_PARTS)
        # the layer may be a subclass (FSDP2 makes one) or have hooks: they see the same either way, so only parts count
        if not as_written(parts, _KINDS.get(type(parts[0]))) or {parts[0].dim, parts[1].dim} != {self.dim}:
            return None
        if "null" in self.__dict__ or self.__dict__["_buffers"]:
            return None
        if [m for m in parts if m._parameters.get("bias") is not None]:
            return None
        weights = [w for m in (self, *parts) for w in m._parameters.values() if w is not None]
        return branch_dtype(x, mask, weights, weights)

    def extra_repr(self) -> str:
        return f"{self.dim}, k_q={self.k_q}, k_kv={self.k_kv}, window={self.window}, causal={self.causal}"


def check_routers(module: str, router_q: nn.Module | None, router_kv: nn.Module | None) -> None:
    """Raise ValueError for a router with several routes: attention has one list of queries and one of keys."""
    for name, router in (("router_q", router_q), ("router_kv", router_kv)):
        if (routes := getattr(router, "num_routes", 1)) != 1:
            raise ValueError(f"{module}: {name} must have one route, got num_routes = {routes}")


# what `fused` replaces: the classes of the parts, then of the modules in them, for either router of queries
_PARTS = "router_q", "router_kv", "light", "heavy"
_KINDS: dict[type, list[type]] = {
    router: [
        router, Router, LocalAttention, HeavyAttention, RMSNorm, nn.Linear, nn.Linear, RMSNorm, RMSNorm, nn.Linear,
        nn.Linear, nn.Linear,
    ]
    for router in (Router, CausalRouter)
}  # fmt: skip
