"""Register functions with torch's dispatcher, for torch.compile, export, FakeTensor and dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.library import Library, infer_schema

from .sharding import Rule, add_rule, register_rules

F = TypeVar("F", bound=Callable[..., Any])

# the package's name: a copy of the package under another name registers operators of its own
NAMESPACE = __name__.partition(".")[0]
_LIBRARY: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, function: Callable[..., Any], rule: Rule | None = None) -> Any:
    """Return the operator `onepass::name` that runs `function` on every device; `rule` is for DTensor (core.sharding).

    Its schema follows from the annotations. The arguments are left as they are, and no output shares memory with one.
    `torch.library.custom_op` checks both at each call, for 6 µs and more
    (benchmarks/results/cpu/raw/registration.json); here the tests check it, by `torch.library.opcheck`.
    """
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if rule is not None:
        add_rule(op, rule)
    return op


def register_fake(op: Any) -> Callable[[F], F]:
    """Decorate the function that makes the outputs' shapes and dtypes for FakeTensor and meta tensors."""

    def decorate(function: F) -> F:
        @wraps(function)
        def fake(*args: Any) -> Any:
            register_rules()
            return function(*args)

        torch.library.register_fake(op, fake, lib=_LIBRARY)
        return function

    return decorate


__all__ = ["NAMESPACE", "register", "register_fake"]
