"""What a command needs beyond torch: the package's extras, looked for before the command starts."""

from __future__ import annotations

import importlib.util

from onepass.core.errors import UserError

# extra → import names of what it installs, as in pyproject.toml
EXTRAS = {
    "train": ("matplotlib", "numpy", "rich", "safetensors"),
    "bench": ("matplotlib", "rich"),
}


def require(extra: str) -> None:
    """Stop with the pip command to type when a package of this extra is absent; nothing is imported."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'onepass[{extra}]'")
