"""Check before a command starts that the packages it needs beyond torch (its extra) are installed."""

from __future__ import annotations

import importlib.util

from onepass.train.commands.errors import UserError

# extra → import names of what it installs, as in pyproject.toml
EXTRAS = {"train": ("matplotlib", "numpy", "safetensors")}


def require(extra: str) -> None:
    """Raise UserError with the pip command when a package of this extra is missing; import nothing."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'onepass[{extra}]'")
