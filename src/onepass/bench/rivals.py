"""Which rivals the selected operators know, which of them are installed here, and in which version."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping

from onepass.core import spec
from onepass.core.about import distribution_version


def known(folders: Iterable[str]) -> dict[str, str]:
    """Import name → distribution of every rival the operators' spec.py declare."""
    found: dict[str, str] = {}
    for folder in folders:
        declared: Mapping[str, str] = getattr(spec.load(folder), "RIVALS", {})
        found.update(declared)
    return dict(sorted(found.items()))


def availability(rivals: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """({distribution: version} of those installed, distributions that are not)."""
    installed: dict[str, str] = {}
    missing: list[str] = []
    for module, distribution in rivals.items():
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            missing.append(distribution)
        else:
            installed[distribution] = distribution_version(distribution) or "unknown version"
    return installed, missing
