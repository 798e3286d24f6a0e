"""Which rivals the selected operators know, which of them are installed here, and in which version."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

from onepass.core import spec
from onepass.core.about import distribution_version

from .cases import modules

# import name → distribution, of operator folders whose spec.py has no RIVALS of its own
KNOWN: Mapping[str, Mapping[str, str]] = {
    "routing": {"colt5_attention": "colt5-attention"},
    "soft_topk": {"colt5_attention": "colt5-attention", "entmax": "entmax"},
}


def known(folders: Collection[str]) -> dict[str, str]:
    """Import name → distribution of every rival of these operators."""
    found: dict[str, str] = {}
    for folder in folders:
        declared: Mapping[str, str] | None = getattr(spec.load(folder), "RIVALS", None)
        found.update(KNOWN.get(folder, {}) if declared is None else declared)
    for module in modules():
        if set(module.CASES) & set(folders):
            found.update(module.RIVALS)
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
