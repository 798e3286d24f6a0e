"""The command `onepass` (also `python -m onepass`): a list of commands, each in its own module."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from onepass import __version__
from onepass.core.errors import UserError
from onepass.core.extras import require

# every module here has `add_command(subparsers)`, imports its heavy parts only when its command runs, and names the
# extra that they come with: `set_defaults(run=run, extra="train")`
COMMANDS = ("onepass.doctor.cli", "onepass.train.cli", "onepass.train.show", "onepass.ablate.cli", "onepass.bench.cli")


class Parser(argparse.ArgumentParser):
    """A mistyped option ends a command with one line, not with the whole usage; subparsers inherit this."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser of every command."""
    top = Parser(prog="onepass", description="One-pass PyTorch operators and conditional computation.")
    top.add_argument("--version", action="version", version=f"onepass {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        importlib.import_module(module).add_command(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (2 for a user's mistake, 130 when interrupted)."""
    if sys.stdout is None:
        # as a daemon finds it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        # an encoding that knows no × or µ must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parser().parse_args(argv)
    try:
        if extra := getattr(args, "extra", None):
            require(extra)
        return int(args.run(args))
    except UserError as error:
        # a path may contain a newline; the message stays on one line
        print(f"onepass {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"onepass {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away (`onepass bench | head`): nothing is wrong here
        sys.stderr.close()
        return 141
    except OSError as error:
        # what no command foresees: a directory on the way that may not be entered, a full disk behind the output
        where = f"can't use {error.filename}: " if error.filename else ""
        print(f"onepass {args.command}: {where}{(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
