"""Heavy work in even parts: tokens of which a device has too many travel to others, and the results come back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .halo import fetch


class Shares(NamedTuple):
    """Who computes what.

    The travelling tokens of all devices form one list, device after device.

    Attributes:
        kept: how many of its own tokens each device computes.
        given: which range of the list each device has.
        taken: which range of the list each device computes.
    """

    kept: list[int]
    given: list[tuple[int, int]]
    taken: list[tuple[int, int]]

    @property
    def travelling(self) -> int:
        """How many tokens travel."""
        return self.given[-1][1]


def shares(counts: list[int]) -> Shares:
    """Return who computes what if device i has counts[i] tokens: at most ⌈sum / devices⌉ each, the rest stays.

    No plan with this most moves fewer tokens. Every device computes the plan from the same counts, so nothing is sent.
    """
    most = -(-sum(counts) // len(counts))
    given = list(accumulate((max(0, c - most) for c in counts), initial=0))
    rooms = accumulate((max(0, most - c) for c in counts), initial=0)
    taken = [min(room, given[-1]) for room in rooms]
    return Shares([min(c, most) for c in counts], list(pairwise(given)), list(pairwise(taken)))


def evenly(
    call: Callable[[Tensor], Tensor], tokens: Tensor, real: Tensor, counts: Tensor, rank: int, group: Any
) -> Tensor:  # fmt: skip
    """Return call(tokens), computed in even parts; zeros where a token does not exist.

    Args:
        call: token-wise, (1, any number, dim) → the same shape, perhaps another dtype.
        tokens: this device's tokens (…, dim).
        real: which of them exist (…).
        counts: how many exist on each device. The host reads it.
        rank: the number of this device.
        group: the devices.
    """
    all_counts = counts.tolist()
    plan = shares(all_counts)
    order = real.flatten().logical_not().sort(stable=True).indices[: all_counts[rank]]
    mine = tokens.flatten(0, -2).index_select(0, order)[None]
    if plan.travelling:
        kept = plan.kept[rank]
        guests = fetch(mine[:, kept:], plan.given, plan.taken, group)
        done = call(torch.cat((mine[:, :kept], guests), 1))
        back = fetch(done[:, kept:], plan.taken, plan.given, group)
        done = torch.cat((done[:, :kept], back), 1)
    else:
        done = call(mine)
    out = done.new_zeros(real.numel(), tokens.shape[-1])
    # places are unique: forward and backward are copies
    return out.index_copy(0, order, done[0]).view(tokens.shape)


__all__ = ["Shares", "evenly", "shares"]
