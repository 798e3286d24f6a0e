"""Check before a command starts that the packages it needs beyond torch (its extra) are installed."""

from __future__ import annotations

import importlib.util
import sys

from onepass.train.commands.errors import UserError

# extra → import names of what it installs, as in pyproject.toml
EXTRAS = {"train": ("matplotlib", "numpy", "rich", "safetensors", "tomli")}

# parts of newer Pythons: import name → first version that has no need of it
BUILT_IN = {"tomli": (3, 11)}


def require(extra: str) -> None:
    """Raise UserError with the pip command when a package of this extra is missing; import nothing."""
    needed = [name for name in EXTRAS[extra] if sys.version_info < BUILT_IN.get(name, (4,))]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'onepass[{extra}]'")
