"""Commands of `onepass`, and types of their options."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

from onepass.train.commands.errors import UserError

# extra → import names of what it installs beyond torch, as in pyproject.toml
EXTRAS = {"train": ("matplotlib", "numpy", "safetensors")}


def command(
    commands: Any, name: str, run: Callable[..., int], text: tuple[str, str, str], extra: str | None = None
) -> argparse.ArgumentParser:
    """Add a command to the subparsers `commands`; return its parser.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
        name: of the command.
        run: called with the parsed arguments; returns the exit code.
        text: one line for the list of commands, the description, and examples; their line breaks stay.
        extra: the extra that installs what `run` imports beyond torch.
    """
    line, description, examples = text
    form = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=line, description=description, epilog=examples, formatter_class=form
    )
    parser.set_defaults(run=run, extra=extra)
    return parser


def require(extra: str) -> None:
    """Raise UserError with the pip command when a package of this extra is missing; import nothing."""
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"needs {', '.join(missing)}: pip install 'onepass[{extra}]'")


def number(low: float, high: float, kind: type[int] | type[float] = int) -> Callable[[str], int | float]:
    """Return an argparse type for numbers from low to high."""

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low:,} to {high:,}, got {text}")
        return value

    return convert
