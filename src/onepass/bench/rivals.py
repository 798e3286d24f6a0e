"""Which rivals the selected operators know, which of them are installed here, and in which version."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping

from onepass.core import spec
from onepass.core.about import distribution_version

# import name → distribution, per operator folder; a spec.py with RIVALS of its own speaks for itself
KNOWN: Mapping[str, Mapping[str, str]] = {
    "lion": {
        "bitsandbytes": "bitsandbytes",
        "flashoptim": "flashoptim",
        "lion_pytorch": "lion-pytorch",
        "optimi": "torch-optimi",
    },
    "norm": {"liger_kernel": "liger-kernel", "quack": "quack-kernels"},
    "routing": {"colt5_attention": "colt5-attention"},
    "soft_topk": {"colt5_attention": "colt5-attention", "entmax": "entmax"},
}


def known(folders: Iterable[str]) -> dict[str, str]:
    """Import name → distribution of every rival of these operators."""
    found: dict[str, str] = {}
    for folder in folders:
        declared: Mapping[str, str] | None = getattr(spec.load(folder), "RIVALS", None)
        found.update(KNOWN.get(folder, {}) if declared is None else declared)
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
