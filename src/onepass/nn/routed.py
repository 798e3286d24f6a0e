"""`Routed`: a light branch for every token, a heavy branch for the k that the router chose."""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.core import check
from onepass.fused.feed_forward import Plan, routed_feed_forward
from onepass.fused.norms import WIDEST
from onepass.ops.routing.op import gather, scatter_add

from .calls import Layer, as_written, branch_dtype, parts_of
from .causal import CausalRouter
from .count import check_count, check_dtype, check_int, check_number, refuse_gone
from .explore import explore
from .norm import RMSNorm
from .packed import check_mask, zero_padding
from .router import NORM_EPS, Router, RouterOutput, k_for

if TYPE_CHECKING:
    from .cache import ChoiceCache
    from .calls import RoutedCall


class FeedForward(nn.Module):
    """``down(gelu(up(norm(x))))``: one branch of `RoutedFeedForward`, with a norm of its own.

    With a residual it takes ``x + residual`` for x, and returns that sum as well.
    """

    def __init__(
        self, dim: int, hidden: int, *, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm = RMSNorm(dim, device=device, dtype=dtype)
        self.up = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        check_dtype("FeedForward", x, self.up)
        normed, *total = (self.norm(x),) if residual is None else self.norm(x, residual)
        y = self.down(F.gelu(self.up(normed)))
        return (y, *total) if total else y  # type: ignore[return-value]


class Routed(Layer):
    r"""``y = light(x)``, and for each chosen token i: ``y_i += gate_i · heavy(x_i)``.

    Args:
        light: token-wise module, ``(batch, n, dim) → (batch, n, dim)``; sees every token.
        heavy: token-wise module, ``(batch, k, dim) → (batch, k, dim)``; sees the chosen tokens alone.
        router: `Router`, or any module called as ``router(x, k, mask) → RouterOutput``. With R routes, a token that
            several of them chose gets the heavy output once per route, times that route's gate.
        k: how many tokens of each sequence the heavy branch sees: an int ≥ 1 (at most n are taken), or a share
            0 < k ≤ 1 of its m real tokens: ``max(1, round(k·m))``, so that a padded sequence gives what it gives
            alone. (A router that is not a `Router` gets ``max(1, round(k·n))``, n the padded length.)

    Shapes: ``routed(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype and strides, mask ``(batch, n)``
    bool, True at real tokens, gives y like x; ``routed(x, mask, return_routing=True)`` gives ``(y, RouterOutput)``.

    Packed sequences: ``routed(x, cu_seqlens=bounds, max_seqlen=longest)`` with x ``(total, dim)`` or ``(1, total,
    dim)`` and bounds ``(sequences + 1,)`` int32 or int64, where each begins and the last ends. Each gives what it gives
    alone, so a causal layer refuses an int k. It computes on a batch padded to max_seqlen, which a CPU can read from
    the bounds; the routing is that of the batch. On a GPU, values of bounds are not checked.

    Masked tokens get the light output alone. No row depends on another. Deterministic: the indices of one route are
    unique in a row, so no two additions race. There is no residual inside: write ``x + routed(x)``.

    Raises:
        TypeError: k is neither int nor float.
        ValueError: k is out of range, or a branch changes the shape.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import Routed, Router
        >>> layer = Routed(torch.nn.Identity(), torch.nn.Linear(16, 16), Router(16), k=0.25)
        >>> layer(torch.randn(2, 40, 16)).shape
        torch.Size([2, 40, 16])
    """

    def __init__(self, light: nn.Module, heavy: nn.Module, router: nn.Module, k: int | float, **gone: NoReturn) -> None:
        super().__init__()
        check_count(type(self).__name__, "k", k)
        refuse_gone(type(self).__name__, gone)
        if isinstance(k, int) and k == 1:
            level = 2  # warn about the user's line, not one of the package
            while sys._getframe(level - 1).f_globals["__name__"].startswith("onepass."):
                level += 1
            warnings.warn("the int k=1 is one token of a sequence; write k=1.0 for all of them", stacklevel=level)
        self.light, self.heavy, self.router, self.k = light, heavy, router, k

    if TYPE_CHECKING:
        __call__: RoutedCall[RouterOutput]

    def check(self, x: Tensor) -> None:
        """Raise TypeError or ValueError unless x is (batch, n, dim)."""
        check.tensor(type(self).__name__, "x", x)
        if x.dim() != 3:
            raise ValueError(f"{type(self).__name__}: x must be (batch, n, dim), got {tuple(x.shape)}")

    def composed(self, x: Tensor, mask: Tensor | None, cache: ChoiceCache | None = None) -> tuple[Tensor, RouterOutput]:
        """Compute module by module."""
        k = k_for(self.router, self.k, x.shape[1])
        routing = self.router(x, k, mask)
        y = self._branch("light", x)
        if routing.indices.shape[-1] or not x.numel():
            # a batch without tokens comes here too, so that every weight has a gradient, as on other DDP processes;
            # a missing token is gathered as zeros, and its output is not used
            chosen = gather(x, routing.indices).flatten(1, -2)
            update = self._branch("heavy", chosen).reshape(*routing.indices.shape, x.shape[-1])
            # not in place: a branch may have returned x itself, and a hook may keep y
            y = scatter_add(y, update, routing.gates, routing.indices)
        return explore(y, x, self.router, k, mask), routing

    def step(self, x: Tensor, cache: ChoiceCache) -> tuple[Tensor, RouterOutput]:
        """Compute one more token (batch, 1, dim) of each sequence."""
        routing = self.router(x, self.k, cache=cache)
        y = self._branch("light", x)
        # a CPU skips a branch that no token chose; on a GPU the host would wait longer than the branch takes
        if x.device.type != "cpu" or bool((routing.indices >= 0).any()):
            update = self._branch("heavy", x)
            y = y + (update * routing.gates[..., None]).to(y.dtype)
        return y, routing

    def _branch(self, name: str, tokens: Tensor) -> Tensor:
        """Return the output of a branch; raise ValueError unless it has the shape of the tokens."""
        y: Tensor = getattr(self, name)(tokens)
        if y.shape != tokens.shape:
            raise ValueError(
                f"{type(self).__name__}: the {name} branch must keep the shape {tuple(tokens.shape)}, "
                f"got {tuple(y.shape)}"
            )
        return y

    def extra_repr(self) -> str:
        return f"k={self.k}"


class RoutedFeedForward(Routed):
    r"""A small feed-forward for every token, a large one for the k that a router chose: ``light(x) + gate·heavy(x)``.

    Each branch is ``down(gelu(up(rms_norm(x))))`` with a norm of its own, as in CoLT5. There is no residual inside:
    write ``x + ff(x)``.

    A step over few tokens waits for the host: docs/performance.md compares it with a dense one; `graphed` helps.

    Args:
        dim: width of the tokens.
        k: how many tokens the heavy branch sees: an int, or a share 0 < k ≤ 1 of the real tokens (see `Routed`).
        light_mult, heavy_mult: hidden width of the light and the heavy branch, in units of dim.
        router: default ``Router(dim)``; any module with its call signature.
        bias: biases in the linear layers.
        device, dtype: of all parameters.

    Shapes, masks, packed sequences and errors: as `Routed`; masked tokens count as zeros whatever they hold. Works
    under autocast, `torch.compile`, `torch.export` and activation checkpointing. Losses on gates and scores reach x and
    the router. So does the gradient of y; in the fused form (docs/in_program.md) it is not in ``gates.grad``.

    Raises:
        TypeError: k is neither int nor float, dim is not an int, or a width is not a number.
        ValueError: k is out of range, or a hidden width comes out below 1.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedFeedForward
        >>> ff = RoutedFeedForward(64, k=1 / 16)
        >>> x = torch.randn(2, 128, 64)
        >>> y, routing = ff(x, return_routing=True)
        >>> y.shape, routing.indices.shape
        (torch.Size([2, 128, 64]), torch.Size([2, 8]))
    """

    def __init__(
        self, dim: int, k: int | float, *, light_mult: float = 0.5, heavy_mult: float = 4,
        router: nn.Module | None = None, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, **gone: NoReturn,
    ) -> None:  # fmt: skip
        def branch(name: str, mult: float) -> FeedForward:
            check_number("RoutedFeedForward", name, mult)
            if not 1 <= dim * mult < math.inf:
                problem = f"{name} = {mult} of dim {dim} leaves a hidden width of {dim * mult:g}"
                raise ValueError(f"RoutedFeedForward: {problem}; it must be finite and ≥ 1")
            return FeedForward(dim, int(dim * mult), bias=bias, device=device, dtype=dtype)

        check_int("RoutedFeedForward", "dim", dim)
        light, heavy = branch("light_mult", light_mult), branch("heavy_mult", heavy_mult)
        router = Router(dim, device=device, dtype=dtype) if router is None else router
        super().__init__(light, heavy, router, k, **gone)

    def composed(self, x: Tensor, mask: Tensor | None, cache: ChoiceCache | None = None) -> tuple[Tensor, RouterOutput]:
        """Compute module by module; masked tokens count as zeros."""
        return super().composed(zero_padding("RoutedFeedForward", x, mask), mask, cache)

    def fused(
        self, x: Tensor, mask: Tensor | None, dtype: torch.dtype, residual: bool = False,
        cache: ChoiceCache | None = None,
    ) -> tuple[Tensor, RouterOutput]:  # fmt: skip
        """Compute what `composed` does, plus x with `residual`, as one autograd node or one operator."""
        n, (router, _, _, norm, up, down, heavy_norm, heavy_up, heavy_down) = x.shape[1], parts_of(self, *_PARTS)
        check_mask("Router", x, mask)
        plan = Plan(
            dtype, router.choice(self.k, n), router.explore_stride(self.k, n), router.explore, residual,
            norm.eps_for(x), NORM_EPS,
        )  # fmt: skip
        vectors = (m._parameters["weight"] for m in (router, norm, heavy_norm))
        linear = [m._parameters[name] for m in (up, down, heavy_up, heavy_down) for name in ("weight", "bias")]
        y, *routing = routed_feed_forward(plan, x, *vectors, mask, *linear)
        return y, RouterOutput(*routing)

    def fused_dtype(self, x: Tensor, mask: Tensor | None) -> torch.dtype | None:
        """Return the branches' dtype where `fused` gives the same as `composed`, else None."""
        if not (x.numel() and self.k and x.shape[-1] <= WIDEST):
            return None
        parts = parts_of(self, *_PARTS)
        if not as_written(parts, _KINDS.get(type(parts[0]))):
            return None
        if parts[0].num_routes != 1 or parts[0].dim != x.shape[-1]:
            return None
        weights = [w for m in parts for w in m._parameters.values() if w is not None]
        multiplied = [w for m in parts if type(m) is nn.Linear for w in m._parameters.values() if w is not None]
        return branch_dtype(x, mask, weights, multiplied)


# what `fused` replaces: the classes of the parts, then of the modules in them, for either router
_PARTS = "router", "light", "heavy"
_KINDS: dict[type, list[type]] = {
    router: [router, FeedForward, FeedForward, *2 * (RMSNorm, nn.Linear, nn.Linear)]
    for router in (Router, CausalRouter)
}
