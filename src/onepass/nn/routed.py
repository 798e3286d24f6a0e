"""`Routed`: a light branch for every token, a heavy branch for the k that the router chose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.core.eager import plain
from onepass.ops.routing.op import gather, scatter_add
from onepass.ops.routing.op_feed_forward import Probe, light_heavy
from onepass.ops.routing.op_fork import fits, fork

from .explore import explore
from .feed_forward import FeedForward, untouched
from .router import NORM_EPS, Router, RouterOutput


class Routed(nn.Module):
    r"""``y = light(x)``, and for each chosen token i: ``y_i += gate_i · heavy(x_i)``.

    Args:
        light: token-wise module, ``(batch, n, dim) → (batch, n, dim)``; sees every token.
        heavy: token-wise module, ``(batch, k, dim) → (batch, k, dim)``; sees the chosen tokens alone.
        router: `Router`, or any module called as ``router(x, k, mask) → RouterOutput``. With R routes a token that
            several routes chose gets the heavy output once per route, each times its gate.
        k: how many tokens of each sequence the heavy branch sees: an int ≥ 0 (at most n are taken), or a float
            0 < k ≤ 1, a share of n: ``max(1, round(k·n))``. n is the padded length.

    Shapes: ``routed(x, mask=None)`` with x ``(batch, n, dim)`` of any float dtype and strides, mask ``(batch, n)``
    bool, True at real tokens, gives y like x; ``routed(x, mask, return_routing=True)`` gives ``(y, RouterOutput)``.

    Masked tokens get the light output and never the heavy one. Rows with fewer real tokens than k use those they have.
    No row's output depends on another row. There is no residual inside: write ``x + routed(x)``.

    Deterministic: the indices of one route are unique in a row, so no two additions meet.

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

    def __init__(self, light: nn.Module, heavy: nn.Module, router: nn.Module, k: int | float) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, (int, float)):
            raise TypeError(f"{type(self).__name__}: k must be an int or a float, got {type(k).__name__}")
        if (isinstance(k, int) and k < 0) or (isinstance(k, float) and not 0 < k <= 1):
            raise ValueError(f"{type(self).__name__}: k must be an int ≥ 0 or a share 0 < k ≤ 1 of n, got {k}")
        self.light, self.heavy, self.router, self.k = light, heavy, router, k

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, RouterOutput]:
        if x.dim() != 3:
            raise ValueError(f"{type(self).__name__}: x must be (batch, n, dim), got {tuple(x.shape)}")
        routing: RouterOutput = self.router(x, self._count(x.shape[1]), mask)
        y = self._light(x)
        if routing.indices.shape[-1]:
            update = self._heavy(x, routing.indices)
            y = scatter_add(y, update, routing.gates, routing.indices, inplace=self._owns_light_output())
        y = explore(y, x, self.router, routing.indices.shape[-1], mask)
        y = y.reshape(x.shape)
        return (y, routing) if return_routing else y

    def _count(self, n: int) -> int:
        """How many tokens of n to choose."""
        if isinstance(self.k, int) or n == 0:
            return min(int(self.k), n)
        return max(1, round(self.k * n))

    def _light(self, x: Tensor) -> Tensor:
        """The light output; as rows (batch·n, dim) where it may be added to: autograd dislikes writes to a view."""
        if isinstance(self.light, FeedForward):
            return self.light(x.reshape(-1, x.shape[-1]))  # type: ignore[no-any-return]
        y = self.light(x)
        self._same_shape("light", y, x.shape)
        return y  # type: ignore[no-any-return]

    def _owns_light_output(self) -> bool:
        """Whether nobody else has the light output: an arbitrary module may return its input, or a hook keep it.

        A plain `FeedForward` ends in a linear layer, whose output is new and not needed in backward.
        """
        return plain() and isinstance(self.light, FeedForward) and self.light.is_plain()

    def _heavy(self, x: Tensor, indices: Tensor) -> Tensor:
        """Heavy output (batch, k, dim) or (batch, R, k, dim); a missing token is one of zeros, its output unused."""
        chosen = gather(x, indices).flatten(1, -2)
        out = self.heavy(chosen)
        self._same_shape("heavy", out, chosen.shape)
        return out.reshape(*indices.shape, x.shape[-1])  # type: ignore[no-any-return]

    def _same_shape(self, branch: str, out: Tensor, shape: torch.Size) -> None:
        if out.shape != shape:
            raise ValueError(
                f"{type(self).__name__}: the {branch} branch must keep the shape {tuple(shape)}, got {tuple(out.shape)}"
            )

    def extra_repr(self) -> str:
        return f"k={self.k}"


class RoutedFeedForward(Routed):
    r"""A small feed-forward for every token, a large one for the k that a router chose: ``light(x) + gate·heavy(x)``.

    Each branch is ``down(gelu(up(rms_norm(x))))`` with a norm of its own, as in CoLT5: the heavy norm then runs on k
    tokens alone, and the two branches may scale their inputs differently. There is no residual inside:
    write ``x + ff(x)``.

    Args:
        dim: width of the tokens.
        k: how many tokens the heavy branch sees: an int, or a share 0 < k ≤ 1 of the sequence (see `Routed`).
        light_mult: hidden width of the light branch, in units of dim.
        heavy_mult: hidden width of the heavy branch, in units of dim.
        router: default ``Router(dim)``; any module with its call signature.
        bias: biases in the linear layers.
        device, dtype: of all parameters.

    Shapes, masks and errors: as `Routed`. Works under autocast, `torch.compile` and activation checkpointing.

    Raises:
        TypeError: k is neither int nor float.
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
        self,
        dim: int,
        k: int | float,
        *,
        light_mult: float = 0.5,
        heavy_mult: float = 4,
        router: nn.Module | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        def branch(name: str, mult: float) -> FeedForward:
            hidden = int(dim * mult)
            if hidden < 1:
                raise ValueError(f"RoutedFeedForward: {name} = {mult} of dim {dim} leaves a hidden width of {hidden}")
            return FeedForward(dim, hidden, bias=bias, device=device, dtype=dtype)

        light, heavy = branch("light_mult", light_mult), branch("heavy_mult", heavy_mult)
        super().__init__(light, heavy, router or Router(dim, device=device, dtype=dtype), k)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_routing: bool = False
    ) -> Tensor | tuple[Tensor, RouterOutput]:
        dtype = self._fused_dtype(x, mask)
        if dtype is None:
            return super().forward(x, mask, return_routing)
        light, heavy, router, k = self.light, self.heavy, self.router, self._count(x.shape[1])
        assert isinstance(light, FeedForward)
        assert isinstance(heavy, FeedForward)
        assert isinstance(router, Router)
        router.check(x, k, mask)
        norm, n = light.norm, x.shape[1]
        # the exploring gradient of a cosine router is left to `explore`
        probed = router.explores(k, n) and router.score == "normalised"
        probe = Probe(n // k, router.explore, mask) if probed else None
        forked = fork(
            x, norm.weight, router.vectors(), eps=light.norm_eps(x), score_eps=NORM_EPS, dtype=dtype, k=k,
            every=probe.every if probe else 0,
        )  # fmt: skip
        routing = router.decide(router.scaled(forked.scores), k, mask)
        y = light_heavy(
            forked, x, routing.gates, routing.indices, light.weights(), heavy.weights(), heavy.norm.weight,
            heavy.norm_eps(x), probe,
        )  # fmt: skip
        if probe is None:
            y = explore(y, x, router, k, mask)
        return (y, routing) if return_routing else y

    def _fused_dtype(self, x: Tensor, mask: Tensor | None) -> torch.dtype | None:
        """What the branches compute in where two autograd nodes can stand in for the composition of modules.

        None where they can't: something else looks at the call (a compiler, a transform, a hook), the branches or the
        router are not the default ones, or there is nothing to choose.
        """
        if not plain(x, mask):
            return None
        light, heavy, router = self.light, self.heavy, self.router
        if type(light) is not FeedForward or type(heavy) is not FeedForward or type(router) is not Router:
            return None
        if not (x.dim() == 3 and x.numel() and self.k and router.num_routes == 1 and fits(x.shape[-1])):
            return None
        linear = (*light.weights(), *heavy.weights())
        tensors = (router.weight, light.norm.weight, heavy.norm.weight, *linear)
        if not (plain(*tensors) and light.is_plain() and heavy.is_plain() and untouched(router)):
            return None
        dtypes = {w.dtype for w in linear if w is not None}
        if torch.is_autocast_enabled(x.device.type):
            return None if torch.float64 in (x.dtype, *dtypes) else torch.get_autocast_dtype(x.device.type)
        return x.dtype if dtypes == {x.dtype} else None


__all__ = ["FeedForward", "Routed", "RoutedFeedForward"]
