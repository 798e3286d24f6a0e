"""The command `onepass`, also `python -m onepass`; each of its commands is a module."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from onepass import __version__
from onepass.train.commands.errors import UserError, enough_memory, printable, reason
from onepass.train.commands.options import require

# each module has `add_command(subparsers)` and imports its heavy parts when its command runs
COMMANDS = (
    "onepass.doctor.cli",
    "onepass.train.options",
    "onepass.train.show",
    "onepass.train.generate",
)

# seconds that a process waits for torchrun's first one, which may still load torch
PATIENCE = 60.0
TEXT = "One-pass PyTorch operators and conditional computation."
EXAMPLES = """\
examples:
  onepass doctor                   is this machine ready, and which path does each operator take?
  onepass train ~/notes            train a model on your own text
  onepass generate runs/notes --prompt "def "   let a trained language model write on

`onepass COMMAND --help` has more of each. `python -m benchmarks`, in a copy of the repository, measures the operators.
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong option in one line instead of the whole usage; subparsers inherit this."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse an unknown option here, where its command is known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = re.findall(r"--[\w-]+", self.format_usage())
            close = difflib.get_close_matches(unknown[0].partition("=")[0], options, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
            # torchrun's first process meets the same options and says so; it would be ended unheard if this one ended
            # before, and ends this one when it has
            time.sleep(PATIENCE)
        self.exit(2, f"{self.prog}: {printable(message)}\n")


def parser() -> Parser:
    """Build the argument parser of every command."""
    top = Parser(prog="onepass", description=TEXT, epilog=EXAMPLES)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("--version", action="version", version=f"onepass {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for module in COMMANDS:
        importlib.import_module(module).add_command(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of `onepass`; return its exit code."""
    try:
        return run_command(parser(), argv)
    except KeyboardInterrupt:
        # before the command began
        print("onepass: interrupted", file=sys.stderr)
        return 130


def run_command(top: Parser, argv: Sequence[str] | None) -> int:
    """Parse the arguments and call their `run`; return its exit code (2 for a user's mistake, 130 when interrupted)."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            # a process without standard output, such as a daemon
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # escape characters such as × or µ if the output's encoding lacks them, instead of raising
        sys.stdout.reconfigure(errors="backslashreplace")
    args = top.parse_args(argv)
    if "run" not in args:
        # no command was given: show which there are
        top.print_help()
        return 0
    name = f"{top.prog} {args.command}" if "command" in args else top.prog
    try:
        if extra := getattr(args, "extra", None):
            require(extra)
        with enough_memory("there is too little memory"):
            return int(args.run(args))
    except UserError as error:
        # a path in the message may contain line feeds or control characters
        print(f"{name}: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of the output has ended (`onepass doctor | head`): not an error
        sys.stderr.close()
        return 141
    except OSError as error:
        # an error that the command did not expect: a directory without permission, a full disk behind the output
        where = f"can't use {error.filename}: " if error.filename else ""
        print(f"{name}: {printable(where + reason(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
