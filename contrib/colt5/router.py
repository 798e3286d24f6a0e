"""colt5-attention's router and routed feed-forward; see `contrib.colt5`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn.count import check_int, check_number
from onepass.nn.packed import check_mask, check_tokens
from onepass.ops._shared.arguments import MAX_VECTORS
from onepass.ops.coor_descent.op import coor_descent
from onepass.ops.norm.op import rms_norm
from onepass.ops.routing.op import gather, scatter_add
from onepass.ops.topk.op import gates, topk
from onepass.ops.weighted_sum.op import weighted_sum

# the original divides by max(|x|, 1e-12); as a mean of squares this is 1e-24 / dim
_TINY = 1e-24


class RouterReturn(NamedTuple):
    """The result of `CoordinateDescentRouter`: ``(batch, k)``, or ``(batch, routes, k)`` with several routing tokens.

    Attributes:
        indices: the chosen tokens, the highest score first; −1 where a row has fewer real tokens than k. None if the
            sequence is no longer than k: then all tokens are taken.
        scores: a gate per chosen token, 0 for a missing one.
        routed_tokens: the chosen tokens, ``(…, k, dim)``; zeros for a missing one.
        routed_mask: False for a missing token; None without a mask.
    """

    indices: Tensor | None
    scores: Tensor
    routed_tokens: Tensor
    routed_mask: Tensor | None


class CoordinateDescentRouter(nn.Module):
    r"""Choose the k tokens with the highest score :math:`\langle x_i, v\rangle`, as ``colt5_attention``'s router.

    The gates come from T steps of coordinate descent towards a sum of ``k · fetch_k_ratio``, at most n
    (:func:`onepass.coor_descent`).

    Args:
        dim: width of the tokens.
        straight_through: gates are 1, with the gradient of the soft ones.
        n_iters, eps, eps_decay, eps_init: steps and temperatures of coordinate descent.
        fetch_k_ratio: ≥ 1.
        num_routing_tokens: number of vectors v. Each chooses k tokens.
        learned_routing_tokens: the module has no vectors; each call passes ``routing_tokens``.
        cosine_sim_routing, cosine_sim_scale: scores are the scale times the cosine of x and v.
        route_block_size: choose ⌈k / blocks⌉ tokens in each block of this size. Tokens after the last whole block are
            never chosen.
        use_triton, triton_checkpoint_segments: accepted and ignored. onepass picks the path itself.

    Shapes: ``router(x, num_tokens=k, mask=None)`` with x ``(batch, n, dim)`` of any float dtype, mask ``(batch, n)``
    bool, True at real tokens, gives a `RouterReturn`. ``routing_tokens`` is ``(batch, dim)`` or
    ``(batch, routes, dim)``. ``random_route=True`` chooses at random with gates 1. ``keep_one_route_dim=True`` keeps
    the dimension of one route.

    Raises:
        TypeError: a size is not an int, or x is not a floating-point tensor.
        ValueError: a size is out of range, shapes don't fit, or ``routing_tokens`` is missing.

    Source: CoLT5 (arXiv:2303.09752), Wright (arXiv:1502.04759).

    Example:
        >>> import torch
        >>> from contrib.colt5 import CoordinateDescentRouter
        >>> routed = CoordinateDescentRouter(16)(torch.randn(2, 40, 16), num_tokens=4)
        >>> routed.indices.shape, routed.scores.tolist()[0], routed.routed_tokens.shape
        (torch.Size([2, 4]), [1.0, 1.0, 1.0, 1.0], torch.Size([2, 4, 16]))
    """

    def __init__(
        self, dim: int, straight_through: bool = True, n_iters: int = 20, fetch_k_ratio: float = 9 / 8,
        eps: float = 0.03, eps_decay: float = 0.7, eps_init: float = 4.0, num_routing_tokens: int = 1,
        learned_routing_tokens: bool = False, use_triton: bool = False, cosine_sim_routing: bool = False,
        cosine_sim_scale: float = 8, route_block_size: int | None = None, triton_checkpoint_segments: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"dim": dim, "n_iters": n_iters, "num_routing_tokens": num_routing_tokens}
        if route_block_size is not None:
            sizes["route_block_size"] = route_block_size
        for name, size in sizes.items():
            check_int("CoordinateDescentRouter", name, size)
        check_number("CoordinateDescentRouter", "fetch_k_ratio", fetch_k_ratio)
        if fetch_k_ratio < 1:
            raise ValueError(f"CoordinateDescentRouter: fetch_k_ratio must be ≥ 1, got {fetch_k_ratio}")
        self.dim, self.straight_through = dim, straight_through
        self.n_iters, self.fetch_k_ratio = n_iters, fetch_k_ratio
        self.eps, self.eps_decay, self.eps_init = eps, eps_decay, eps_init
        self.num_routing_tokens, self.route_block_size = num_routing_tokens, route_block_size
        self.cosine_sim_routing, self.cosine_sim_scale = cosine_sim_routing, cosine_sim_scale
        self.routing_token = None if learned_routing_tokens else nn.Parameter(torch.randn(num_routing_tokens, dim))

    def route_back(self, src: Tensor, routed_tokens: Tensor, indices: Tensor) -> Tensor:
        """Return src ``(batch, n, dim)`` with the rows at indices ``(batch, k)`` replaced; −1 replaces nothing."""
        n = src.shape[1]
        # missing tokens go to a row that is cut off again
        rows = torch.where(indices < 0, n, indices)[..., None].expand(routed_tokens.shape)
        return F.pad(src, (0, 0, 0, 1)).scatter(1, rows, routed_tokens.to(src.dtype))[:, :n]

    def forward(
        self, x: Tensor, *, num_tokens: int, mask: Tensor | None = None, random_route: bool = False,
        routing_tokens: Tensor | None = None, keep_one_route_dim: bool = False,
    ) -> RouterReturn:  # fmt: skip
        check_tokens("CoordinateDescentRouter", x, self.dim)
        check_int("CoordinateDescentRouter", "num_tokens", num_tokens)
        n = x.shape[1]
        check_mask("CoordinateDescentRouter", x, mask)
        several = keep_one_route_dim or self.num_routing_tokens > 1
        if n <= num_tokens:
            if several:
                x = x[:, None].expand(-1, self.num_routing_tokens, -1, -1)
                mask = None if mask is None else mask[:, None].expand(x.shape[:-1])
            return RouterReturn(None, x.new_ones(x.shape[:-1]), x, mask)
        indices, chosen = self.choose(self.score(x, routing_tokens), num_tokens, mask, random_route)
        if not several:
            indices, chosen = indices.squeeze(1), chosen.squeeze(1)
        return RouterReturn(indices, chosen, gather(x, indices), None if mask is None else indices >= 0)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, *, num_tokens: int, **options: Any) -> RouterReturn: ...

    def score(self, x: Tensor, routing_tokens: Tensor | None = None) -> Tensor:
        """Return the score of each token for each route, (batch, routes, n)."""
        vectors, routes = self.routing_token, self.num_routing_tokens
        if vectors is None:
            if routing_tokens is None:
                raise ValueError(
                    "CoordinateDescentRouter: routing_tokens must be given with learned_routing_tokens=True"
                )
            given = routing_tokens[:, None] if routing_tokens.dim() == 2 else routing_tokens
            if given.shape != (x.shape[0], routes, self.dim):
                raise ValueError(
                    f"CoordinateDescentRouter: routing_tokens must be (batch, num_routing_tokens, dim) = "
                    f"{(x.shape[0], routes, self.dim)}, got {tuple(routing_tokens.shape)}"
                )
        else:
            given = vectors
        if self.cosine_sim_routing:
            x = rms_norm(x, eps=_TINY / self.dim)
            given = F.normalize(given, dim=-1) * (self.cosine_sim_scale / math.sqrt(self.dim))
        if vectors is None:
            return given @ x.mT
        sums = [weighted_sum(x, some) for some in torch.split(given, MAX_VECTORS)]
        return torch.cat(sums, -1).mT if len(sums) > 1 else sums[0].mT

    def choose(
        self, scores: Tensor, num_tokens: int, mask: Tensor | None, random_route: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return indices and gates, (batch, routes, k), for scores (batch, routes, n) and a mask (batch, n)."""
        mask = None if mask is None else mask[:, None]
        block, n = self.route_block_size, scores.shape[-1]
        if block is not None:
            blocks = n // block
            if blocks == 0:
                raise ValueError(
                    f"CoordinateDescentRouter: route_block_size must be ≤ n = {n} of a routed sequence, got {block}"
                )
            scores = _blocks(scores, blocks, block)
            mask = None if mask is None else _blocks(mask, blocks, block)
            num_tokens, n = min(block, math.ceil(num_tokens / blocks)), block
        if random_route:
            indices = topk(torch.randn_like(scores), num_tokens, mask=mask, pad=True).indices
            chosen = (indices >= 0).to(scores.dtype)
        else:
            soft = coor_descent(
                scores, n_iters=self.n_iters, k=min(num_tokens * self.fetch_k_ratio, n), eps=self.eps,
                eps_init=self.eps_init, eps_decay=self.eps_decay, mask=mask,
            )  # fmt: skip
            # by score, not by gate: more than k gates can be exactly 1
            indices = topk(scores, num_tokens, mask=mask, pad=True).indices
            if self.straight_through:
                chosen = gates(soft, indices)
            else:
                chosen = torch.where(indices >= 0, soft.gather(-1, indices.clamp(min=0)), 0.0)
        if block is not None:
            starts = torch.arange(blocks, device=indices.device)[:, None] * block
            indices = torch.where(indices < 0, indices, indices + starts).flatten(-2)
            chosen = chosen.flatten(-2)
        return indices, chosen

    def extra_repr(self) -> str:
        return f"{self.dim}, num_routing_tokens={self.num_routing_tokens}, n_iters={self.n_iters}, eps={self.eps}"


class ScaledNorm(nn.Module):
    """The original's RMS norm: its weight is called `gamma`, and only a row of zeros needs its eps."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gamma, eps=_TINY / self.gamma.numel())


class ConditionalRoutedFeedForward(nn.Module):
    r"""``light(x)`` for every token, and for each chosen token i ``+ gate_i · heavy(x_i)``, as ``colt5_attention``'s.

    Args:
        dim: width of the tokens.
        num_heavy_tokens: how many tokens of each sequence the heavy branch sees.
        light_ff_mult, heavy_ff_mult: hidden widths of the branches, in units of dim.
        router_straight_through, router_kwargs: arguments of `CoordinateDescentRouter`.
        use_triton: accepted and ignored.

    Shapes: ``layer(x, mask=None, num_heavy_tokens=None)`` with x ``(batch, n, dim)``, mask ``(batch, n)`` bool, True at
    real tokens, gives y like x. There is no residual inside.

    Raises:
        TypeError, ValueError: as `CoordinateDescentRouter`.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from contrib.colt5 import ConditionalRoutedFeedForward
        >>> ConditionalRoutedFeedForward(16, num_heavy_tokens=4)(torch.randn(2, 40, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(
        self, dim: int, *, num_heavy_tokens: int, light_ff_mult: float = 0.5, heavy_ff_mult: float = 4,
        router_straight_through: bool = True, router_kwargs: dict[str, Any] | None = None, use_triton: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_int("ConditionalRoutedFeedForward", "num_heavy_tokens", num_heavy_tokens)
        self.num_heavy_tokens = num_heavy_tokens
        self.router = CoordinateDescentRouter(dim, straight_through=router_straight_through, **(router_kwargs or {}))
        self.light_ff = _feed_forward("light_ff_mult", dim, light_ff_mult)
        self.heavy_ff = _feed_forward("heavy_ff_mult", dim, heavy_ff_mult)

    def forward(self, x: Tensor, mask: Tensor | None = None, num_heavy_tokens: int | None = None) -> Tensor:
        k = self.num_heavy_tokens if num_heavy_tokens is None else num_heavy_tokens
        routed = self.router(x, num_tokens=k, mask=mask)
        light, heavy = self.light_ff(x), self.heavy_ff(routed.routed_tokens)
        return add_heavy(light, heavy, routed)

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, mask: Tensor | None = None, num_heavy_tokens: int | None = None) -> Tensor: ...


def add_heavy(light: Tensor, heavy: Tensor, routed: RouterReturn) -> Tensor:
    """Return light, plus the gated heavy outputs at the chosen tokens (all of them, if there was nothing to choose)."""
    if routed.indices is not None:
        return scatter_add(light, heavy, routed.scores, routed.indices)
    heavy = heavy * routed.scores[..., None]
    return light + (heavy.sum(1) if heavy.dim() > light.dim() else heavy)


def _blocks(t: Tensor, blocks: int, block: int) -> Tensor:
    return t[..., : blocks * block].reshape(*t.shape[:-1], blocks, block)


def _feed_forward(name: str, dim: int, mult: float) -> nn.Sequential:
    check_number("ConditionalRoutedFeedForward", name, mult)
    hidden = int(dim * mult)
    if hidden < 1:
        raise ValueError(f"ConditionalRoutedFeedForward: {name} must give a hidden width ≥ 1, got {mult} · {dim}")
    return nn.Sequential(ScaledNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
