"""Checks of the routing operators' arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core import check

MAX_VECTORS = 16


def score(x: Tensor, weight: Tensor, eps: float) -> None:
    """Raise TypeError or ValueError for arguments that :func:`score` does not accept."""
    check.floating("score", "x", x)
    check.floating("score", "weight", weight)
    if x.dim() != 3 or x.shape[-1] < 1:
        raise ValueError(f"score: x must be (batch, n, dim) with dim ≥ 1, got {tuple(x.shape)}")
    if weight.dim() not in (1, 2) or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"score: weight must be (dim,) or (R, dim) with dim = {x.shape[-1]} of x {tuple(x.shape)}; "
            f"got {tuple(weight.shape)}"
        )
    if weight.dim() == 2 and not 1 <= weight.shape[0] <= MAX_VECTORS:
        raise ValueError(f"score: weight (R, dim) takes 1 ≤ R ≤ {MAX_VECTORS} vectors, got R = {weight.shape[0]}")
    if eps < 0:
        raise ValueError(f"score: eps must be ≥ 0, got {eps}")
    check.same_device("score", "weight", weight, "x", x)


def _indices(op: str, indices: Tensor, name: str, other: Tensor) -> None:
    check.tensor(op, "indices", indices)
    if indices.dtype != torch.int64:
        raise TypeError(f"{op}: indices must be int64, got {indices.dtype}")
    if indices.dim() not in (2, 3):
        raise ValueError(f"{op}: indices must be (batch, k) or (batch, R, k), got {tuple(indices.shape)}")
    check.same_device(op, "indices", indices, name, other)


def gather(x: Tensor, indices: Tensor) -> None:
    """Raise TypeError or ValueError for arguments that :func:`gather` does not accept."""
    check.floating("gather", "x", x)
    if x.dim() != 3:
        raise ValueError(f"gather: x must be (batch, n, dim), got {tuple(x.shape)}")
    _indices("gather", indices, "x", x)
    if indices.shape[0] != x.shape[0]:
        raise ValueError(f"gather: indices {tuple(indices.shape)} must have the batch {x.shape[0]} of x")


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> None:
    """Raise TypeError or ValueError for arguments that :func:`scatter_add` does not accept."""
    op = "scatter_add"
    check.floating(op, "y", y)
    check.floating(op, "update", update)
    _indices(op, indices, "y", y)
    batch = indices.shape[0]
    if y.dim() == 2:
        fits = y.shape[0] % batch == 0 if batch else y.shape[0] == 0
    else:
        fits = y.dim() == 3 and y.shape[0] == batch
    if not fits:
        raise ValueError(
            f"{op}: y must be (batch, n, dim) or its rows (batch·n, dim) with batch = {batch} of indices "
            f"{tuple(indices.shape)}; got {tuple(y.shape)}"
        )
    if update.shape != (*indices.shape, y.shape[-1]):
        raise ValueError(f"{op}: update must be {(*indices.shape, y.shape[-1])}, got {tuple(update.shape)}")
    check.same_device(op, "update", update, "y", y)
    if gates is not None:
        check.floating(op, "gates", gates)
        if gates.shape != indices.shape:
            raise ValueError(
                f"{op}: gates must have the shape of indices {tuple(indices.shape)}, got {tuple(gates.shape)}"
            )
        check.same_device(op, "gates", gates, "y", y)
