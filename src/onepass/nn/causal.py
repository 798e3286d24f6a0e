"""Choices for language models: what is chosen for or shown to a token depends on nothing after it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.fused.feed_forward import Plan
from onepass.ops.causal_choice.op import MEMORY, check_sizes, choose

from .count import check_size
from .router import Router, RouterOutput


class CausalRouter(Router):
    r"""`Router` for language models: token i is chosen, and gated, by what is known when i is read.

    The share k/n of the tokens is chosen by a running threshold. With blocks of ``block`` tokens, token i of block b
    has for threshold the score that this share of the past exceeds:

    .. math::
        t_i = \text{the score of rank } \lfloor \tfrac kn\,|P_b| \rfloor \text{ (from 0) among } P_b,\qquad
        g_i = \sigma\!\big((s_i - t_i)/\varepsilon\big)

    where P_b are the real tokens in the last ``memory`` tokens before block b. In the first block P are the tokens
    before i itself; the first token of a sequence has no past and is chosen. Tokens above their threshold are taken
    in the order in which they arrive, as long as the number taken up to the end of block b stays within
    ⌈k·(tokens up to there)/n⌉: what quiet blocks leave, later ones may use.

    A chosen gate lies between ½ and 1 and always has a gradient in its own score (a capped exponential would be
    exactly 1 above the threshold, with none). Thresholds are statistics of the past; their gradient is that of a
    threshold which keeps its share of the past (`onepass.ops.causal_choice`): scores that rise together change no
    gate.

    Args:
        dim: width of the tokens.
        eps: temperature ε of the gates.
        block: tokens that share a threshold.
        memory: how far back it looks, in tokens; a multiple of block.
        score, device, dtype: as `Router`.

    Shapes: as `Router` with one route; ``indices`` are in the order of the tokens, −1 after the last. Fewer than k
    may be chosen. Masked tokens are never chosen and count in no threshold.

    Raises:
        TypeError: block or memory is no int; otherwise as `Router`.
        ValueError: block < 1, or memory is no positive multiple of it; otherwise as `Router`.

    Source: expert choice made causal, after Mixture-of-Depths (arXiv:2404.02258), which trains a second predictor
    for it; a quantile of the past needs none.

    Example:
        >>> import torch
        >>> from onepass.nn import CausalRouter
        >>> out = CausalRouter(64, block=16, memory=128)(torch.randn(2, 256, 64), 32)
        >>> out.indices.shape, bool((out.indices[:, 1:] > out.indices[:, :-1])[out.indices[:, 1:] >= 0].all())
        (torch.Size([2, 32]), True)
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 0.3,
        block: int = 128,
        memory: int = MEMORY,
        score: str = "normalised",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, eps=eps, score=score, device=device, dtype=dtype)
        check_size("CausalRouter", "block", block)
        check_size("CausalRouter", "memory", memory)
        check_sizes("CausalRouter", block, memory)
        self.block, self.memory = block, memory

    def decide(self, scores: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        """Choose by running thresholds; see the class."""
        chosen = choose(scores, k, self.eps, self.block, self.memory, mask)
        return RouterOutput(*chosen, scores)

    def plan(self, k: int, n: int, dtype: torch.dtype, light_eps: float, heavy_eps: float) -> Plan:
        """What `routed_feed_forward` asks of this router."""
        return super().plan(k, n, dtype, light_eps, heavy_eps)._replace(causal=(self.block, self.memory))

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, score={self.score!r}, block={self.block}, memory={self.memory}"


def choose_per_block(
    choose: Callable[[Tensor, int, Tensor | None], RouterOutput],
    values: Tensor,
    quota: int,
    block: int,
    mask: Tensor | None,
) -> RouterOutput:
    """`quota` tokens of each block, chosen within it alone, blocks in order: indices ``(batch, blocks·quota)``.

    `choose` is a router, called with tokens ``(batch·blocks, block, dim)``, or its `decide`, called with scores
    ``(batch·blocks, block)``; `values` is what it takes, for whole sequences. −1 where a block has fewer real tokens.
    Whoever may see all of a block may see its choice, so the choices of the blocks before b are what the tokens of
    block b may attend to.
    """
    batch, n, *rest = values.shape
    blocks = -(-n // block)
    missing = blocks * block - n
    if missing:
        mask = torch.ones(batch, n, dtype=torch.bool, device=values.device) if mask is None else mask
        values = F.pad(values, (*(0, 0) * len(rest), 0, missing))
    if mask is not None:
        mask = F.pad(mask, (0, missing)).view(batch * blocks, block)
    chosen = choose(values.reshape(batch * blocks, block, *rest), quota, mask)
    within = chosen.indices.view(batch, blocks, chosen.indices.shape[1])
    start = torch.arange(0, blocks * block, block, device=values.device)[:, None]
    indices = torch.where(within >= 0, within + start, -1).flatten(1)
    scores = chosen.scores.view(batch, blocks * block)[:, :n]
    return RouterOutput(indices, chosen.gates.view(indices.shape), scores)
