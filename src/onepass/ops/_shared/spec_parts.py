"""Parts that several specs share: masks, bad calls, kernels and their signatures."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onepass.core.spec import BadCall


def some_mask(like: Tensor, *shape: int) -> Tensor:
    """Return a fixed mask with a few holes; of several rows, the first is fully masked."""
    flat = torch.arange(math.prod(shape)) % 7 != 3
    out = flat.view(shape)
    if len(shape) > 1 and shape[0] > 1:
        out[0] = False
    return out.to(like.device)


def tensors(*shape: int) -> Tensor:
    """Return random numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def arguments_refused(name: str, call: Callable[..., Any]) -> Iterator[BadCall]:
    """Yield the bad calls of all three operators; `call` takes (scores, k, mask)."""
    ones = torch.ones(2, 3)
    yield BadCall(f"{name} list", lambda: call([1.0], 1, None), TypeError, f"{name}: scores must be a tensor, got list")
    yield BadCall(f"{name} 0-d", lambda: call(torch.ones(()), 1, None), ValueError, "0-d")
    yield BadCall(f"{name} integers", lambda: call(ones.long(), 1, None), TypeError, "scores must be .*int64")
    yield BadCall(f"{name} k string", lambda: call(ones, "2", None), TypeError, "k must be .*str")
    yield BadCall(f"{name} k negative", lambda: call(ones, -1, None), ValueError, "k must be .*-1")
    yield BadCall(f"{name} mask dtype", lambda: call(ones, 1, ones), TypeError, "mask must be bool.*float32")
    yield BadCall(
        f"{name} mask shape", lambda: call(ones, 1, torch.ones(3, 3, dtype=torch.bool)), ValueError,
        r"mask must broadcast to the scores' shape \(2, 3\), got \(3, 3\)",
    )  # fmt: skip


_SIZES = ("s_row_stride", "gy_row_stride", "k_stride", "eps_stride", "mask_row_stride", "n_rows", "n_cols", "n_splits",
          "chunk", "tiles", "i_pass", "t", "n_iters", "n_changing")  # fmt: skip
_NUMBERS = ("k_value", "eps_value", "eps_first", "eps_last", "log2_decay", "eps_before", "eps")
DIVISIBLE = ("s_ptr", "y_ptr", "gy_ptr", "ds_ptr", "mask_ptr", "s_row_stride", "gy_row_stride", "mask_row_stride",
             "n_cols", "chunk")  # fmt: skip


def signature(names: str, dtype: str) -> dict[str, str]:
    """Return the Triton types of kernel arguments by their names."""
    types = dict.fromkeys(_SIZES, "i32") | dict.fromkeys(_NUMBERS, "fp32") | {"mask_ptr": "*u8", "mailbox_ptr": "*i64"}
    types |= dict.fromkeys(("s_ptr", "y_ptr", "gy_ptr", "ds_ptr"), f"*{dtype}")
    return {n: types.get(n, "*fp32") for n in names.split()}


def i32(*names: str) -> dict[str, str]:
    """Return the Triton types of integer arguments."""
    return dict.fromkeys(names, "i32")


def pointers(types: dict[str, str]) -> tuple[str, ...]:
    """Return the names of the arguments that are pointers: launches align them to 16 bytes."""
    return tuple(name for name, t in types.items() if t.startswith("*"))


def kernel(module: str, name: str) -> Callable[[], Any]:
    """Return a thunk that imports a kernel of `onepass.<module>`: Triton stays lazy."""
    return lambda: getattr(importlib.import_module(f"onepass.{module}"), name)
