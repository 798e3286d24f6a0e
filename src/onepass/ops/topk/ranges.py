"""The range of each row that `topk` selects from: `start` and `lengths`, checked and as a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain
from onepass.ops._shared import arguments


def check_ranges(op: str, scores: Tensor, start: Tensor | None, lengths: Tensor | None) -> None:
    """Raise an error for ranges of a wrong type, shape or device, or that reach past a row.

    Values are checked on a CPU only: on a GPU the host would wait for them.
    """
    _check(op, "start", start, scores)
    _check(op, "lengths", lengths, scores)
    if scores.device.type != "cpu" or not plain(scores, start, lengths):
        return
    n = scores.shape[-1]
    for name, value in (("start", start), ("lengths", lengths)):
        if value is None or not value.numel():
            continue
        least, most = (int(x) for x in value.aminmax())
        if least < 0 or most > n:
            raise ValueError(f"{op}: {name} must be from 0 to the row's length {n}, got {least if least < 0 else most}")
    if start is not None and lengths is not None and start.numel() and lengths.numel():
        most = int((start.long() + lengths).amax())
        if most > n:
            raise ValueError(f"{op}: start + lengths must be at most the row's length {n}, got {most}")


def _check(op: str, name: str, value: Tensor | None, scores: Tensor) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}; pass torch.tensor({name})")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {value.dtype}; pass {name}.int()")
    lead = scores.shape[:-1]
    if not arguments.broadcasts(value.shape, lead):
        raise ValueError(f"{op}: {name} must broadcast to scores.shape[:-1] = {tuple(lead)}, got {tuple(value.shape)}")
    check.same_device(op, name, value, "scores", scores)


def allowed(scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Return the mask of the entries within mask and ranges; ranges are clamped to the row."""
    if start is None and lengths is None:
        return mask
    column = torch.arange(scores.shape[-1], device=scores.device)
    begin, count = clamped(scores.shape[-1], start, lengths)
    inside = (column >= begin[..., None]) & (column < (begin + count)[..., None])
    return inside if mask is None else inside & mask


def clamped(n: int, start: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return where ranges begin and how many scores they have, in rows of n; the host may not see the values."""
    first = torch.zeros_like(lengths) if start is None else start.long()  # type: ignore[arg-type]
    begin = first.clamp(0, n)
    if lengths is None:
        return begin, n - begin
    return begin, (lengths.long().clamp(min=0) + first.clamp(max=0)).clamp(min=0).minimum(n - begin)
