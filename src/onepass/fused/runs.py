"""Which keys each query sees, where sizes alone decide it: cached, which saves each call a dozen small kernels."""

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

    With `causal` a token sees nothing after itself. A window of more than n tokens is all of them. `packed`: each
    token's position in its sequence, where that begins, and where it ends, (n,) int32.
    """
    token = torch.arange(n, device=device, dtype=torch.int32)
    positions, begin, end = packed or (token, 0, n)
    start = token - positions % window
    return (start - window).clamp_min(begin), token + 1 if causal else (start + 2 * window).clamp_max(end)


def whole(n: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return first and last + 1 for n queries that each see all `keys` keys."""
    last = torch.full((n,), keys, dtype=torch.int32, device=device)
    return torch.zeros_like(last), last


class Runs(NamedTuple):
    """The keys that each query sees, in the form that `span_attention` takes."""

    mask: Tensor | None  # (batch, keys) bool
    first: Tensor  # (1 or batch, queries) int32
    last: Tensor


# tensors by function, sizes and device, the oldest first; beyond _MOST_CACHED the oldest leaves
_CACHE: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_MOST_CACHED = 64
# tensors whose addresses a CUDA graph holds: they stay as long as the process
_CAPTURED: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def cached(make: Callable[..., tuple[Tensor, ...]], sizes: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return the tensors make(*sizes, device), from the cache where an earlier call made them."""
    key = make, sizes, device
    value = _CACHE.get(key) or _CAPTURED.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # cached tensors save a graph 19 launches for each attention; what a graph allocates it owns: don't cache that
        return make(*sizes, device) if value is None else _CAPTURED.setdefault(key, value)
    if value is None:
        # make them on the CPU and copy them, so that every stream can use them when the copy returns; not in inference
        # mode, because autograd can't save tensors made in it
        with torch.inference_mode(False):
            value = tuple(t.to(device) for t in make(*sizes, torch.device("cpu")))
        if len(_CACHE) >= _MOST_CACHED:
            _CACHE.pop(next(iter(_CACHE)), None)
        _CACHE[key] = value
    return value


def cached_for(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[Any, ...], like: Tensor) -> tuple[Any, ...]:
    """Return both tensors of make(*sizes, device): cached ones in plain eager, new ones under a transform or mode."""
    return cached(make, sizes, like.device) if plain(like) else make(*sizes, like.device)


def _rows(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[int, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(t[None] for t in make(*sizes, device))


def runs_of(make: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[int, ...], device: torch.device) -> Runs:
    """Return the cached runs that `make` (`neighbours` or `whole`) makes of these sizes."""
    return Runs(None, *cached(_rows, (make, sizes), device))
