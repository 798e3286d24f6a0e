"""Types of command-line options."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(low: float, high: float, kind: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """Return an argparse type for numbers from low to high."""

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:,} to {high:,}, got {text}")
        return value

    return convert
