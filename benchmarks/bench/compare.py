"""Comparison of two implementations' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# elements per comparison, so that the wider copies of a large result stay small
_PIECE = 1 << 26


def tensors(result: Any) -> list[Tensor | None]:
    """Return the tensors of a result (tensor, None, tuple, list, mapping) as a flat list, in order."""
    if result is None or isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [t for part in result for t in tensors(part)]
    raise TypeError(f"a benchmark's result must be tensors, got {type(result).__name__}")


def _pieces(t: Tensor) -> Sequence[Tensor]:
    return torch.split(t.detach().reshape(-1), _PIECE)


def _kind(t: Tensor | None) -> str:
    return "nothing" if t is None else "tensor"


def _wide(t: Tensor) -> Tensor:
    return t.double() if t.dtype in (torch.float64, torch.int64, torch.int32) else t.float()


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest |theirs − ours| over the largest finite |ours|; equal infinities and two NaNs are equal."""
    worst, scale = 0.0, 0.0
    for a, b in zip(_pieces(ours), _pieces(theirs), strict=True):
        if not a.numel():
            continue
        a, b = _wide(a), _wide(b)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
        worst = max(worst, float(gap.max()))
        scale = max(scale, float(a.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
    return worst / scale if scale else worst


def disagreement(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """Return one line on how far theirs is from ours, or None if it is within the tolerance."""
    a, b = tensors(ours), tensors(theirs)
    if len(a) != len(b):
        return f"{len(b)} results against our {len(a)}"
    for i, (mine, other) in enumerate(zip(a, b, strict=True)):
        where = f"result {i}: " if len(a) > 1 else ""
        if mine is None or other is None:
            if mine is not other:
                return f"{where}{_kind(other)} against our {_kind(mine)}"
            continue
        if mine.shape != other.shape:
            return f"{where}shape {tuple(other.shape)} against our {tuple(mine.shape)}"
        off = error(mine, other)
        if not off <= tolerance:
            return f"{where}off by {off:.2g} of the largest value, {tolerance:.2g} accepted"
    return None


def norm_error(expected: Any, actual: Any) -> float | None:
    """Return the largest ‖actual − expected‖/‖expected‖ of a tensor; None without actual tensors."""
    pairs = list(zip(tensors(expected), tensors(actual), strict=True)) if tensors(actual) else []
    return max((float((b - a).norm() / a.norm()) for a, b in pairs if a is not None and b is not None), default=None)


def all_zero(result: Any) -> bool:
    """Return whether a result has elements and all are zero; such a case measures nothing."""
    nonempty = [t for t in tensors(result) if t is not None and t.numel()]
    return bool(nonempty) and not any(bool(piece.any()) for t in nonempty for piece in _pieces(t))
