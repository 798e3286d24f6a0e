"""The choice of tokens by given scores, and its gradient, without autograd: of a whole sequence, or of each window."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.topk import op as op_topk


class Choice(NamedTuple):
    """How a router chooses."""

    k: int
    eps: float  # temperature of the gates
    kind: int  # of the gates: index in KINDS
    hard: bool  # straight-through: gates are 1
    causal: tuple[int, int] | None = None  # block and memory of a causal choice; None: choose the best of all tokens


def choose(scores: Tensor, mask: Tensor | None, how: Choice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gates, indices, and the state and starts that :func:`choose_backward` needs."""
    if how.causal is not None:
        return causal_choice.forward(scores, mask, how.k, how.eps, *how.causal)
    _, indices, gates, state = op_topk.forward(scores, None, mask, how.k, how.eps, how.kind, how.hard)
    return gates, indices, state, None


def choose_backward(
    d_gates: Tensor, scores: Tensor, mask: Tensor | None, how: Choice, indices: Tensor, gates: Tensor, state: Tensor,
    starts: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Return the gradient of the scores."""
    if how.causal is not None and starts is not None:
        return causal_choice.backward(d_gates, scores, mask, gates, indices, state, starts, how.eps, *how.causal)
    ds, _ = op_topk.backward(None, d_gates, scores, indices, state, None, mask, how.eps, how.kind, True, False)
    return ds


def windows(values: Tensor, mask: Tensor | None, block: int) -> tuple[Tensor, Tensor | None]:
    """Return values (batch, n, …) and mask (batch, n) as (batch·windows, block, …); what is missing is masked."""
    batch, n, *rest = values.shape
    missing = -n % block
    if missing:
        mask = torch.ones(batch, n, dtype=torch.bool, device=values.device) if mask is None else mask
        values = F.pad(values, (*(0, 0) * len(rest), 0, missing))
    if mask is not None:
        mask = F.pad(mask, (0, missing)).view(-1, block)
    return values.reshape(-1, block, *rest), mask


def of_sequence(within: Tensor, batch: int, block: int) -> Tensor:
    """Return indices of tokens in their windows, (batch·windows, quota), as indices in the sequence; -1 stays."""
    indices = within.view(batch, len(within) // max(batch, 1), within.shape[1])
    start = torch.arange(0, indices.shape[1] * block, block, device=within.device)[:, None]
    return torch.where(indices >= 0, indices + start, -1).flatten(1)


__all__ = ["Choice", "choose", "choose_backward", "of_sequence", "windows"]
