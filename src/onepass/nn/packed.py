"""Packed sequences: tokens of several sequences one after another, with `cu_seqlens` as flash attention takes it.

Layers compute on a padded batch. A share counts real tokens, so each sequence gets the result that it gets alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain

from .padding import check_bounds

if TYPE_CHECKING:
    from torch import nn


class Places(NamedTuple):
    """Where packed tokens are in the padded batch: `mask` (sequences, longest), `slots` (total,) int64 in its rows."""

    mask: Tensor
    slots: Tensor


def places(caller: str, total: int, device: torch.device, cu_seqlens: Tensor, max_seqlen: int | None) -> Places:
    """Return the places of `total` packed tokens; raise TypeError or ValueError for wrong boundaries.

    The values of `cu_seqlens` must rise from 0 to `total` by at most `max_seqlen`. On a GPU they are not checked, since
    the host would wait for them.
    """
    check_bounds(caller, cu_seqlens, max_seqlen, device)
    if plain(cu_seqlens) and device.type == "cpu":
        bounds = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != total or min(lengths, default=0) < 0:
            raise ValueError(f"{caller}: cu_seqlens must rise from 0 to the {total} tokens of x, got {bounds}")
        longest = max(lengths, default=0)
        if max_seqlen is None:
            max_seqlen = longest
        if longest > max_seqlen:
            raise ValueError(f"{caller}: max_seqlen must be at least {longest}, the longest sequence, got {max_seqlen}")
    assert max_seqlen is not None
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = torch.arange(total, device=device)
    row = torch.searchsorted(end, token, right=True)
    mask = torch.arange(max_seqlen, device=device) < (end - begin)[:, None]
    return Places(mask, row * max_seqlen + token - begin.index_select(0, row))


def checked(caller: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return cu_seqlens; raise TypeError or ValueError unless a call gave packed tokens x and nothing else."""
    if cu_seqlens is None:
        raise ValueError(f"{caller}: max_seqlen belongs to cu_seqlens, which is not given")
    if mask is not None:
        raise ValueError(f"{caller}: mask and cu_seqlens exclude each other: packed tokens are all real")
    check.floating(caller, "x", x)
    if x.dim() not in (2, 3) or (x.dim() == 3 and len(x) != 1):
        raise ValueError(f"{caller}: with cu_seqlens, x must be (total, dim) or (1, total, dim), got {tuple(x.shape)}")
    if hasattr(x, "to_local"):
        raise TypeError(
            f"{caller}: with cu_seqlens, x must be a plain tensor, got a DTensor; give each device whole sequences"
        )
    return cu_seqlens


def unpack(
    caller: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[Tensor, Places]:
    """Return packed tokens (total, dim) or (1, total, dim) as a padded batch (sequences, longest, dim), and places."""
    cu_seqlens = checked(caller, x, mask, cu_seqlens)
    tokens = x.reshape(-1, x.shape[-1])
    where = places(caller, len(tokens), x.device, cu_seqlens, max_seqlen)
    rows, longest = where.mask.shape
    # each token has a place of its own, so forward and backward are copies and add nothing up
    padded = tokens.new_zeros(rows * longest, x.shape[-1]).index_copy(0, where.slots, tokens)
    return padded.view(rows, longest, x.shape[-1]), where


def refuse_int(caller: str, name: str, k: int | float | None) -> None:
    """Raise TypeError for an int k of a causal choice, which would mean another share for each length."""
    if isinstance(k, int) and k:
        raise TypeError(
            f"{caller}: packed sequences of a causal layer need {name} as a share, a float 0 < {name} ≤ 1; got the int "
            f"{k}, which means the share {k}/n, and their lengths n differ"
        )


def packed(
    kind: Any, layer: nn.Module, x: Tensor, mask: Tensor | None, return_routing: bool, cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> Any:  # fmt: skip
    """Return what kind.forward(layer, …) returns for packed sequences; the routing is that of the padded batch."""
    # the caller's class: the forward of a subclass has run up to here
    for one in (layer, *layer.children()):
        if getattr(one, "causal", False) or getattr(getattr(one, "router", None), "causal", False):
            for name in ("k", "k_q", "k_kv"):
                refuse_int(type(one).__name__, name, getattr(one, name, None))
    padded, where = unpack(type(layer).__name__, x, mask, cu_seqlens, max_seqlen)
    y, routing = kind.forward(layer, padded, where.mask, return_routing=True)
    y = y.flatten(0, 1).index_select(0, where.slots).view(x.shape)
    return (y, routing) if return_routing else y
