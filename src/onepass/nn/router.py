"""`Router`: choose k tokens of a sequence for the heavy branch, with a gate for each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from onepass.fused.choice import Choice, decide
from onepass.ops._shared.arguments import MAX_VECTORS
from onepass.ops.routing.op import score
from onepass.ops.soft_topk.op import KINDS

from .count import check_int, check_number, count, refuse_gone
from .packed import check_mask, check_tokens, refuse_int, unpack
from .whole_rows import takes_whole_rows, whole_rows

GATES = ("soft", "straight_through")
# ε of the norm inside a score: a token of zeros scores 0 and its gradient stays finite
NORM_EPS = 1e-6


class RouterOutput(NamedTuple):
    """A router's decision.

    Attributes:
        indices: ``(batch, k)`` int64, or ``(batch, R, k)`` for R routes: the chosen tokens, best first, each at most
            once in a row; −1 after the last.
        gates: same shape, in [0, 1], differentiable: factors of the heavy branch's output; 0 at index −1.
        scores: ``(batch, n)`` or ``(batch, R, n)``, fp32 or wider; those of masked tokens are meaningless.
    """

    indices: Tensor
    gates: Tensor
    scores: Tensor


class Router(nn.Module):
    r"""Score every token against a learned vector, choose the k best, gate them differentiably.

    .. math::
        s_i = \left\langle \frac{x_i}{\mathrm{rms}(x_i)}, v\right\rangle, \qquad
        g = \mathrm{soft\_topk}(s, k, \varepsilon), \qquad v \sim \mathcal N(0, 1/d)

    The defaults learn. Scores start with a standard deviation of 1 at every width, so ε means the same everywhere. The
    gates are converged for the k that is selected, so some are not saturated, and the vector has a gradient from the
    first step (a raw dot product with ε = 0.03 and 9/8·k has none: every selected gate is 1). Its entries are as small
    as those of a linear layer, so Adam and Lion, whose steps have a fixed size, rotate it soon enough. In training,
    tokens that were not chosen give it a gradient too (`explore`).

    Args:
        dim: width of the tokens.
        num_routes: R independent routes, each with its own vector; one read of x scores all.
        eps: temperature ε of the gates, in units of the scores' initial standard deviation. Smaller is harder: fewer
            tokens around the threshold share the gradient.
        kind: shape of the gates, see `onepass.soft_topk`.
        gate: the factor of the heavy output. "soft": the soft gate, which had the lower loss on text.
            "straight_through": 1, with the gradient of the soft gate.
        explore: weight of the gradient from tokens that were not chosen (`onepass.nn.explore.explore`), in training
            mode; with 0 ``weight.grad`` is that of the gates alone.
        device, dtype: of the vectors.

    Shapes: ``router(x, k, mask=None)`` with x ``(batch, n, dim)``, k an int ≥ 0 and mask ``(batch, n)`` bool, True at
    real tokens, gives a `RouterOutput` of ``min(k, n)`` choices per row. Masked tokens are never chosen. No row
    depends on another. Where k tokens or fewer are real, all gates are 1, without gradient. A float 0 < k ≤ 1 is a
    share of each row's m real tokens: ``max(1, round(k·m))`` of them, in ``max(1, round(k·n))`` places. Packed
    sequences (``cu_seqlens=``, ``max_seqlen=``, see `Routed`) give one row each, indices within the sequence.

    Raises:
        TypeError: a size is not an int, k neither int nor float, eps or explore is not a number, x is not a
            floating-point tensor, or mask is not bool.
        ValueError: a size is out of range, an option is unknown, shapes don't fit, or k is neither an int ≥ 0 nor a
            share 0 < k ≤ 1.

    Source: conditional computation as in CoLT5 (arXiv:2303.09752), soft top-k routing from arXiv:2211.01267.

    Example:
        >>> import torch
        >>> from onepass.nn import Router
        >>> out = Router(64)(torch.randn(2, 100, 64), 10)
        >>> out.indices.shape, out.scores.shape
        (torch.Size([2, 10]), torch.Size([2, 100]))
    """

    causal = False  # whether the choice of a token depends on earlier tokens alone

    def __init__(
        self, dim: int, num_routes: int = 1, *, eps: float = 0.3, kind: str = "capped_exp",
        gate: str = "soft", explore: float = 0.1, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, **gone: NoReturn,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_gone(type(self).__name__, gone)
        check_int("Router", "dim", dim)
        check_int("Router", "num_routes", num_routes, 1, MAX_VECTORS)
        check_number("Router", "eps", eps, "a finite number > 0", lambda eps: 0 < eps < math.inf)
        check_number("Router", "explore", explore, "a finite number ≥ 0", lambda weight: 0 <= weight < math.inf)
        for name, value, accepted in (("kind", kind, KINDS), ("gate", gate, GATES)):
            if value not in accepted:
                raise ValueError(f"Router: {name} must be one of {', '.join(accepted)}; got {value!r}")
        self.dim, self.num_routes, self.eps = dim, num_routes, eps
        self.kind, self.gate, self.explore = kind, gate, explore
        self.weight = nn.Parameter(torch.empty(num_routes, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the routing vectors anew from N(0, 1/dim)."""
        nn.init.normal_(self.weight, std=self.dim**-0.5)

    def scores(self, x: Tensor) -> Tensor:
        """Return the scores ``(batch, n)``, or ``(batch, R, n)`` for R routes, of tokens ``(batch, n, dim)``."""
        return score(x, self.weight if self.num_routes > 1 else self.weight[0], eps=NORM_EPS)

    def forward(
        self, x: Tensor, k: int | float, mask: Tensor | None = None, *,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    ) -> RouterOutput:  # fmt: skip
        if cu_seqlens is not None or max_seqlen is not None:
            if self.causal:
                refuse_int(type(self).__name__, "k", k)
            x, (mask, _) = unpack("Router", x, mask, cu_seqlens, max_seqlen)
        self.check(x, k, mask)
        if takes_whole_rows(self, x):
            return whole_rows(Router, self, x, mask, k=k)  # type: ignore[no-any-return]
        scores = self.scores(x)
        if mask is not None and self.num_routes > 1:
            mask = mask[:, None]
        return RouterOutput(*decide(scores, mask, self.choice(k, x.shape[1])), scores)

    if TYPE_CHECKING:
        __call__ = forward

    def choice(self, k: int | float, n: int) -> Choice:
        """Return how this router chooses k of n tokens."""
        share = k if isinstance(k, float) else 0.0
        return Choice(count(k, n), self.eps, KINDS.index(self.kind), self.gate == "straight_through", share=share)

    def explore_stride(self, k: int | float, n: int) -> int:
        """Return the distance n/k of the tokens that `explore` samples in backward; 0: it samples none.

        A share k needs no n for it.
        """
        # inside torch.vmap nothing says that it requires a gradient
        learns = self.weight.requires_grad or torch._C._are_functorch_transforms_active()
        if not (self.training and self.explore > 0 and torch.is_grad_enabled() and learns):
            return 0
        if isinstance(k, float):
            return round(1 / k) if k < 1 else 0
        k = count(k, n)
        symbolic: Any = k
        if isinstance(symbolic, torch.SymInt):
            from torch.fx.experimental.symbolic_shapes import statically_known_true  # it loads sympy

            # a comparison would tie the graph to some lengths
            return 0 if statically_known_true(symbolic >= n) else n // k
        return n // k if 0 < k < n else 0

    def check(self, x: Tensor, k: int | float, mask: Tensor | None) -> None:
        """Raise TypeError or ValueError for arguments that :meth:`forward` does not accept."""
        check_tokens("Router", x, self.dim)
        if isinstance(k, bool) or not isinstance(k, (int, float, torch.SymInt)):
            raise TypeError(f"Router: k must be an int or a float, got {type(k).__name__}")
        if (isinstance(k, float) and not 0 < k <= 1) or k < 0:
            raise ValueError(f"Router: k must be an int ≥ 0 or a share 0 < k ≤ 1 of the real tokens, got {k}")
        check_mask("Router", x, mask)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, num_routes={self.num_routes}, eps={self.eps}, kind={self.kind!r}, "
            f"gate={self.gate!r}, explore={self.explore}"
        )


def k_for(router: nn.Module, k: int | float, n: int) -> int | float:
    """Return the k to call a router with: a `Router` counts a share of each row's real tokens itself.

    So does one in a wrapper of torch, which lends its attributes. Others get ``max(1, round(k·n))`` of n padded tokens.
    """
    return k if hasattr(router, "explore_stride") else count(k, n)
