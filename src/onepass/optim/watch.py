"""Check that tensors are unchanged since the last step: a thousand of them in as few calls as possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Objects:
    """Check that a list still holds the same tensors, in a tenth of the time of a loop with `is`.

    Python compares lists in C, by identity first. It compares different tensors by value: for several elements this
    raises, but tensors of one element may be equal, so these are checked again with `is`.
    """

    def __init__(self, objects: Sequence[Tensor | None]) -> None:
        self._objects = list(objects)
        self._singles = [(i, t) for i, t in enumerate(objects) if t is not None and t.numel() == 1]

    def same_objects(self, objects: list[Any]) -> bool:
        """Return whether these are the objects of the constructor."""
        try:
            return objects == self._objects and (not self._singles or all(objects[i] is t for i, t in self._singles))
        except Exception:  # comparing different tensors raises many kinds of errors
            return False


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride(), t.is_conj(), t.is_neg()


class Layouts:
    """Check that tensors still have their dtypes, devices, shapes and strides.

    Every step checks every gradient. torch's own guard checks all tensors in one call and takes a third of the time of
    a Python expression. It also fails for other reasons, such as a change of grad mode. Where it fails, or torch has
    none, the tensors are checked one by one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layouts = [_layout(t) for t in tensors]
        self._check: Callable[..., bool] | None = None
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            guards: Any = torch._C._dynamo.guards
            sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
            self._check = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these tensors have the layouts of those in the constructor."""
        try:
            if self._check is not None and self._check(*tensors):
                return True
            return [_layout(t) for t in tensors] == self._layouts
        except (AttributeError, TypeError, RuntimeError):  # a gradient is missing or sparse now
            return False
