"""Installed versions of rivals."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from onepass.core.about import distribution_version


def installed(rivals: Mapping[str, str]) -> dict[str, str]:
    """Return {distribution: version} of the installed rivals."""
    return {
        distribution: distribution_version(distribution) or "unknown version"
        for module, distribution in rivals.items()
        if importlib.util.find_spec(module.partition(".")[0]) is not None
    }
