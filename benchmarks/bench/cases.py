"""The cases to measure, as operators declare them in their specs."""

from __future__ import annotations

from onepass.core import spec
from onepass.core.spec import Case


def all_cases() -> list[tuple[str, Case]]:
    """Return (folder, case) of every case of every operator."""
    return [(folder, case) for folder in spec.folders() for case in getattr(spec.load(folder), "CASES", ())]
