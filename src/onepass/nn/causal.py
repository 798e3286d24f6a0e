"""Choices for language models: what is chosen for or shown to a token depends on nothing after it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.soft_topk.op_topk import select

from .router import Router, RouterOutput

# past tokens from which a threshold is taken
MEMORY = 2048


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
    threshold which keeps its share of the past (`common_shift`): scores that rise together change no gate.

    Args:
        dim: width of the tokens.
        eps: temperature ε of the gates.
        block: tokens that share a threshold.
        memory: how far back it looks, in tokens; a multiple of block.
        score, device, dtype: as `Router`.

    Shapes: as `Router` with one route; ``indices`` are in the order of the tokens, −1 after the last. Fewer than k
    may be chosen. Masked tokens are never chosen and count in no threshold.

    Raises:
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
        if block < 1:
            raise ValueError(f"CausalRouter: block must be ≥ 1, got {block}")
        if memory < block or memory % block:
            raise ValueError(f"CausalRouter: memory must be a positive multiple of block = {block}, got {memory}")
        self.block, self.memory = block, memory

    def decide(self, scores: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        """Choose by running thresholds; see the class."""
        batch, n = scores.shape
        k = min(k, n)
        if k == 0 or batch == 0:
            none = scores.new_zeros(batch, k)
            return RouterOutput(none.long(), none, scores)
        known = scores.detach()
        threshold = running_threshold(known, k, self.block, self.memory, mask)
        wants = known > threshold
        indices = arrivals(wants if mask is None else wants & mask, k, self.block)
        found, at = indices >= 0, indices.clamp_min(0)
        above = torch.where(found, scores.gather(1, at), 0.0) - torch.where(found, threshold.gather(1, at), 0.0)
        if torch.is_grad_enabled():
            shift = common_shift(scores, threshold, self.eps, self.block, mask)
            # one entry a token: a gather that meets a block several times has a gradient that sums in any order on CUDA
            shift = shift[..., None].expand(-1, -1, self.block).reshape(batch, -1)
            above = above - shift.gather(1, at)
        return RouterOutput(indices, torch.where(found, torch.sigmoid(above / self.eps), 0.0), scores)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, score={self.score!r}, block={self.block}, memory={self.memory}"


def common_shift(scores: Tensor, threshold: Tensor, eps: float, block: int, mask: Tensor | None) -> Tensor:
    """Zeros (batch, blocks) with the gradient that a threshold has when it keeps its share of the past.

    If all scores rise together, so does the threshold, and no gate changes. Without that, a router whose gates help
    learns above all to raise every score, along whatever its tokens have in common. As in soft top-k, the threshold
    follows the mean of the scores weighted by their gates' slope; here over the blocks before.
    """
    n = scores.shape[1]
    gate = torch.sigmoid((scores.detach() - threshold) / eps)
    slope = gate * (1 - gate)
    if mask is not None:
        # whatever lies in a padded token, even NaN, stays out
        slope, scores = slope.masked_fill(~mask, 0), scores.masked_fill(~mask, 0)
    sums = F.pad(torch.stack((slope * scores, slope)), (0, -n % block)).reshape(2, len(slope), -1, block).sum(-1)
    weighted, weight = sums.cumsum(-1).roll(1, -1).unbind(0)
    first = torch.arange(weight.shape[-1], device=scores.device) == 0
    mean = torch.where(first | (weight <= 0), 0.0, weighted / weight.clamp_min(torch.finfo(weight.dtype).tiny))
    return (mean - mean.detach()).nan_to_num(0.0)


def running_threshold(scores: Tensor, k: int, block: int, memory: int, mask: Tensor | None) -> Tensor:
    """The score that the share k/n of the past exceeds, for each token of (batch, n); −inf without a past."""
    batch, n = scores.shape
    blocks = -(-n // block)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    padded = F.pad(scores, (memory, blocks * block - n), value=-math.inf)
    # block b looks at the `memory` tokens before it; the first has nothing there
    past = padded.unfold(1, memory, block)[:, 1:blocks]
    later = _ranked(past.reshape(-1, memory), k, n).view(batch, blocks - 1, 1).expand(-1, -1, block)
    head = padded[:, memory : memory + block]
    before = torch.ones(block, block, dtype=torch.bool, device=scores.device).tril(-1)
    own = head[:, None, :].expand(-1, block, -1).masked_fill(~before, -math.inf)
    first = _ranked(own.reshape(-1, block), k, n).view(batch, 1, block)
    return torch.cat((first, later), 1).view(batch, blocks * block)[:, :n]


def _ranked(rows: Tensor, k: int, n: int) -> Tensor:
    """Of each row's entries above −inf the one that ⌊count·k/n⌋ others precede, by size; −inf if there is none."""
    count = (rows > -math.inf).sum(-1)
    rank = count * k // n
    length = rows.shape[-1]
    values, _ = select(rows, min(length * k // n + 1, length), None)
    found = values.gather(-1, rank.clamp_max(values.shape[-1] - 1)[:, None])[:, 0]
    return torch.where(rank < count, found, -math.inf)


def arrivals(wants: Tensor, k: int, block: int) -> Tensor:
    """Indices (batch, k) of the first tokens that want to be chosen, as many as the budget of their time lets in.

    By the end of block b at most ⌈k·(tokens so far)/n⌉ are in. −1 where fewer than k come.
    """
    batch, n = wants.shape
    blocks = -(-n // block)
    padded = F.pad(wants, (0, blocks * block - n)).view(batch, blocks, block)
    rank = padded.cumsum(-1)
    came = rank[..., -1].cumsum(-1)
    tokens = torch.arange(1, blocks + 1, device=wants.device) * block
    budget = (tokens.clamp_max(n) * k + n - 1) // n
    # taken(b) = min(taken(b − 1) + came in b, budget(b)): a walk with a ceiling, in closed form
    taken = came + (budget - came).cummin(-1).values.clamp_max(0)
    room = taken.diff(dim=-1, prepend=taken.new_zeros(batch, 1))
    let_in = (padded & (rank <= room[..., None])).view(batch, -1).cumsum(-1)
    places = torch.arange(1, k + 1, device=wants.device).expand(batch, k).contiguous()
    found = torch.searchsorted(let_in, places)
    return torch.where(found < n, found, -1)


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
    start = torch.arange(blocks, device=values.device).mul(block).repeat(batch)[:, None]
    indices = torch.where(chosen.indices >= 0, chosen.indices + start, -1)
    shape = batch, blocks * indices.shape[1]
    scores = chosen.scores.view(batch, blocks * block)[:, :n]
    return RouterOutput(indices.view(shape), chosen.gates.view(shape), scores)
