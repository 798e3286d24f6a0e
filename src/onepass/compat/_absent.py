"""The error that a module of `onepass.compat` raises for a missing name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def absent(module: str, names: Sequence[str], name: str, instead: Mapping[str, str]) -> Exception:
    """Return the exception for `module.name`. The module has `names`; `instead` has replacements for other names.

    Names in `instead` get an ImportError, because `from … import` drops the message of an AttributeError. All others
    get the AttributeError that `hasattr` expects.
    """
    has = f"it has {', '.join(names)}"
    if name in instead:
        return ImportError(f"{module} has no {name}: use {instead[name]}; {has}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}; {has}")
