"""`onepass doctor`: check the installation and print a block for bug reports."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onepass.train.commands.options import command

if TYPE_CHECKING:
    from .facts import Device
    from .selftest import Check, Verdict


DESCRIPTION = """\
Show versions and devices, which path every operator takes here and why, and test every operator against its float64
definition. Exit code 0 when all is well, 1 when something is wrong."""
EPILOG = """\
examples:
  onepass doctor                           ends with a block for bug reports
  onepass doctor --full                    every sample of every operator, however long that takes
  ONEPASS_BACKEND=torch onepass doctor     the operators without their kernels
"""


def add_command(subparsers: Any) -> None:
    """Add `onepass doctor`."""
    line = "versions, devices, and a self-test of every operator"
    parser = command(subparsers, "doctor", run, (line, DESCRIPTION, EPILOG))
    parser.add_argument("--full", action="store_true", help="run every sample, however long that takes")


def plan(devices: Sequence[Device]) -> tuple[list[Iterator[Check]], list[str]]:
    """Return every operator's checks on these devices, and the operators that can't be tested, with the reason."""
    import torch

    from onepass.core.about import one_line
    from onepass.core.spec import Spec
    from onepass.ops._shared import specs as operators

    from .selftest import lion_checks, spec_checks

    specs: list[Spec] = []
    problems = []
    for folder in operators.folders():
        try:
            specs += operators.load(folder).SPECS
        except Exception as error:
            problems.append(f"onepass.ops.{folder} does not import: {one_line(error)}")
    checks: list[Iterator[Check]] = []
    for facts in devices:
        dtypes = (torch.float32, torch.bfloat16) if facts.device.type == "cuda" else (torch.float32,)
        for dtype in dtypes:
            checks += [spec_checks(s, facts.device, dtype) for s in specs]
            checks.append(lion_checks(facts.device, dtype))
    return checks, problems


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _coloured(text: str, colour: int) -> str:
    """Colour a text (31 red, 32 green, 33 yellow) on a terminal, unless NO_COLOR is set."""
    return f"\x1b[{colour}m{text}\x1b[0m" if _is_terminal() and not os.environ.get("NO_COLOR") else text


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if something is wrong, else 0."""
    from onepass.core.about import dtype_name, settings
    from onepass.core.about import versions as all_versions
    from onepass.train.commands.errors import printable

    from . import facts, report, selftest

    versions = all_versions()
    devices, problems = facts.devices()
    checks, unloadable = plan(devices)
    problems += facts.problems(versions) + unloadable

    def started(verdict: Verdict) -> None:
        if _is_terminal():
            where = f"{verdict.operator} on {verdict.device} in {dtype_name(verdict.dtype)}"
            # one line, which the next one overwrites
            print(f"\r\x1b[Ktesting {where}", end="", flush=True)

    verdicts = selftest.perform(checks, math.inf if args.full else selftest.SECONDS, started)
    if _is_terminal():
        print("\r\x1b[K", end="")
    problems += [line for v in verdicts for line in report.problem_lines(v)]
    print("paste this into a bug report:")
    print("```")
    for line in report.block(versions, devices, settings(), verdicts, problems, facts.advice(versions)).splitlines():
        wrong, hint = line.startswith("problem: ") or "; WRONG in " in line, line.startswith("advice: ")
        print(_coloured(printable(line), 31 if wrong else 33 if hint else 0))
    print("```")
    if problems:
        print(_coloured(f"{len(problems)} problem{'s' * (len(problems) > 1)} found", 31))
        return 1
    print(_coloured("all is well", 32))
    return 0
