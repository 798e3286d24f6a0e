"""`causal_choice`: its operator and the public function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.launch import cdiv, import_later, uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import Way, row_dims
from onepass.ops._shared import arguments

from . import definition
from .definition import fraction, n_places, nothing

_kernels = import_later(".kernels", __package__)
# default: tokens before a block that its threshold is computed from
MEMORY = 2048


class CausalChoice(NamedTuple):
    """The result of :func:`causal_choice`; both are ``(batch, places)``."""

    indices: Tensor
    gates: Tensor


def _check(scores: Tensor, mask: Tensor | None, k: int | float, eps: float, block: int, memory: int) -> None:
    check.floating("causal_choice", "scores", scores)
    if scores.dim() != 2:
        raise ValueError(f"causal_choice: scores must be (batch, n), got {tuple(scores.shape)}")
    for name, value, least in (("k", 0 if isinstance(k, float) else k, 0), ("block", block, 1), ("memory", memory, 1)):
        arguments.whole("causal_choice", name, value, least)
    if isinstance(k, float) and not 0 < k <= 1:
        raise ValueError(f"causal_choice: k must be an int ≥ 0 or a share 0 < k ≤ 1, got {k}")
    arguments.number("causal_choice", "eps", eps, arguments.LARGEST)
    check_sizes("causal_choice", block, memory)
    arguments.mask_of("causal_choice", mask, "(batch, n)", scores.shape, "scores", scores)


def check_sizes(caller: str, block: int, memory: int) -> None:
    """Raise ValueError unless memory is a positive multiple of block, which is ≥ 1."""
    if memory < block or memory % block:
        raise ValueError(f"{caller}: memory must be a positive multiple of block = {block}, got {memory}")


def _by_kernels(scores: Tensor, block: int, memory: int) -> bool:
    return uses_triton(scores) and _kernels().fits(block, memory)


def forward(
    scores: Tensor, mask: Tensor | None, k: int, share: float, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (gates, indices, thresholds, starts), the last two for `backward`.

    k is the number of places, share the share of the tokens to choose, 0.0 for k/n. Without checks and autograd, for
    larger autograd nodes; 1 ≤ k ≤ n, batch ≥ 1.
    """
    if _by_kernels(scores, block, memory):
        ratio = fraction(share) if share else (k, scores.shape[1])
        return _kernels().forward(scores, mask, k, ratio, eps, block, memory)  # type: ignore[no-any-return]
    return definition.forward(scores, mask, k, share, eps, block, memory)


def backward(
    g_gates: Tensor, scores: Tensor, mask: Tensor | None, gates: Tensor, indices: Tensor, thresholds: Tensor,
    starts: Tensor, eps: float, block: int, memory: int, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores from that of the gates and the results of `forward`.

    With `into`, contiguous and like scores, it is written there.
    """
    if _by_kernels(scores, block, memory):
        gates, thresholds, starts = gates.contiguous(), thresholds.contiguous(), starts.contiguous()
        return _kernels().backward(g_gates, scores, mask, gates, thresholds, starts, eps, block, into)  # type: ignore[no-any-return]
    ds = definition.backward(g_gates, scores, mask, indices, thresholds, eps, block)
    return ds if into is None else into.copy_(ds)


def _fake(
    scores: Tensor, mask: Tensor | None, k: int, share: float, eps: float, block: int, memory: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n = scores.shape
    blocks = cdiv(n, block)
    return (
        scores.new_empty((batch, k)),
        scores.new_empty((batch, k), dtype=torch.int64),
        scores.new_empty((batch, block + blocks - 1), dtype=torch.promote_types(scores.dtype, torch.float32)),
        scores.new_empty((batch, blocks + 1), dtype=torch.int32),
    )


def _ways(scores: Any, *rest: Any) -> list[Way]:
    """Shard along the batch."""
    return [((0,) * 4, (0, 0)) for _ in row_dims(scores)]


_call, forward_op, backward_op = operator(
    "causal_choice", forward, backward, ("gates", "indices", "thresholds", "starts"), fake=_fake, ways=_ways,
    of=("scores",), n_public=2, replay=True,
)  # fmt: skip


def choose(scores: Tensor, k: int | float, eps: float, block: int, memory: int, mask: Tensor | None) -> CausalChoice:
    """Return the result of `causal_choice` for checked arguments."""
    batch, n = scores.shape
    share = k if isinstance(k, float) else 0.0
    k = n_places(k, n, block) if isinstance(k, float) else min(k, n)
    if k == 0 or batch == 0:
        return CausalChoice(*nothing(scores, k))
    gates, indices = _call(scores, mask, k, share, float(eps), block, memory)
    return CausalChoice(indices, gates)


def causal_choice(
    scores: Tensor, k: int | float, *, eps: float = 0.3, block: int = 128, memory: int = MEMORY,
    mask: Tensor | None = None,
) -> CausalChoice:  # fmt: skip
    r"""Choose and gate a share of each row's tokens; the choice and gate of a token depend on no later token.

    The threshold of token i in block b is the score that the share r of earlier tokens exceeds:

    .. math::
        t_i = \text{the score of rank } \lfloor r\,|P_b| \rfloor \text{ (from 0) among } P_b,\qquad
        g_i = \sigma\!\big((s_i - t_i)/\varepsilon\big)

    where P_b are the real tokens in the last ``memory`` tokens before block b; in the first block, those before i.
    Without earlier tokens the threshold is −∞. Tokens above their threshold are chosen in order, as long as the number
    chosen up to the end of block b stays within ⌈r·(R_b + block)⌉, where R_b are the real tokens before the block. So
    with a share as k, a row's choices depend on its own real tokens so far, not on its length.

    Gradients also flow through the thresholds, as if each kept its share of the earlier tokens: from the second block
    on, a threshold moves with the mean of all scores before the block, weighted by the slopes σ′((s − t)/ε) of their
    gates.

    Args:
        scores: ``(batch, n)``, fp32, fp16, bf16 or fp64, any strides.
        k: a share r of the real tokens, a float 0 < k ≤ 1, taken as the nearest fraction with a denominator of at most
            2²⁰; or how many to choose at most, an int ≥ 0, which means r = k/n (k > n: n).
        eps: temperature ε of the gates, a finite number > 0.
        block: tokens that share a threshold, ≥ 1.
        memory: tokens before a block that its threshold is computed from; a multiple of block.
        mask: ``(batch, n)`` bool, True at real tokens; others are never chosen and count in no threshold.

    Returns:
        ``CausalChoice(indices, gates)``, each ``(batch, places)``: columns in ascending order, int64, then −1; gates
        in the dtype of scores, then 0. There are min(k, n) places, and for a share as many as the last block can fill:
        ⌈r·(n rounded up to whole blocks)⌉, at most n. NaN ranks as +inf, is never chosen; |P_b| omits NaN and -inf.

    Raises:
        TypeError: scores is not a floating-point tensor, a size not an int, eps not a number, or mask not bool.
        ValueError: a size or eps is out of range, or shapes don't fit.
        NotImplementedError: for second and forward-mode derivatives.

    Source: expert choice made causal, after Mixture-of-Depths (arXiv:2404.02258).

    Example:
        >>> import torch
        >>> from onepass.ops.causal_choice.op import causal_choice
        >>> causal_choice(torch.tensor([[1.0, 0.0, 3.0, 2.0, 5.0, 4.0]]), 3, block=2, memory=4).indices
        tensor([[0, 2, 4]])
    """
    _check(scores, mask, k, eps, block, memory)
    return choose(scores, k, eps, block, memory, mask)
