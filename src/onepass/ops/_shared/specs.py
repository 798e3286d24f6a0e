"""Every operator's contract, found by its folder."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import Any

import onepass.ops


def folders() -> list[str]:
    """Return the names of the folders that have a `spec.py`."""
    names = sorted(m.name for m in pkgutil.iter_modules(onepass.ops.__path__) if m.ispkg)
    return [n for n in names if importlib.util.find_spec(f"onepass.ops.{n}.spec") is not None]


def load(folder: str) -> Any:
    """Return the module `spec` of a folder."""
    return importlib.import_module(f"onepass.ops.{folder}.spec")
