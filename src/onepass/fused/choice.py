"""The choice of tokens by given scores: of a whole sequence, or of each window.

`decide` is differentiable. The others are its steps without autograd, for nodes that compute gradients themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.eager import is_fake
from onepass.core.launch import cdiv
from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.causal_choice.definition import fraction, nearest
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
    share: float = 0.0  # k are the places for this share of each row's real tokens; 0: k tokens of each row


def row_counts(share: float, mask: Tensor) -> Tensor:
    """Return ``max(1, round(share·m))`` for the m real tokens of each row, 0 without any; ``mask.shape[:-1]``, int64.

    The host does not wait for a device. Counts are rounded in integers, as `nn.count` rounds.
    """
    real = mask.sum(-1)
    return nearest(real, *fraction(share)).clamp_min(1).minimum(real)  # type: ignore[no-any-return]


def first_of_each(indices: Tensor, counts: Tensor) -> Tensor:
    """Return indices (…, k), best first, with −1 after the first `counts` (…) of each row."""
    # a running sum instead of torch.arange, because a DTensor does not combine with a plain tensor
    return torch.where(torch.ones_like(indices).cumsum(-1) <= counts[..., None], indices, -1)


def decide(scores: Tensor, mask: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """Return indices and differentiable gates, (…, k) for scores (…, n)."""
    if how.block:
        return causal_choice.choose(scores, how.share or how.k, how.eps, how.block, how.memory, mask)
    if how.k == 0:
        none = scores[..., :0]
        return none.long(), none
    kind = soft_topk.KINDS[how.kind]
    if not (how.share and mask is not None):
        return op_topk.choose(scores, how.k, how.eps, mask, kind, how.hard)[1:]
    counts = row_counts(how.share, mask)
    soft = soft_topk.soft_topk(scores, counts.clamp_min(1).to(scores.dtype), eps=how.eps, mask=mask, kind=kind)
    best = op_topk.choose(scores.detach(), how.k, how.eps, mask, kind, True).indices
    indices = first_of_each(best, counts)
    if how.hard:
        return indices, op_topk.gates(soft, indices)
    return indices, torch.where(indices >= 0, soft.gather(-1, indices.clamp_min(0)), 0.0)


def _empty_choice(scores: Tensor, how: Choice, masked: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return empty tensors like the results of :func:`choose`."""
    if how.block:
        return causal_choice.forward_op(scores, None, how.k, how.share, how.eps, how.block, how.memory)  # type: ignore[no-any-return]
    shape = (*scores.shape[:-1], how.k)
    state = None if how.hard and not (how.share and masked) else scores.new_empty((*scores.shape[:-1], 2))
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64), state, None


def choose(scores: Tensor, mask: Tensor | None, how: Choice) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gates, indices, and the state and starts that :func:`choose_backward` needs.

    The state is None for hard gates of k tokens in each row, whose backward computes it.
    """
    if is_fake(scores):
        return _empty_choice(scores, how, mask is not None)
    if how.block:
        return causal_choice.forward(scores, mask, how.k, how.share, how.eps, how.block, how.memory)
    given = scores, None, mask, None, None, how.k, how.eps, how.kind
    if not (how.share and mask is not None):
        return (*op_topk.forward(*given, how.hard, True, True, torch.int64)[1:], None)
    _, gates, indices, _ = op_topk.forward(*given, True, True, True, torch.int64)
    if kernels := kernels_for(scores):
        counts = kernels.counts(mask, fraction(how.share))
    else:
        counts = row_counts(how.share, mask).clamp_min(1).to(scores.dtype)
    soft, state = soft_topk.forward(scores, counts, None, mask, 0.0, how.eps, how.kind)
    if kernels:
        kernels.cut(indices, gates, None if how.hard else soft, counts)
        return gates, indices, state, None
    indices = first_of_each(indices, counts)
    gates = gates if how.hard else soft.gather(-1, indices.clamp_min(0))
    return torch.where(indices >= 0, gates, 0.0), indices, state, None


def choose_backward(
    d_gates: Tensor, scores: Tensor, mask: Tensor | None, how: Choice, indices: Tensor, gates: Tensor,
    state: Tensor | None, starts: Tensor | None, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores, written to `into`, contiguous, if that is given."""
    if is_fake(scores):
        return torch.empty_like(scores) if into is None else into
    if how.block and state is not None and starts is not None:
        return causal_choice.backward(
            d_gates, scores, mask, gates, indices, state, starts, how.eps, how.block, how.memory, into
        )  # fmt: skip
    given = indices, state, None, mask, None, None, how.eps, how.kind
    ds, _ = op_topk.backward(scores, None, d_gates, *given, True, True, False, into)
    assert ds is not None
    return ds


def choose_within(
    scores: Tensor, mask: Tensor | None, how: Choice, window: int, at_q: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return what `choose` does, and None.

    With `window` > 0 each window gives k keys: gates and indices are (batch, windows·k), and in place of the starts
    stand the indices within windows, (batch·windows, k). The last, (2, batch, queries) int32, holds the first and the
    last + 1 of the keys that each query in `at_q` (batch, queries) sees: those of the windows before its own. Missing
    queries come last and see every key, so that the last never decreases.
    """
    if not window or at_q is None:
        return *choose(scores, mask, how), None
    if is_fake(scores):
        batch, n = scores.shape
        parts = scores.new_empty((batch * cdiv(n, window), window))
        # only hard gates ask about the last window: the question ties a graph to some lengths
        masked = mask is not None or bool(how.hard and n % window)
        gates, within, state, _ = _empty_choice(parts, how, masked)
        shape, seen = (batch, cdiv(n, window) * how.k), within.new_empty((2, *at_q.shape), dtype=torch.int32)
        return gates.new_empty(shape), within.new_empty(shape), state, within, seen
    gates, within, state, _ = choose(*windows(scores, mask, window), how)
    if kernels := kernels_for(scores):
        indices, seen = kernels.place(within, at_q, window)
    else:
        indices = of_sequence(within, len(scores), window)
        last = torch.where(at_q >= 0, at_q // window * how.k, indices.shape[1]).to(torch.int32)
        seen = torch.stack((torch.zeros_like(last), last))
    return gates.view(indices.shape), indices, state, within, seen


def choose_within_backward(
    d_gates: Tensor | None, mask: Tensor | None, how: Choice, window: int, gates: Tensor, indices: Tensor,
    state: Tensor | None, where: Tensor | None, scores: Tensor, into: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the scores (batch, n) to `into`; `where` are starts, or with a window indices within it."""
    d_gates = torch.zeros_like(gates) if d_gates is None else d_gates
    if not window or where is None:
        choose_backward(d_gates, scores, mask, how, indices, gates, state, where, into)
        return
    if is_fake(scores):
        return
    parts, real = windows(scores, mask, window)
    whole = parts.numel() == into.numel()
    ds = choose_backward(
        d_gates.reshape(where.shape), parts, real, how, where, gates.reshape(where.shape), state, None,
        into.view(parts.shape) if whole else None,
    )  # fmt: skip
    if not whole:
        into.copy_(ds.view(len(scores), -1)[:, : scores.shape[1]])


def windows(values: Tensor, mask: Tensor | None, block: int) -> tuple[Tensor, Tensor | None]:
    """Return values (batch, n, …) and mask (batch, n) as (batch·windows, block, …); padding is masked."""
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
