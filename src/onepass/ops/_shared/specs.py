"""Every operator's contract, found by its folder; parts that several share: masks, numbers, bad calls."""

from __future__ import annotations

import importlib
import importlib.util
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import onepass.ops
from onepass.core.spec import BadCall


def folders() -> list[str]:
    """Return the names of the folders that have a `spec.py`."""
    names = sorted(m.name for m in pkgutil.iter_modules(onepass.ops.__path__) if m.ispkg)
    return [n for n in names if importlib.util.find_spec(f"onepass.ops.{n}.spec") is not None]


def load(folder: str) -> Any:
    """Return the module `spec` of a folder."""
    return importlib.import_module(f"onepass.ops.{folder}.spec")


def some_mask(like: Tensor, *shape: int) -> Tensor:
    """Return a fixed mask with a few holes; of several rows, the first is fully masked."""
    flat = torch.arange(math.prod(shape)) % 7 != 3
    out = flat.view(shape)
    if len(shape) > 1 and shape[0] > 1:
        out[0] = False
    return out.to(like.device)


def arguments_refused(name: str, call: Callable[..., Any]) -> Iterator[BadCall]:
    """Yield the bad calls of all three operators; `call` takes (scores, k, mask)."""
    ones = torch.ones(2, 3)
    yield BadCall(f"{name} list", lambda: call([1.0], 1, None), TypeError, f"{name}: scores must be a tensor, got list")
    yield BadCall(f"{name} integers", lambda: call(ones.long(), 1, None), TypeError, "scores must be .*int64")
    yield BadCall(f"{name} k string", lambda: call(ones, "2", None), TypeError, "k must be .*str")
    yield BadCall(f"{name} k negative", lambda: call(ones, -1, None), ValueError, "k must be .*-1")
    yield BadCall(f"{name} mask dtype", lambda: call(ones, 1, ones), TypeError, "mask must be bool.*float32")
    yield BadCall(
        f"{name} mask shape", lambda: call(ones, 1, torch.ones(3, 3, dtype=torch.bool)), ValueError,
        r"mask must broadcast to the scores' shape \(2, 3\), got \(3, 3\)",
    )  # fmt: skip
