"""Argument checks and row views that operators share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import visible
from onepass.core.launch import as_rows

# largest finite fp32 number
LARGEST = torch.finfo(torch.float32).max
# entries of rows that a definition computes at a time
AT_ONCE = 1 << 14
# most vectors of one call
MAX_VECTORS = 16


def rows(op: str, name: str, value: Tensor) -> None:
    """Raise an error unless value is a floating-point tensor of at least one dimension."""
    check.floating(op, name, value)
    if value.dim() < 1:
        raise ValueError(f"{op}: {name} must have at least one dimension, got a 0-d tensor")


def along(
    op: str, dim: Any, scores: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Return scores and their mask with dimension `dim` last, and a function that moves it back in a result.

    A 0-d tensor is a row of one.
    """
    check.floating(op, "scores", scores)
    mask(op, allowed, scores)
    n = max(1, scores.dim())
    if isinstance(dim, bool) or not isinstance(dim, int) or not -n <= dim < n:
        raise ValueError(f"{op}: dim must be an int from {-n} to {n - 1}, got {dim!r}")
    if not scores.dim():
        return scores[None], None if allowed is None else allowed[None], lambda t: t[0]
    moved = None if allowed is None else allowed.expand(scores.shape).movedim(dim, -1)
    return scores.movedim(dim, -1), moved, lambda t: t.movedim(-1, dim)


def vectors(op: str, name: str, value: Tensor, of: str, like: Tensor) -> None:
    """Raise an error unless value is one vector (D,), or up to MAX_VECTORS (R, D), for rows (..., D)."""
    check.floating(op, name, value)
    if value.dim() not in (1, 2) or value.shape[-1] != like.shape[-1]:
        raise ValueError(
            f"{op}: {name} must be (D,) or (R, D) with D = {like.shape[-1]}, the last dimension of {of} "
            f"{tuple(like.shape)}; got {tuple(value.shape)}"
        )
    if value.dim() == 2 and not 1 <= value.shape[0] <= MAX_VECTORS:
        raise ValueError(f"{op}: {name} (R, D) takes 1 ≤ R ≤ {MAX_VECTORS} vectors, got R = {value.shape[0]}")
    check.same_device(op, name, value, of, like)


def result_dtype(op: str, name: str, value: object) -> None:
    """Raise TypeError unless value is None or a floating-point dtype."""
    if value is not None and value not in check.FLOATS:
        raise TypeError(f"{op}: {name} must be None, float32, float16, bfloat16 or float64, got {value!r}")


def boolean(op: str, mask: object, meaning: str) -> None:
    """Raise TypeError unless the mask is a bool tensor; say how to convert the masks of other libraries."""
    check.tensor(op, "mask", mask)
    dtype = mask.dtype  # type: ignore[attr-defined]
    if dtype == torch.bool:
        return
    hint = "of an attention_mask of ones and zeros, pass mask.bool()"
    if dtype.is_floating_point:
        hint = "of an additive mask of 0 and -inf, pass mask == 0; " + hint
    raise TypeError(f"{op}: mask must be bool (True = {meaning}), got {dtype}; {hint}")


def mask_of(
    op: str, value: Tensor | None, dims: str, shape: Sequence[int], of: str, like: Tensor, meaning: str = "real token",
    name: str = "mask",
) -> None:  # fmt: skip
    """Raise an error for a mask that is not bool, not of this shape, or not on the device of `like`."""
    if value is None:
        return
    boolean(op, value, meaning)
    if value.shape != shape:
        raise ValueError(f"{op}: {name} must be {dims} = {tuple(shape)}, got {tuple(value.shape)}")
    check.same_device(op, name, value, of, like)


def mask(op: str, value: Tensor | None, like: Tensor) -> None:
    """Raise an error for a mask that is not bool, does not broadcast to the scores, or is on another device."""
    if value is None:
        return
    boolean(op, value, "may be chosen")
    if not broadcasts(value.shape, like.shape):
        raise ValueError(
            f"{op}: mask must broadcast to the scores' shape {tuple(like.shape)}, got {tuple(value.shape)}"
        )
    check.same_device(op, "mask", value, "scores", like)


def positive(op: str, name: str, value: Any, like: Tensor) -> None:
    """Raise an error unless value is a positive number, or a tensor of them that broadcasts to scores.shape[:-1].

    Values of a tensor are checked only on a CPU: on a GPU the host would wait for them.
    """
    if not isinstance(value, Tensor):
        number(op, name, value)
        return
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{op}: {name} must be a number or a real tensor, got a tensor of {value.dtype}")
    if not broadcasts(value.shape, like.shape[:-1]):
        raise ValueError(
            f"{op}: {name} must be a number or broadcast to scores.shape[:-1] = {tuple(like.shape[:-1])}, "
            f"got {tuple(value.shape)}"
        )
    check.same_device(op, name, value, "scores", like)
    if visible(value) and not bool((value > 0).all()):
        raise ValueError(f"{op}: {name} must be > 0 everywhere, got a minimum of {value.min().item():g}")


def number(op: str, name: str, value: Any, most: float = math.inf) -> None:
    """Raise an error unless value is a positive Python number of at most `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number > 0, got {type(value).__name__}; pass float({name})")
    if not value > 0:
        raise ValueError(f"{op}: {name} must be > 0, got {value}")
    if value > most:
        raise ValueError(f"{op}: {name} must be ≤ {most:.3g}, got {value}")


def whole(op: str, name: str, value: Any, least: int) -> None:
    """Raise an error unless value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}; pass int({name})")
    if value < least:
        raise ValueError(f"{op}: {name} must be ≥ {least}, got {value}")


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Return whether a tensor of `shape` expands to `to`."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def split(value: Tensor | float) -> tuple[Tensor | None, float]:
    """Return (tensor, 0) for a tensor, (None, number) for a number, which saves the launch that fills a tensor.

    A number beyond the range of fp32 becomes the largest fp32 number.
    """
    return (value, 0.0) if isinstance(value, Tensor) else (None, float(min(value, LARGEST)))


def split_count(value: Any, like: Tensor) -> tuple[Tensor | None, float]:
    """`split` for a k; one that follows from a symbolic shape becomes a tensor.

    As a number it would bind the compiled program to one length.
    """
    if isinstance(value, Tensor):
        return value, 0.0
    if torch.compiler.is_compiling() or isinstance(value, (torch.SymInt, torch.SymFloat)):
        # this loads sympy, which a program that compiles has loaded already
        from torch.fx.experimental.symbolic_shapes import has_static_value

        if not has_static_value(value):
            return torch.full((), value, dtype=accumulator(like), device=like.device), 0.0
    return split(value)


def per_row(value: Tensor | None, like: Tensor) -> Tensor | None:
    """Return k or eps as one value per row of the flattened scores: a view for 0-d, else at most a small copy."""
    return None if value is None else value.expand(like.shape[:-1]).reshape(math.prod(like.shape[:-1]))


def beside_rows(value: Tensor | float, scores: Tensor) -> Tensor:
    """Return k or eps as one value per row, (..., 1), in the dtype of the scores."""
    rows = torch.as_tensor(value, dtype=scores.dtype, device=scores.device)
    return rows.expand(scores.shape[:-1])[..., None]


def valid_entries(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return True where an entry may be chosen: not masked and not -inf."""
    allowed = scores != -math.inf
    return allowed if mask is None else allowed & mask


def mask_rows(value: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask as uint8 rows like as_rows(scores); a mask shared by all rows stays one row with stride 0."""
    return None if value is None else as_rows(value.view(torch.uint8).expand(like.shape))


def to_shape(rows: Tensor, value: Tensor, like: Tensor) -> Tensor:
    """Sum per-row gradients over broadcast dimensions; return them in the shape and dtype of value."""
    return rows.view(like.shape[:-1]).sum_to_size(value.shape).to(value.dtype)


def wide_rows(like: Tensor, allowed: Tensor | None) -> Tensor:
    """Return scores as definitions take them: (R, n) in float64, -inf where a mask of such rows is 0."""
    wide = like.reshape(math.prod(like.shape[:-1]), like.shape[-1]).double().contiguous()
    return wide if allowed is None else torch.where(allowed != 0, wide, -math.inf)


def column(value: Tensor | None, number: float, rows: Tensor) -> Tensor:
    """Return k or eps, (R,) or a number, as (R, 1) beside the rows of a definition; NaN where it is not > 0."""
    if value is None:
        return rows.new_full((len(rows), 1), number)
    return torch.where(value > 0, value.to(rows.dtype), math.nan)[:, None]


def by_rows(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what `function` returns for rows of these tensors, (R, …) each, computed for some rows at a time.

    These stay in the caches meanwhile; on a GPU it computes all rows at once, as each part would cost launches.
    """
    height = max(1, AT_ONCE // max(1, tensors[0].shape[-1]))
    if tensors[0].is_cuda or len(tensors[0]) <= height:
        return function(*tensors)
    parts = zip(*(t.split(height) for t in tensors), strict=True)  # type: ignore[no-untyped-call]
    return tuple(map(torch.cat, zip(*(function(*part) for part in parts), strict=True)))


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype of sums over these tensors: fp64 if one of them is, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return gates in the shape and dtype of the scores; avoid views, which autograd forbids to change in place."""
    rows = rows.to(like.dtype)
    if rows.shape == like.shape:
        return rows
    return torch.ops.aten._unsafe_view(rows, like.shape)  # type: ignore[no-any-return]
