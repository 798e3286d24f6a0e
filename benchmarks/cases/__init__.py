"""What is measured: a file per operator with CASES, and RIVALS ({import name: distribution}) to compare with."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from typing import Any

from benchmarks.case import Case

# cases of one folder may be spread over two files
FOLDER = {"norm_options": "norm"}


def files() -> list[str]:
    """Names of the files with cases; modules of routed layers are "fused"."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Any:
    """One file of cases."""
    return importlib.import_module(f"{__name__}.{name}")


def all_cases() -> list[tuple[str, Case]]:
    """(folder, case) of every case."""
    return [(FOLDER.get(name, name), case) for name in files() for case in load(name).CASES]


def rivals(folders: Collection[str]) -> dict[str, str]:
    """{import name: distribution} of every rival in these folders."""
    declared = [getattr(load(name), "RIVALS", {}) for name in files() if FOLDER.get(name, name) in folders]
    return dict(sorted((name, distribution) for names in declared for name, distribution in names.items()))
