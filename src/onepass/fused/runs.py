"""Runs of keys that follow from sizes alone, cached: this saves each call a dozen small kernels and calls of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import plain


def neighbours(
    n: int, window: int, causal: bool, device: torch.device, packed: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return first and last + 1 of the tokens that each of n tokens sees: its window, the one before, the one after.

    With `causal` a token sees nothing after itself. A window of more than n tokens is all of them. Of packed sequences:
    each token's position in its sequence, where that begins, and where it ends, (n,) int32.
    """
    token = torch.arange(n, device=device, dtype=torch.int32)
    positions, begin, end = packed or (token, 0, n)
    start = token - positions % window
    return (start - window).clamp_min(begin), token + 1 if causal else (start + 2 * window).clamp_max(end)


def whole(n: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the same of n queries that see all `keys` keys."""
    last = torch.full((n,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(last), last


class Runs(NamedTuple):
    """The keys that each query sees, in the form that `span_attention` takes."""

    mask: Tensor | None  # (batch, keys) bool
    first: Tensor  # (1 or batch, queries) int32
    last: Tensor


# tensors by what they follow from, the oldest first; the next ones to be made push the oldest out
_KEPT: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_MOST = 64
# tensors whose addresses a CUDA graph holds: they stay as long as the process
_CAPTURED: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def kept(make: Callable[..., tuple[Tensor, ...]], sizes: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return what `make` makes of these sizes on a device, on this one: from an earlier call where there was one."""
    key = make, sizes, device
    value = _KEPT.get(key) or _CAPTURED.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # 19 launches fewer in the graph of each attention; a graph owns what it allocates itself: don't keep that
        return make(*sizes, device) if value is None else _CAPTURED.setdefault(key, value)
    if value is None:
        # made on the CPU and copied, so that they are ready for every stream when the copy returns; outside inference
        # mode, because autograd can't save tensors made in it
        with torch.inference_mode(False):
            value = tuple(t.to(device) for t in make(*sizes, torch.device("cpu")))
        if len(_KEPT) >= _MOST:
            _KEPT.pop(next(iter(_KEPT)), None)
        _KEPT[key] = value
    return value


def known(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[Any, ...], like: Tensor) -> tuple[Any, ...]:
    """Return both tensors that `make` makes of a length and further sizes: kept ones, unless something intercepts."""
    return kept(make, sizes, like.device) if plain(like) else make(*sizes, like.device)


def _rows(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(t[None] for t in make(*sizes, device))


def runs_of(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[int, ...], device: torch.device) -> Runs:
    """Return the runs that `make` makes of these sizes, `neighbours` or `whole`."""
    return Runs(None, *kept(_rows, (make, sizes), device))
