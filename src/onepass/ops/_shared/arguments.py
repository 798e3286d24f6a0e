"""Argument checks and row views shared by coor_descent, soft_topk and topk."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import plain
from onepass.core.launch import as_rows

# of the fp32 numbers
LARGEST = torch.finfo(torch.float32).max


def scores(op: str, value: Tensor) -> None:
    """Refuse scores that are no floating-point tensor with a last dimension."""
    check.floating(op, "scores", value)
    if value.dim() < 1:
        raise ValueError(f"{op}: scores must have at least one dimension, got a 0-d tensor")


def mask(op: str, value: Tensor | None, like: Tensor) -> None:
    """Refuse a mask that is not bool or does not broadcast to the scores."""
    if value is None:
        return
    check.tensor(op, "mask", value)
    if value.dtype != torch.bool:
        raise TypeError(f"{op}: mask must be a bool tensor (True = may be chosen), got {value.dtype}")
    if not _broadcasts(value.shape, like.shape):
        raise ValueError(
            f"{op}: mask must broadcast to the scores' shape {tuple(like.shape)}, got {tuple(value.shape)}"
        )
    check.same_device(op, "mask", value, "scores", like)


def positive(op: str, name: str, value: Any, like: Tensor) -> None:
    """Refuse anything but a positive number or a tensor of them that broadcasts to scores.shape[:-1].

    The values of a tensor are looked at only on the CPU: on a GPU that would make the host wait.
    """
    if not isinstance(value, Tensor):
        number(op, name, value)
        return
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{op}: {name} must be a number or a real tensor, got a tensor of {value.dtype}")
    if not _broadcasts(value.shape, like.shape[:-1]):
        raise ValueError(
            f"{op}: {name} must be a number or broadcast to scores.shape[:-1] = {tuple(like.shape[:-1])}, "
            f"got {tuple(value.shape)}"
        )
    check.same_device(op, name, value, "scores", like)
    if _visible(value) and not bool((value > 0).all()):
        raise ValueError(f"{op}: {name} must be > 0 everywhere, got a minimum of {value.min().item():g}")


def number(op: str, name: str, value: Any, most: float = math.inf) -> None:
    """Refuse anything but a positive Python number, no larger than `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number > 0, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{op}: {name} must be > 0, got {value}")
    if value > most:
        raise ValueError(f"{op}: {name} must be ≤ {most:.3g}, got {value}")


def whole(op: str, name: str, value: Any, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be ≥ {least}, got {value}")


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    if len(shape) > len(to):
        return False
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _visible(value: Tensor) -> bool:
    """Values can be read without a wait and without upsetting whoever traces this call."""
    return plain(value) and value.device.type == "cpu"


def split(value: Tensor | float) -> tuple[Tensor | None, float]:
    """A tensor or a number → (tensor or None, number): a number needs no tensor, and no launch to fill one.

    A number that fp32 can't hold means what the largest that it can hold does.
    """
    return (value, 0.0) if isinstance(value, Tensor) else (None, float(min(value, LARGEST)))


def per_row(value: Tensor | None, like: Tensor) -> Tensor | None:
    """A tensor k or eps as one value per row of the flattened scores: a view for 0-d, one small copy at most."""
    return None if value is None else value.expand(like.shape[:-1]).reshape(math.prod(like.shape[:-1]))


def mask_rows(value: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as uint8 rows beside as_rows(scores); a mask shared by all rows stays one row with stride 0."""
    return None if value is None else as_rows(value.view(torch.uint8).expand(like.shape))


def to_shape(rows: Tensor, value: Tensor, like: Tensor) -> Tensor:
    """Per-row gradients summed over what broadcasting repeated, in the parameter's own shape and dtype."""
    return rows.view(like.shape[:-1]).sum_to_size(value.shape).to(value.dtype)


def accumulator(like: Tensor) -> torch.dtype:
    """fp64 for fp64 scores, fp32 for everything else."""
    return torch.promote_types(like.dtype, torch.float32)


def torch_rows(like: Tensor, allowed: Tensor | None) -> Tensor:
    """The scores as the torch path takes them: (R, n) contiguous, -inf where masked."""
    if allowed is not None:
        like = like.masked_fill(~allowed, -math.inf)
    return like.reshape(math.prod(like.shape[:-1]), like.shape[-1]).to(accumulator(like)).contiguous()


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The torch path's gates in the scores' shape and dtype; no view, since nobody may change one in place."""
    rows = rows.to(like.dtype)
    if rows.shape == like.shape:
        return rows
    return torch.ops.aten._unsafe_view(rows, like.shape)  # type: ignore[no-any-return]


def torch_column(value: Tensor | None, number: float, like: Tensor, rows: Tensor) -> Tensor:
    """Likewise k or eps (R, 1), NaN where nobody could look whether it is > 0."""
    given = per_row(value, like)
    if given is None:
        return rows.new_full((len(rows), 1), number)
    given = given.to(rows.dtype)[:, None]
    return torch.where(given > 0, given, math.nan)
