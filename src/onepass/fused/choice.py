"""The choice of tokens by their scores: from a whole sequence, or from each window.

`decide` is differentiable. The others compute without autograd, for nodes that compute gradients themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.eager import is_fake
from onepass.core.launch import cdiv
from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.causal_choice.definition import fraction, rounded_share
from onepass.ops.soft_topk import op as soft_topk
from onepass.ops.topk import op as op_topk

from .branch import kernels_for


class Choice(NamedTuple):
    """How a router chooses."""

    k: int
    eps: float  # temperature of the gates
    kind: int  # of the gates: index in KINDS
    hard: bool  # straight-through: gates are 1
    block: int = 0  # of a causal choice; 0: choose the best of all tokens
    memory: int = 0
    share: float = 0.0  # choose this share of each row's real tokens, in k places; 0: choose k tokens of each row


def row_counts(share: float, mask: Tensor) -> Tensor:
    """Return ``max(1, round(share·m))`` for the m real tokens of each row, 0 without any; ``mask.shape[:-1]``, int64.

    The host does not wait for a device. Counts are rounded in integers, as `nn.count` rounds.
    """
    real = mask.sum(-1)
    return rounded_share(real, *fraction(share)).clamp_min(1).minimum(real)  # type: ignore[no-any-return]


def first_of_each(indices: Tensor, counts: Tensor) -> Tensor:
    """Return indices (…, k), best first, with −1 after the first `counts` (…) of each row."""
    # a running sum instead of torch.arange, because a DTensor does not combine with a plain tensor
    return torch.where(torch.ones_like(indices).cumsum(-1) <= counts[..., None], indices, -1)


def decide(scores: Tensor, mask: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Return indices and differentiable gates, (…, k) for scores (…, n)."""
    if choice.block:
        return causal_choice.choose(scores, choice.share or choice.k, choice.eps, choice.block, choice.memory, mask)
    if choice.k == 0:
        empty = scores[..., :0]
        return empty.long(), empty
    kind = soft_topk.KINDS[choice.kind]
    if not (choice.share and mask is not None):
        return op_topk.choose(scores, choice.k, choice.eps, mask, kind, choice.hard)[1:]
    counts = row_counts(choice.share, mask)
    soft = soft_topk.soft_topk(scores, counts.clamp_min(1).to(scores.dtype), eps=choice.eps, mask=mask, kind=kind)
    best = op_topk.choose(scores.detach(), choice.k, choice.eps, mask, kind, True).indices
    indices = first_of_each(best, counts)
    if choice.hard:
        return indices, op_topk.gates(soft, indices)
    return indices, torch.where(indices >= 0, soft.gather(-1, indices.clamp_min(0)), 0.0)


def _empty_choice(scores: Tensor, choice: Choice, masked: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return empty tensors like the results of :func:`choose`."""
    if choice.block:
        return causal_choice.forward_op(scores, None, choice.k, choice.share, choice.eps, choice.block, choice.memory)  # type: ignore[no-any-return]
    shape = (*scores.shape[:-1], choice.k)
    state = None if choice.hard and not (choice.share and masked) else scores.new_empty((*scores.shape[:-1], 2))
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64), state, None


def choose(scores: Tensor, mask: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gates, indices, and the state and starts that :func:`choose_backward` needs.

    The state is None for hard gates of k tokens in each row, whose backward computes it.
    """
    if is_fake(scores):
        return _empty_choice(scores, choice, mask is not None)
    if choice.block:
        return causal_choice.forward(scores, mask, choice.k, choice.share, choice.eps, choice.block, choice.memory)
    arguments = scores, None, mask, None, None, choice.k, choice.eps, choice.kind
    if not (choice.share and mask is not None):
        return (*op_topk.forward(*arguments, choice.hard, True, True, torch.int64)[1:], None)
    _, gates, indices, _ = op_topk.forward(*arguments, True, True, True, torch.int64)
    if kernels := kernels_for(scores):
        counts = kernels.counts(mask, fraction(choice.share))
    else:
        counts = row_counts(choice.share, mask).clamp_min(1).to(scores.dtype)
    soft, state = soft_topk.forward(scores, counts, None, mask, 0.0, choice.eps, choice.kind)
    if kernels:
        kernels.cut(indices, gates, None if choice.hard else soft, counts)
        return gates, indices, state, None
    indices = first_of_each(indices, counts)
    gates = gates if choice.hard else soft.gather(-1, indices.clamp_min(0))
    return torch.where(indices >= 0, gates, 0.0), indices, state, None


def choose_backward(
    d_gates: Tensor, scores: Tensor, mask: Tensor | None, choice: Choice, indices: Tensor, gates: Tensor,
    state: Tensor | None, starts: Tensor | None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores; it is written to `into`, contiguous, unless that is None."""
    if is_fake(scores):
        return torch.empty_like(scores) if into is None else into
    if choice.block and state is not None and starts is not None:
        return causal_choice.backward(
            d_gates, scores, mask, gates, indices, state, starts, choice.eps, choice.block, choice.memory, into
        )
    arguments = indices, state, None, mask, None, None, choice.eps, choice.kind
    ds, _ = op_topk.backward(scores, None, d_gates, *arguments, True, True, False, into)
    assert ds is not None
    return ds


def choose_within(
    scores: Tensor, mask: Tensor | None, choice: Choice, window: int, at_q: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return what `choose` returns, and None; with `window` > 0 choose k keys in each window.

    Gates and indices are then (batch, windows·k). The fourth result is not the starts, but the indices within windows,
    (batch·windows, k). The fifth, (2, batch, queries) int32, holds the first and the last + 1 of the keys that each
    query in `at_q` (batch, queries) sees: those of the windows before its own. Missing queries come last and see every
    key, so that last + 1 never decreases.
    """
    if not window or at_q is None:
        return *choose(scores, mask, choice), None
    if is_fake(scores):
        batch, n = scores.shape
        parts = scores.new_empty((batch * cdiv(n, window), window))
        # ask about padding for hard gates alone, because the question ties a graph to some lengths
        masked = mask is not None or bool(choice.hard and n % window)
        gates, within, state, _ = _empty_choice(parts, choice, masked)
        shape, runs = (batch, cdiv(n, window) * choice.k), within.new_empty((2, *at_q.shape), dtype=torch.int32)
        return gates.new_empty(shape), within.new_empty(shape), state, within, runs
    gates, within, state, _ = choose(*windows(scores, mask, window), choice)
    if kernels := kernels_for(scores):
        indices, runs = kernels.place(within, at_q, window)
    else:
        indices = of_sequence(within, len(scores), window)
        last = torch.where(at_q >= 0, at_q // window * choice.k, indices.shape[1]).to(torch.int32)
        runs = torch.stack((torch.zeros_like(last), last))
    return gates.view(indices.shape), indices, state, within, runs


def choose_within_backward(
    d_gates: Tensor | None, mask: Tensor | None, choice: Choice, window: int, gates: Tensor, indices: Tensor,
    state: Tensor | None, where: Tensor | None, scores: Tensor, into: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the scores (batch, n) to `into`; `where`: starts, or with a window the indices within."""
    d_gates = torch.zeros_like(gates) if d_gates is None else d_gates
    if not window or where is None:
        choose_backward(d_gates, scores, mask, choice, indices, gates, state, where, into)
        return
    if is_fake(scores):
        return
    parts, real = windows(scores, mask, window)
    unpadded = parts.numel() == into.numel()
    ds = choose_backward(
        d_gates.reshape(where.shape), parts, real, choice, where, gates.reshape(where.shape), state, None,
        into.view(parts.shape) if unpadded else None,
    )  # fmt: skip
    if not unpadded:
        into.copy_(ds.view(len(scores), -1)[:, : scores.shape[1]])


def windows(values: Tensor, mask: Tensor | None, block: int) -> tuple[Tensor, Tensor | None]:
    """Return values (batch, n, …) and mask (batch, n) as (batch·windows, block, …), padded and then masked."""
    batch, n, *rest = values.shape
    missing = -n % block
    if missing:
        mask = values.new_ones(batch, n, dtype=torch.bool) if mask is None else mask
        values, mask = F.pad(values, (*(0, 0) * len(rest), 0, missing)), F.pad(mask, (0, missing))
    return values.reshape(-1, block, *rest), None if mask is None else mask.reshape(-1, block)


def of_sequence(within: Tensor, batch: int, block: int) -> Tensor:
    """Return indices of tokens in their windows, (batch·windows, quota), as indices in the sequence; -1 stays."""
    indices = within.view(batch, len(within) // max(batch, 1), within.shape[1])
    # a running sum, as in `first_of_each`
    return torch.where(indices >= 0, indices + (torch.ones_like(indices).cumsum(1) - 1) * block, -1).flatten(1)
