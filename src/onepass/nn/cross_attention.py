"""`RoutedCrossAttention`: a few routed tokens read a few routed memories out of a million."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, overload

import torch
from torch import Tensor, nn

from onepass.core import check
from onepass.core.eager import plain
from onepass.ops.routing.op import gather, scatter_add

from .attention import AttentionRouting, HeavyAttention, check_routers
from .count import check_count, check_int
from .explore import explore
from .local_attention import check_heads
from .packed import check_tokens
from .router import Router, RouterOutput, k_for
from .whole_rows import takes_whole_rows, whole_rows


class CrossCall(Protocol):
    """``layer(x, context, mask=None, context_mask=None, return_routing=False)``."""

    @overload
    def __call__(
        self, x: Tensor, context: Tensor, mask: Tensor | None = ..., context_mask: Tensor | None = ...,
        return_routing: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, context: Tensor, mask: Tensor | None = ..., context_mask: Tensor | None = ...,
        return_routing: Literal[True] = ...,
    ) -> tuple[Tensor, AttentionRouting]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: Tensor, context: Tensor, mask: Tensor | None = ..., context_mask: Tensor | None = ...,
        return_routing: bool = ...,
    ) -> Tensor | tuple[Tensor, AttentionRouting]: ...  # fmt: skip


class RoutedCrossAttention(nn.Module):
    r"""k_q routed tokens attend to k_kv routed memories; all other tokens get a learned vector.

    .. math::
        y_i = (1 - g_i)\,\nu + g_i\,
              \mathrm{out}\Big(\sum_{j \in K} \mathrm{softmax}_j(q_i\cdot k_j)\, h_j v_j\Big)

    with g the gates of the routed tokens (0 for all others), h those of the routed memories K, and ν (`null`)
    learned. A memory is read once for its score; only chosen ones are gathered, normed and projected. Tokens and
    memories share no positions, so nothing is rotated. Write ``x + attention(x, context)``.

    Args:
        dim: width of the tokens.
        k_q, k_kv: how many tokens attend, and to how many memories: ints, or shares 0 < k ≤ 1 of the real tokens
            and memories (see `Routed`).
        heads, dim_head: number of heads, and channels of each (even).
        dim_context: width of the memories; default: dim.
        router_q, router_kv: default `Router`; modules with its call signature and one route.
        device, dtype: of all parameters.

    Shapes: ``attention(x, context, mask=None, context_mask=None)`` with x ``(batch, n, dim)``, context ``(batch, m,
    dim_context)``, mask ``(batch, n)`` and context_mask ``(batch, m)`` bool, True at real tokens and memories, gives y
    like x; with ``return_routing=True`` ``(y, AttentionRouting)``. Masked tokens and memories are not chosen. A row
    without memories gives its tokens ``(1 − g)·null``.

    Raises:
        TypeError: k_q or k_kv is neither int nor float, or a size is not an int.
        ValueError: a size is out of range, a router has several routes, or x and context don't fit together.

    Source: CoLT5 (arXiv:2303.09752).

    Example:
        >>> import torch
        >>> from onepass.nn import RoutedCrossAttention
        >>> attention = RoutedCrossAttention(32, k_q=8, k_kv=64, heads=2, dim_head=16)
        >>> attention(torch.randn(2, 100, 32), torch.randn(2, 5000, 32)).shape
        torch.Size([2, 100, 32])
    """

    def __init__(
        self, dim: int, k_q: int | float, k_kv: int | float, *, heads: int = 8, dim_head: int = 64,
        dim_context: int | None = None, router_q: nn.Module | None = None, router_kv: nn.Module | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads("RoutedCrossAttention", dim, heads, dim_head)
        check_int("RoutedCrossAttention", "dim_context", dim if dim_context is None else dim_context)
        check_count("RoutedCrossAttention", "k_q", k_q)
        check_count("RoutedCrossAttention", "k_kv", k_kv)
        check_routers("RoutedCrossAttention", router_q, router_kv)
        self.dim, self.k_q, self.k_kv = dim, k_q, k_kv
        self.dim_context = dim if dim_context is None else dim_context
        self.heavy = HeavyAttention(dim, heads, dim_head, dim_context=self.dim_context, device=device, dtype=dtype)
        self.router_q = Router(dim, device=device, dtype=dtype) if router_q is None else router_q
        self.router_kv = Router(self.dim_context, device=device, dtype=dtype) if router_kv is None else router_kv
        self.null = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `null` to 0; submodules have their own `reset_parameters`."""
        nn.init.zeros_(self.null)

    def forward(
        self, x: Tensor, context: Tensor, mask: Tensor | None = None, context_mask: Tensor | None = None,
        return_routing: bool = False,
    ) -> Tensor | tuple[Tensor, AttentionRouting]:  # fmt: skip
        check_tokens("RoutedCrossAttention", x, self.dim)
        check.floating("RoutedCrossAttention", "context", context)
        if context.dim() != 3 or context.shape[0] != x.shape[0] or context.shape[-1] != self.dim_context:
            raise ValueError(
                f"RoutedCrossAttention: context must be ({x.shape[0]}, m, {self.dim_context}), "
                f"got {tuple(context.shape)}"
            )
        if takes_whole_rows(self, x, context):
            tensors = x, context, mask, context_mask
            return whole_rows(RoutedCrossAttention, self, *tensors, return_routing=return_routing)  # type: ignore[no-any-return]
        q: RouterOutput = self.router_q(x, k_for(self.router_q, self.k_q, x.shape[1]), mask)
        k_context = k_for(self.router_kv, self.k_kv, context.shape[1])
        kv: RouterOutput = self.router_kv(context, k_context, context_mask)
        routing = AttentionRouting(q, kv)
        tokens = gather(x, q.indices), gather(context, kv.indices)
        last = torch.full(q.indices.shape[1:], kv.indices.shape[1], dtype=torch.int32, device=x.device)
        # without a mask, a Router always finds k memories
        present = None if context_mask is None and type(self.router_kv) is Router else kv.indices >= 0
        update = self.heavy(*tokens, routing, self.null, last, turned=False, mask=present)
        y = self.null.to(update.dtype).repeat(x.shape[0] * x.shape[1], 1)
        y = scatter_add(y, update, q.gates, q.indices, inplace=plain())
        y = explore(y, x, self.router_q, self.k_q, mask).view(x.shape)
        return (y, routing) if return_routing else y

    if TYPE_CHECKING:
        __call__: CrossCall

    def extra_repr(self) -> str:
        return f"{self.dim}, k_q={self.k_q}, k_kv={self.k_kv}"
