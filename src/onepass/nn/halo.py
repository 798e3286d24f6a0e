"""Tokens of other devices: those beside a device's own, for attention within windows, or any range of a list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def wanted(begin: int, end: int, n: int, window: int, causal: bool) -> tuple[int, int]:
    """Return the range of tokens that those from begin to end see: whole windows, one more before, and one after."""
    if begin == end:
        return begin, begin
    first = max(0, (begin // window - 1) * window)
    return first, end if causal else min(n, (-(-end // window) + 1) * window)


def fetch(x: Tensor, ranges: list[tuple[int, int]], wants: list[tuple[int, int]], group: Any) -> Tensor:
    """Return the tokens (batch, …, dim) that this device wants, of x (batch, here, dim), its own, and of the others.

    Args:
        x: tokens of this device.
        ranges: where the tokens of each device begin and end in the row, in the order of the group.
        wants: which range of the row each device wants.
        group: the devices.
    """
    return _Exchange.apply(x, ranges, wants, group)  # type: ignore[no-any-return, no-untyped-call]


def total(x: Tensor, group: Any) -> Tensor:
    """Return the sum over the devices, each of which uses it for a part of the loss."""
    return _Total.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def _shared(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Return the range that two ranges share, perhaps an empty one."""
    begin = max(a[0], b[0])
    return begin, max(begin, min(a[1], b[1]))


def _send(x: Tensor, given: list[tuple[int, int]], taken: list[tuple[int, int]], group: Any) -> Tensor:
    """Send tokens (batch, n, dim), those of range given[i] to device i in turn; return those sent here, in turn."""
    into, out_of = ([b - a for a, b in ranges] for ranges in (taken, given))
    received = x.new_empty(sum(into), len(x), x.shape[2])
    dist.all_to_all_single(received, x.transpose(0, 1).contiguous(), into, out_of, group=group)  # type: ignore[no-untyped-call]
    return received.transpose(0, 1).contiguous()


class _Exchange(torch.autograd.Function):
    """Fetch tokens; send their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]], wants: list[tuple[int, int]], group: Any) -> Tensor:
        me = dist.get_rank(group)
        begin = ranges[me][0]
        # what each device gets of mine, and what I get of each, itself included: then what I get stands in order
        ctx.given = [_shared(ranges[me], w) for w in wants]
        ctx.taken = [_shared(r, wants[me]) for r in ranges]
        ctx.group, ctx.begin, ctx.shape = group, begin, x.shape
        parts = [x[:, a - begin : b - begin] for a, b in ctx.given if a < b]
        return _send(torch.cat(parts, 1) if parts else x[:, :0], ctx.given, ctx.taken, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gx, done = grad.new_zeros(ctx.shape), 0
        received = _send(grad, ctx.taken, ctx.given, ctx.group)
        for a, b in ctx.given:
            if a < b:
                gx[:, a - ctx.begin : b - ctx.begin] += received[:, done : done + b - a]
                done += b - a
        return gx, None, None, None


class _Total(torch.autograd.Function):
    """A sum over devices, and of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


__all__ = ["fetch", "total", "wanted"]
