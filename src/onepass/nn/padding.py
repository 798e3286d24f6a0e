"""Masks of padded batches and bounds of packed sequences: check them, and keep the content of padding out of sums."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain
from onepass.ops._shared import arguments


def check_mask(module: str, x: Tensor, mask: Tensor | None, name: str = "mask") -> None:
    """Raise TypeError or ValueError unless mask is None or a bool mask (batch, n) of tokens x (batch, n, dim)."""
    if mask is None:
        return
    arguments.boolean(module, mask, "real token")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{module}: {name} must be (batch, n) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    check.same_device(module, name, mask, "x", x)


def check_bounds(module: str, cu_seqlens: Tensor, max_seqlen: int | None, device: torch.device) -> None:
    """Raise TypeError or ValueError unless these can be the bounds of packed sequences; their values are not read."""
    check.tensor(module, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{module}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"{module}: cu_seqlens must be (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"{module}: cu_seqlens is on {cu_seqlens.device} but x is on {device}; move one of them")
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt))):
        raise TypeError(f"{module}: max_seqlen must be an int, got {type(max_seqlen).__name__}")
    if max_seqlen is None and not (plain(cu_seqlens) and device.type == "cpu"):
        raise ValueError(
            f"{module}: max_seqlen, the length of the longest sequence, must be given where the host does not see "
            f"cu_seqlens: on {device}, or when compiled"
        )


def zero_padding(module: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x with zeros where the mask is False.

    A gradient of 0 for masked tokens is not enough: a weight's gradient is a sum over all tokens, and 0·NaN is NaN.
    """
    check.tensor(module, "x", x)
    if x.dim() != 3:
        raise ValueError(f"{module}: x must be (batch, n, dim), got {tuple(x.shape)}")
    check_mask(module, x, mask)
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
