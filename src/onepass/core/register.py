"""Register functions with torch's dispatcher, for torch.compile, export, FakeTensor and dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.library import Library, infer_schema

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARY: Any = Library("onepass", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, function: Callable[..., Any]) -> Any:
    """Return the operator `onepass::name` that runs `function` on every device.

    Its schema follows from the annotations. The arguments are left as they are, and no output shares memory with one.
    `torch.library.custom_op` checks both at each call, for 6 µs and more
    (benchmarks/results/cpu/raw/registration.json); here the tests check it, by `torch.library.opcheck`.
    """
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.onepass, name).default


def register_fake(op: Any) -> Callable[[F], F]:
    """Decorate the function that makes the outputs' shapes and dtypes for FakeTensor and meta tensors."""

    def decorate(function: F) -> F:
        torch.library.register_fake(op, function, lib=_LIBRARY)
        return function

    return decorate


__all__ = ["register", "register_fake"]
