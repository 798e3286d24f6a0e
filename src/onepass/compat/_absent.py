"""What a module of `onepass.compat` answers when it is asked for a name that it doesn't have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def absent(module: str, names: Sequence[str], name: str, instead: Mapping[str, str]) -> Exception:
    """The exception for `module.name`; `names` are what the module has, `instead` what replaces others of the original.

    An original's name raises an ImportError, because `from … import` swallows the message of an AttributeError. Any
    other name raises the AttributeError that `hasattr` expects.
    """
    has = f"it has {', '.join(names)}"
    if name in instead:
        return ImportError(f"{module} has no {name}: use {instead[name]}; {has}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}; {has}")
