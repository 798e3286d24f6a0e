"""Which path a tensor takes: the Triton kernels or torch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.core import check
from onepass.core.eager import is_fake

# Triton reads this when a kernel is decorated, so it stays as it was at import. These are the values that it takes.
INTERPRET = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
# "auto" uses Triton wherever it runs; "torch" forces the torch path (to compare, or to let Inductor fuse).
BACKEND = check.setting("ONEPASS_BACKEND", "auto", "torch")


def import_later(name: str, package: str | None) -> Callable[[], Any]:
    """Return a function that imports a module at its first call: kernels need Triton, which takes long to load."""
    return functools.cache(lambda: importlib.import_module(name, package))


@functools.cache
def triton_installed() -> bool:
    """Return whether `import triton` would find a package, without importing it."""
    return importlib.util.find_spec("triton") is not None


def path(x: Tensor) -> tuple[str, str]:
    """Return ("triton" or "torch", the reason) for a tensor like x; `onepass doctor` shows it."""
    if BACKEND == "torch":
        return "torch", "ONEPASS_BACKEND=torch"
    if not triton_installed():
        return "torch", "Triton is not installed"
    if x.dtype == torch.float64:
        return "torch", "float64: the kernels compute in float32"
    if x.is_cuda:
        return "triton", f"{x.device} with Triton"
    if INTERPRET:
        return "triton", "TRITON_INTERPRET is on"
    return "torch", f"device {x.device.type} has no Triton path"


def uses_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether tensors like these go to the Triton kernels: `path` without its reason, for every call."""
    # a fake tensor has no memory for the interpreter to read
    has_kernels = x.is_cuda or (INTERPRET and not is_fake(x))
    if not has_kernels or x.dtype == torch.float64 or BACKEND == "torch" or not triton_installed():
        return False
    return not others or not [t for t in others if t is not None and t.dtype == torch.float64]
