"""The error that a module of `onepass.compat` raises for a missing name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def absent(module: str, names: Sequence[str], instead: Mapping[str, str]) -> None:
    """Give a module that has `names` a `__getattr__`; `instead` has replacements for other names.

    Names in `instead` raise an ImportError, because `from … import` drops the message of an AttributeError. All others
    raise the AttributeError that `hasattr` expects. Where the module defined it, a type checker would accept any name.
    """
    offered = f"it has {', '.join(names)}"

    def missing(name: str) -> Any:
        if name in instead:
            raise ImportError(f"{module} has no {name}: use {instead[name]}; {offered}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {offered}")

    vars(sys.modules[module])["__getattr__"] = missing
