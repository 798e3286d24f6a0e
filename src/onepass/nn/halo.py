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


def _send(rows: list[Tensor], sizes: list[int], group: Any) -> list[Tensor]:
    """Send rows[i] (batch, tokens, dim) to device i; return what each device sent here, of `sizes` tokens."""
    batch, _, dim = rows[0].shape
    out = rows[0].new_empty(sum(sizes), batch, dim)
    dist.all_to_all_single(
        out, torch.cat(rows, 1).transpose(0, 1).contiguous(), sizes, [r.shape[1] for r in rows], group=group
    )  # type: ignore[no-untyped-call]
    return list(out.transpose(0, 1).split(sizes, 1))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Fetch tokens; send their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: list[tuple[int, int]], wants: list[tuple[int, int]], group: Any) -> Tensor:
        me = dist.get_rank(group)
        begin = ranges[me][0]
        # what each device gets of mine, and what I get of each, itself included: then the parts stand in order
        ctx.given = [_shared(ranges[me], w) for w in wants]
        ctx.taken = [_shared(r, wants[me]) for r in ranges]
        ctx.group, ctx.begin, ctx.shape = group, begin, x.shape
        parts = [x[:, a - begin : b - begin] if a < b else x[:, :0] for a, b in ctx.given]
        return torch.cat(_send(parts, [b - a for a, b in ctx.taken], group), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = list(grad.split([b - a for a, b in ctx.taken], 1))  # type: ignore[no-untyped-call]
        gx = grad.new_zeros(ctx.shape)
        for (a, b), part in zip(ctx.given, _send(parts, [b - a for a, b in ctx.given], ctx.group), strict=True):
            if a < b:
                gx[:, a - ctx.begin : b - ctx.begin] += part
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
