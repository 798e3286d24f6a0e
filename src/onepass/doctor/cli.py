"""`onepass doctor`: is this installation healthy, and what to paste into a bug report."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .facts import Device
    from .selftest import Check, Verdict


def add_command(subparsers: Any) -> None:
    """Add `onepass doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, and a self-test of every operator",
        description=(
            "Show versions and devices, which path every operator takes here and why, and test every operator against "
            "its float64 definition. Exit code 0 when all is well, 1 when something is wrong."
        ),
    )
    parser.add_argument("--full", action="store_true", help="run every sample, however long that takes")
    parser.set_defaults(run=run)


def plan(devices: Sequence[Device]) -> tuple[list[Iterator[Check]], list[str]]:
    """Every operator's checks on these devices, and what kept an operator from being tested at all."""
    import importlib.util

    import torch

    from onepass.core import spec
    from onepass.core.about import one_line

    from .selftest import lion_checks, spec_checks

    specs: list[spec.Spec] = []
    problems = []
    for folder in spec.folders():
        try:
            specs += getattr(spec.load(folder), "SPECS", ())
        except Exception as error:
            problems.append(f"onepass.ops.{folder} does not import: {one_line(error)}")
    checks: list[Iterator[Check]] = []
    for found in devices:
        dtypes = (torch.float32, torch.bfloat16) if found.device.type == "cuda" else (torch.float32,)
        for dtype in dtypes:
            checks += [spec_checks(s, found.device, dtype) for s in specs]
            if importlib.util.find_spec("onepass.ops.lion") is not None:
                checks.append(lion_checks(found.device, dtype))
    return checks, problems


def _show(console: Console, versions: dict[str, str | None], devices: Sequence[Device]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, version in versions.items():
        shown.add_row(name, escape(version) if version else "[dim]none[/]")
    for found in devices:
        shown.add_row(str(found.device), f"{escape(found.name)} [dim]{escape(found.details)}[/]")
    console.print(shown)


def _show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from onepass.core.about import dtype_name

    from .report import outcome, taken_path

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("operator", "on", "path", "why", "self-test"):
        shown.add_column(column)
    for verdict in verdicts:
        taken, why = taken_path(verdict)
        style = "red" if verdict.problems else "green" if verdict.ran else "dim"
        shown.add_row(
            verdict.operator,
            f"{verdict.device} {dtype_name(verdict.dtype)}",
            taken,
            f"[dim]{escape(why)}[/]",
            f"[{style}]{outcome(verdict)}[/]",
        )
    console.print(shown)


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when something is wrong."""
    from rich.console import Console
    from rich.markup import escape

    from onepass.core.about import dtype_name, settings
    from onepass.core.about import versions as all_versions
    from onepass.core.errors import printable

    from . import facts, report, selftest

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    versions = all_versions()
    devices, problems = facts.devices()
    _show(console, versions, devices)

    checks, unloadable = plan(devices)
    problems += facts.problems(versions) + unloadable
    with console.status("testing") as status:

        def started(verdict: Verdict) -> None:
            where = f"{verdict.operator} on {verdict.device} in {dtype_name(verdict.dtype)}"
            status.update(f"testing {escape(where)}")

        seconds = math.inf if args.full else selftest.SECONDS
        verdicts = selftest.perform(checks, seconds, started=started)
    _show_verdicts(console, verdicts)
    problems += [line for v in verdicts for line in report.told(v)]
    advice = facts.advice(versions)

    for problem in problems:
        console.print(printable(f"✗ {problem}"), style="red", markup=False, soft_wrap=True)
    for hint in advice:
        console.print(printable(f"! {hint}"), style="yellow", markup=False, soft_wrap=True)
    console.print("paste this into a bug report:", style="bold")
    # plain print: no colour and no wrapping, so that it survives copying
    print("```")
    for line in report.block(versions, devices, settings(), verdicts, problems, advice).splitlines():
        print(printable(line))
    print("```")
    if problems:
        console.print(f"{len(problems)} problem{'s' * (len(problems) > 1)} found", style="bold red")
        return 1
    console.print("all is well", style="bold green")
    return 0
