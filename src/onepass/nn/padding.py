"""Masks of padded batches: check them, and keep the content of padding out of every sum."""

from __future__ import annotations

from torch import Tensor

from onepass.core import check
from onepass.ops._shared import arguments


def check_mask(module: str, x: Tensor, mask: Tensor | None, name: str = "mask") -> None:
    """Raise TypeError or ValueError unless mask is None or a bool mask (batch, n) of tokens x (batch, n, dim)."""
    if mask is None:
        return
    arguments.boolean(module, mask, "real token")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{module}: {name} must be (batch, n) = {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    check.same_device(module, name, mask, "x", x)


def zero_padding(module: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x with zeros where the mask is False.

    A gradient of 0 for masked tokens is not enough: a weight's gradient is a sum over all tokens, and 0·NaN is NaN.
    """
    check.tensor(module, "x", x)
    if x.dim() != 3:
        raise ValueError(f"{module}: x must be (batch, n, dim), got {tuple(x.shape)}")
    check_mask(module, x, mask)
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
