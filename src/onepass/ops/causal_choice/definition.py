"""The definition in torch: the tests' oracle; it runs on a CPU, for float64 and for sizes that no kernel takes."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.eager import recording

# largest denominator of a share: products with the number of tokens stay exact in int64
DENOMINATOR = 1 << 20


def fraction(share: float) -> tuple[int, int]:
    """Return the fraction nearest to a share 0 < share ≤ 1 with a denominator of at most 2²⁰, and not 0."""
    # Dynamo traces past the cache and warns
    if torch.compiler.is_compiling():
        return _fraction(share)
    if torch._C._is_tracing():
        raise NotImplementedError("k as a share: torch.jit.trace keeps the count of one length; give an int")
    return _cached_fraction(share)


def _fraction(share: float) -> tuple[int, int]:
    exact = Fraction(share).limit_denominator(DENOMINATOR)
    return (exact.numerator, exact.denominator) if exact else (1, DENOMINATOR)


_cached_fraction = lru_cache(256)(_fraction)


def rounded_share(n: Any, numerator: int, denominator: int) -> Any:
    """Return the share of n ≥ 0 tokens, an int, a symbolic one or a tensor, rounded to the nearest, halves to even."""
    share = n * numerator
    # `share // denominator % 2` lifts a half above an odd number to the even one; no condition, as n may be symbolic
    return (2 * share + share // denominator % 2 + denominator - 1) // (2 * denominator)


def n_places(share: float, n: Any, block: int) -> Any:
    """Return how many of n tokens can be chosen at most: n, or ⌈share·(n rounded up to whole blocks)⌉ if that is less.

    The budget of the last block counts a whole block, because a choice must not depend on how many tokens follow.
    """
    numerator, denominator = fraction(share)
    most = -(-(-(-n // block) * block * numerator) // denominator)
    if isinstance(n, int):
        return min(n, most)
    # a symbolic length: min would tie the graph to one side
    return torch.sym_min(n, most)  # type: ignore[no-untyped-call]


def reference(
    scores: Tensor, k: int | float, *, eps: float = 0.3, block: int = 128, memory: int = 2048,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return indices (batch, k) and gates of the tokens that a running threshold chooses; see `op.causal_choice`."""
    n, share = scores.shape[1], k if isinstance(k, float) else 0.0
    k = n_places(k, n, block) if isinstance(k, float) else min(k, n)
    if not (k and len(scores)):
        return nothing(scores, k)
    _, indices, thresholds, _ = forward(scores.detach(), mask, k, share, eps, block, memory)
    return indices, _gates(scores, mask, indices, thresholds, eps, block)


def nothing(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return empty indices and gates (batch, k) where nothing can be chosen; backward() runs through the gates."""
    gates = scores.new_zeros(len(scores), k) + scores[:, :0].sum(-1, keepdim=True)
    return scores.new_zeros(len(scores), k, dtype=torch.int64), gates


def _gates(scores: Tensor, mask: Tensor | None, indices: Tensor, thresholds: Tensor, eps: float, block: int) -> Tensor:
    """Return the gates of the chosen tokens, with a gradient through their thresholds."""
    threshold = per_token(thresholds, scores.shape[1], block)
    chosen, columns = indices >= 0, indices.clamp_min(0)
    shift = common_shift(scores, threshold, eps, block, mask).repeat_interleave(block, 1)[:, : scores.shape[1]]
    above = (scores - shift).gather(1, columns) - threshold.gather(1, columns)
    return torch.where(chosen, torch.sigmoid(above.masked_fill(~chosen, 0.0) / eps), 0.0)


def common_shift(scores: Tensor, threshold: Tensor, eps: float, block: int, mask: Tensor | None) -> Tensor:
    """Return zeros (batch, blocks) with the gradient of a threshold that keeps its share of the earlier tokens.

    If all scores rise together, so does the threshold, and no gate changes. Without this gradient, a router with
    useful gates learns above all to raise every score, along the direction that its tokens have in common. As in soft
    top-k, the threshold follows the mean of the scores weighted by their gates' slopes; here over the blocks before.
    """
    n = scores.shape[1]
    gate = torch.sigmoid((scores.detach() - threshold) / eps)
    slope = gate * (1 - gate)
    if mask is not None:
        # keep the content of padding out, even NaN
        slope, scores = slope.masked_fill(~mask, 0), scores.masked_fill(~mask, 0)
    sums = F.pad(torch.stack((slope * scores, slope)), (0, -n % block)).reshape(2, len(slope), -1, block).sum(-1)
    weighted, weight = sums.cumsum(-1).roll(1, -1).unbind(0)
    later = torch.arange(weight.shape[-1], device=scores.device) > 0
    follows = later & (weight > 0) & (weighted / weight).isfinite()
    mean = weighted.where(follows, 0.0) / weight.where(follows, 1.0).clamp_min(torch.finfo(weight.dtype).tiny)
    return mean - mean.detach()


def running_threshold(scores: Tensor, share: tuple[int, int], block: int, memory: int, mask: Tensor | None) -> Tensor:
    """Return the score that a share (numerator, denominator) of the earlier tokens exceeds; −inf without such tokens.

    Shape (batch, block + blocks − 1): for each token of the first block, then for each later block.
    """
    n = scores.shape[1]
    blocks = -(-n // block)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    padded = F.pad(scores, (memory, blocks * block - n), value=-math.inf)
    # for each block but the first: the `memory` tokens before it
    past = padded.unfold(1, memory, block)[:, 1:blocks]
    earlier = torch.ones(block, block, dtype=torch.bool, device=scores.device).tril(-1)
    first_block = padded[:, None, memory : memory + block].expand(-1, block, -1).masked_fill(~earlier, -math.inf)
    return torch.cat((ranked(first_block, share), ranked(past, share)), 1)


def ranked(rows: Tensor, share: tuple[int, int]) -> Tensor:
    """Return each row's entry of rank ⌊count·share⌋ (0: largest) among its `count` entries above −inf; else −inf."""
    numerator, denominator = share
    count = (rows > -math.inf).sum(-1)
    rank = count * numerator // denominator
    length = rows.shape[-1]
    values = rows.topk(min(length * numerator // denominator + 1, length), dim=-1).values
    value = values.gather(-1, rank.clamp_max(values.shape[-1] - 1)[..., None])[..., 0]
    # topk puts NaN first; as a threshold it becomes +inf, which no score exceeds and where no gate has a gradient
    return torch.where(rank < count, torch.where(value.isnan(), math.inf, value), -math.inf)


def per_token(threshold: Tensor, n: int, block: int) -> Tensor:
    """Expand the result of `running_threshold` to (batch, n)."""
    later = threshold[:, block:].repeat_interleave(block, 1)
    return torch.cat((threshold[:, :block], later), 1)[:, :n]


def arrivals(wants: Tensor, k: int, share: tuple[int, int], block: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return indices (batch, k) of the first real tokens where `wants` is True, as many as the budget allows.

    By the end of block b the budget is the share of the real tokens before it and of a whole block, rounded up, and at
    most k. Indices are −1 where fewer than k are chosen. Also return, (batch, blocks + 1) int32, how many are chosen
    before each block, and in all.
    """
    batch, n = wants.shape
    blocks = -(-n // block)
    before = torch.arange(blocks, device=wants.device) * block
    if mask is not None:
        wants = wants & mask
        real = F.pad(mask, (0, blocks * block - n)).view(batch, blocks, block).sum(-1)
        before = real.cumsum(-1) - real
    padded = F.pad(wants, (0, blocks * block - n)).view(batch, blocks, block)
    rank = padded.cumsum(-1)
    n_above = rank[..., -1].cumsum(-1)
    numerator, denominator = share
    budget = (((before + block) * numerator + denominator - 1) // denominator).clamp_max(k)
    # taken(b) = min(taken(b − 1) + those above in b, budget(b)): a running sum with a ceiling, in closed form
    taken = F.pad(n_above + (budget - n_above).cummin(-1).values.clamp_max(0), (1, 0))
    n_chosen = (padded & (rank <= taken.diff(dim=-1)[..., None])).view(batch, -1).cumsum(-1)
    places = torch.arange(1, k + 1, device=wants.device).expand(batch, k).contiguous()
    columns = torch.searchsorted(n_chosen, places)
    return torch.where(columns < n, columns, -1), taken.to(torch.int32)


def forward(
    scores: Tensor, mask: Tensor | None, k: int, share: float, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gates, indices, thresholds, and how many are chosen before each block."""
    s = scores.to(torch.promote_types(scores.dtype, torch.float32))
    ratio = fraction(share) if share else (k, s.shape[1])
    thresholds = running_threshold(s, ratio, block, memory, mask)
    threshold = per_token(thresholds, s.shape[1], block)
    indices, starts = arrivals(s > threshold, k, ratio, block, mask)
    columns = indices.clamp_min(0)
    # the last bit of torch.sigmoid depends on the place in memory, that of exp does not
    gates = ((threshold.gather(1, columns) - s.gather(1, columns)) / eps).exp_().add_(1).reciprocal_()
    return torch.where(indices >= 0, gates, 0.0).to(scores.dtype), indices, thresholds, starts


def backward(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, indices: Tensor, thresholds: Tensor, eps: float, block: int
) -> Tensor:
    """Return the gradient of the scores, by autograd: through the gates of the chosen, and through their thresholds."""
    s = scores.detach().to(thresholds.dtype)
    with recording():
        gates = _gates(s.requires_grad_(), mask, indices, thresholds, eps, block)
        (ds,) = torch.autograd.grad(gates, s, g_gates.to(s.dtype))
    return ds.to(scores.dtype)
