"""What the optimizer needs of its update: how parameters are stored, and which tensors are updated as vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from .storage import NONE, REMAINDER
from .torch_path import Row


def _strides(t: Tensor) -> list[tuple[int, int]]:
    # skip dimensions of size 1: their strides do not matter
    return [(stride, n) for stride, n in zip(t.stride(), t.shape, strict=True) if n != 1]


def same_dense_layout(p: Tensor, *others: Tensor | None) -> bool:
    """Return whether all fill their memory in the same order without gaps: the update then treats them as vectors."""
    tensors = [p, *(t for t in others if t is not None)]
    if all(t.is_contiguous() for t in tensors):
        return True
    strides = _strides(p)
    covered = 1
    for stride, n in sorted(strides):
        if stride != covered:
            return False
        covered *= n
    return all(_strides(t) == strides for t in tensors)


def split_complex(t: Tensor) -> Tensor:
    """Return the real view of a complex tensor (a copy of a lazy conjugate); other tensors as they are."""
    return torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t


__all__ = ["NONE", "REMAINDER", "Row", "same_dense_layout", "split_complex"]
