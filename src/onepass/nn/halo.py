"""Tokens of other devices: those beside a device's own, or any range of a list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.fused.parts import shared
from onepass.fused.row import pieces, put_pieces, send


def fetch(x: Tensor, ranges: list[tuple[int, int]], wants: list[tuple[int, int]], group: Any) -> Tensor:
    """Return the tokens that this device wants, of x (batch, here, dim), its own, and of the others.

    `ranges`: where the tokens of each device of the group begin and end in the row; `wants`: what each wants of it.
    """
    return _Exchange.apply(x, ranges, wants, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Fetch tokens; send their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]], wants: list[tuple[int, int]], group: Any) -> Tensor:
        me = dist.get_rank(group)
        begin = ranges[me][0]
        # what each device gets of mine, and what I get of each, itself included: then what I get stands in order
        ctx.given = [shared(ranges[me], w) for w in wants]
        ctx.taken = [shared(r, wants[me]) for r in ranges]
        ctx.group, ctx.begin, ctx.shape = group, begin, x.shape
        return send(pieces(x, ctx.given, begin), ctx.given, ctx.taken, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gx = grad.new_zeros(ctx.shape)
        put_pieces(gx, ctx.given, ctx.begin, send(grad, ctx.taken, ctx.given, ctx.group))
        return gx, None, None, None
