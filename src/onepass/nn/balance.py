"""Heavy work in even parts: tokens of which a device has too many travel to others, and the results come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.fused.parts import shares

from .halo import fetch


def evenly(
    call: Callable[[Tensor], Tensor], tokens: Tensor, real: Tensor, counts: list[int], rank: int, group: Any
) -> Tensor:  # fmt: skip
    """Return call(tokens), computed in even parts; zeros where a token does not exist.

    Args:
        call: token-wise, (1, any number, dim) → the same shape, perhaps another dtype.
        tokens: this device's tokens (…, dim).
        real: which of them exist (…).
        counts: how many exist on each device.
        rank: the number of this device.
        group: the devices.
    """
    plan = shares(counts)
    order = real.flatten().logical_not().sort(stable=True).indices[: counts[rank]]
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


__all__ = ["evenly"]
