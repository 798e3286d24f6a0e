"""Batches of unequal sequences: padded, with a mask, or packed one after another, with `cu_seqlens`.

Layers compute packed sequences on a padded batch. A share counts real tokens, so each sequence gets what it gets alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import visible
from onepass.ops._shared import arguments


class Places(NamedTuple):
    """Where packed tokens are in the padded batch: `mask` (sequences, longest), `slots` (total,) int64 in its rows."""

    mask: Tensor
    slots: Tensor


def places(caller: str, total: int, device: torch.device, cu_seqlens: Tensor, max_seqlen: int | None) -> Places:
    """Return the places of `total` packed tokens; raise TypeError or ValueError for wrong boundaries.

    The values of `cu_seqlens` must rise from 0 to `total` by at most `max_seqlen`. On a GPU they are not checked, since
    the host would wait for them.
    """
    check.tensor(caller, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{caller}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"{caller}: cu_seqlens must be (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"{caller}: cu_seqlens is on {cu_seqlens.device} but x is on {device}; move one of them")
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt))):
        raise TypeError(f"{caller}: max_seqlen must be an int, got {type(max_seqlen).__name__}")
    if max_seqlen is None and not visible(cu_seqlens):
        raise ValueError(
            f"{caller}: max_seqlen, the length of the longest sequence, must be given where the host does not see "
            f"cu_seqlens: on {device}, or when compiled"
        )
    if visible(cu_seqlens):
        bounds = cu_seqlens.tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != total or min(lengths, default=0) < 0:
            raise ValueError(f"{caller}: cu_seqlens must rise from 0 to the {total} tokens of x, got {bounds}")
        longest = max(lengths, default=0)
        max_seqlen = longest if max_seqlen is None else max_seqlen
        if longest > max_seqlen:
            raise ValueError(f"{caller}: max_seqlen must be at least {longest}, the longest sequence, got {max_seqlen}")
    assert max_seqlen is not None
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = torch.arange(total, device=device)
    row = torch.searchsorted(end, token, right=True)
    mask = torch.arange(max_seqlen, device=device) < (end - begin)[:, None]
    return Places(mask, row * max_seqlen + token - begin.index_select(0, row))


def checked_bounds(caller: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return cu_seqlens; raise TypeError or ValueError unless a call gave packed tokens x, and no mask."""
    check.floating(caller, "x", x)
    if cu_seqlens is None:
        raise ValueError(f"{caller}: max_seqlen belongs to cu_seqlens, which is not given")
    if mask is not None:
        raise ValueError(f"{caller}: mask and cu_seqlens exclude each other: packed tokens are all real")
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
    cu_seqlens = checked_bounds(caller, x, mask, cu_seqlens)
    tokens = x.reshape(-1, x.shape[-1])
    layout = places(caller, len(tokens), x.device, cu_seqlens, max_seqlen)
    rows, longest = layout.mask.shape
    # each token has a place of its own, so forward and backward are copies and add nothing up
    padded = tokens.new_zeros(rows * longest, x.shape[-1]).index_copy(0, layout.slots, tokens)
    return padded.view(rows, longest, x.shape[-1]), layout


def refuse_int(caller: str, name: str, k: int | float | None) -> None:
    """Raise TypeError for an int k of a causal choice, which would mean another share for each length."""
    if isinstance(k, int) and k:
        raise TypeError(
            f"{caller}: packed sequences of a causal layer need {name} as a share, a float 0 < {name} ≤ 1; got the int "
            f"{k}, which means the share {k}/n, and their lengths n differ"
        )


def check_tokens(module: str, x: Tensor, dim: int, name: str = "x") -> None:
    """Raise TypeError or ValueError unless x is (batch, n, dim) of a float dtype."""
    check.floating(module, name, x)
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"{module}: {name} must be (batch, n, {dim}), got {tuple(x.shape)}")


def check_mask(module: str, x: Tensor, mask: Tensor | None, name: str = "mask") -> None:
    """Raise TypeError or ValueError unless mask is None or a bool mask (batch, n) of tokens x (batch, n, dim)."""
    arguments.mask_of(module, mask, "(batch, n)", x.shape[:2], "x", x, name=name)


def zero_padding(module: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x with zeros where the mask is False.

    A gradient of 0 for masked tokens is not enough: a weight's gradient is a sum over all tokens, and 0·NaN is NaN.
    """
    check_mask(module, x, mask)
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
