"""The rivals that operators declare, and their installed versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

from onepass.core import spec
from onepass.core.about import distribution_version


def known(folders: Collection[str]) -> dict[str, str]:
    """Return {import name: distribution} of every rival of these operators."""
    declared = [getattr(spec.load(folder), "RIVALS", {}) for folder in folders]
    return dict(sorted((name, distribution) for rivals in declared for name, distribution in rivals.items()))


def installed(rivals: Mapping[str, str]) -> dict[str, str]:
    """Return {distribution: version} of the installed rivals."""
    return {
        distribution: distribution_version(distribution) or "unknown version"
        for module, distribution in rivals.items()
        if importlib.util.find_spec(module.partition(".")[0]) is not None
    }
