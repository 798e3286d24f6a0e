"""`Routed`: a light branch for every token, a heavy branch for the k that the router chose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norm import RMSNorm
from .router import Router, RouterOutput


class FeedForward(nn.Module):
    """``down(gelu(up(norm(x))))``: one branch of `RoutedFeedForward`, with a norm of its own."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, device=device, dtype=dtype)
        self.up = nn.Linear(dim, hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


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
        # one flat list of tokens: whole rows move, and a row index can't leave its sequence
        tokens = x.reshape(-1, x.shape[-1])
        y = self._light(x, tokens)
        if routing.indices.shape[-1]:
            update, rows = self._heavy(tokens, routing, x.shape[1])
            for route in range(rows.shape[1]):
                y.index_add_(0, rows[:, route].reshape(-1), update[:, route].reshape(-1, x.shape[-1]).to(y.dtype))
        y = y.view(x.shape)
        return (y, routing) if return_routing else y

    def _count(self, n: int) -> int:
        """How many tokens of n to choose."""
        if isinstance(self.k, int) or n == 0:
            return min(int(self.k), n)
        return max(1, round(self.k * n))

    def _light(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The light output as (batch·n, dim), in memory of its own that may be added to."""
        if isinstance(self.light, FeedForward):
            # ends in a linear layer, whose output nobody else holds and whose backward does not need it
            return self.light(tokens)  # type: ignore[no-any-return]
        y = self.light(x)
        self._same_shape("light", y, x.shape)
        # an arbitrary module may return its input, or have saved its output for backward
        return y.reshape(tokens.shape).clone()  # type: ignore[no-any-return]

    def _heavy(self, tokens: Tensor, routing: RouterOutput, n: int) -> tuple[Tensor, Tensor]:
        """Gated heavy output (batch, R, k, dim), and the row of `tokens` that each belongs to (batch, R, k)."""
        indices, gates = routing.indices, routing.gates
        if indices.dim() == 2:
            indices, gates = indices[:, None], gates[:, None]
        batch, routes, k = indices.shape
        # a missing token (-1) is a token of zeros with gate 0 on the first row: it adds an exact 0 whatever lies there
        missing = indices < 0
        rows = indices.clamp_min(0) + torch.arange(batch, device=indices.device)[:, None, None] * n
        # one gather per route: a row that several routes chose would meet itself in the gather's gradient, in any order
        parts = [tokens.index_select(0, rows[:, r].reshape(-1)).view(batch, k, tokens.shape[-1]) for r in range(routes)]
        chosen = parts[0] if routes == 1 else torch.cat(parts, 1)
        chosen = chosen.masked_fill(missing.reshape(batch, routes * k, 1), 0)
        out = self.heavy(chosen)
        self._same_shape("heavy", out, chosen.shape)
        gated = out.reshape(batch, routes, k, tokens.shape[-1]) * gates.masked_fill(missing, 0)[..., None]
        return gated, rows

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
