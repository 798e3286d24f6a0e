"""Causal choices, for language models: a token's choice depends on the tokens before it and on itself alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from onepass.fused.choice import Choice
from onepass.ops.causal_choice.definition import n_places
from onepass.ops.causal_choice.op import MEMORY, check_sizes

from .count import check_int, refuse_gone
from .router import Router, RouterOutput

if TYPE_CHECKING:
    from .cache import ChoiceCache


class CausalRouter(Router):
    """`Router` for language models: the choice and the gate of token i depend on the tokens up to i alone.

    A running threshold, which a share r of the earlier tokens exceeds, chooses that share (`onepass.ops.causal_choice`
    has the formulas); the first token of a sequence is chosen. A float k is r: a choice depends on the row's real
    tokens so far alone. An int k means k/n, which depends on n.

    A chosen gate lies between ½ and 1 and has a gradient in its own score (a capped exponential has none above the
    threshold). Gradients flow through the thresholds too: if all scores rise together, no gate changes.

    Args:
        dim: width of the tokens.
        eps: temperature ε of the gates.
        block: tokens that share a threshold.
        memory: tokens (2048) before a block that its threshold is computed from; a multiple of block.
        device, dtype: as `Router`.

    Shapes: as `Router` with one route; ``indices`` are in the order of the tokens, −1 after the last; a share has as
    many places as its last block can fill. Masked tokens are never chosen and count in no threshold.

    Raises:
        TypeError: block or memory is not an int; otherwise as `Router`.
        ValueError: block < 1, or memory is not a positive multiple of it; otherwise as `Router`.

    Source: expert choice made causal, after Mixture-of-Depths (arXiv:2404.02258). There a second predictor learns
    the choice; here a quantile of earlier scores replaces it.

    Example:
        >>> import torch
        >>> from onepass.nn import CausalRouter
        >>> out = CausalRouter(64, block=16, memory=128)(torch.randn(2, 256, 64), 32)
        >>> out.indices.shape, bool((out.indices[:, 1:] > out.indices[:, :-1])[out.indices[:, 1:] >= 0].all())
        (torch.Size([2, 32]), True)
    """

    causal = True

    def __init__(
        self, dim: int, *, eps: float = 0.3, block: int = 128, memory: int = MEMORY,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **gone: NoReturn,
    ) -> None:  # fmt: skip
        refuse_gone("CausalRouter", gone)  # `Router` would take its own options, which have no effect here
        super().__init__(dim, eps=eps, device=device, dtype=dtype)
        check_int("CausalRouter", "block", block)
        check_int("CausalRouter", "memory", memory)
        check_sizes("CausalRouter", block, memory)
        self.block, self.memory = block, memory

    def forward(
        self, x: Tensor, k: int | float, mask: Tensor | None = None, *,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, cache: ChoiceCache | None = None,
    ) -> RouterOutput:  # fmt: skip
        if cache is None:
            return super().forward(x, k, mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        # one more token of each sequence
        self.check(x, k, mask)
        scores = self.scores(x)
        return RouterOutput(*cache.choose(self, scores), scores)

    def choice(self, k: int | float, n: int) -> Choice:
        """Return how this router chooses k of n tokens."""
        choice = super().choice(k, n)._replace(block=self.block, memory=self.memory)
        return choice._replace(k=n_places(k, n, self.block)) if isinstance(k, float) else choice

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, block={self.block}, memory={self.memory}"


def router_of_windows(
    dim: int, window: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> CausalRouter:
    """Return the router of a layer with local windows: its memory is a whole number of windows."""
    memory = max(1, MEMORY // window) * window
    return CausalRouter(dim, block=window, memory=memory, device=device, dtype=dtype)
