"""Measure operators and modules against a device copy and the installed rivals, in one run or in parts on several GPUs.

% of copy is the byte floor over the time, against a copy on the same device in the same run. µs is the median of calls
with cold caches. host µs is the wall time of enqueueing one call on a GPU; on a CPU, warm µs is the median with warm
caches, and memory is not measured. A CPU has smaller cases of its own: --list shows them with (cpu).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from onepass.__main__ import Parser, run_command
from onepass.train.commands.errors import UserError
from onepass.train.commands.options import number
from onepass.train.progress import say

from . import cases as declared
from .bench import select

_EPILOG = """\
examples:
  python -m benchmarks weighted_sum --dtype bf16 --no-compile
  python -m benchmarks norm --case 4096 --stage backward
  python -m benchmarks --json benchmarks/results/h200/               one file per operator folder
  python -m benchmarks --report benchmarks/results/h200              tables from what is there
  python -m benchmarks norm --warm 12                                compile in 12 processes, then measure in one
  python -m benchmarks norm --part 1/2 --json a.json             every other case
"""


def command_line() -> Parser:
    """Build the parser: what to measure and how, runs in parts, reports."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m benchmarks", description=__doc__, epilog=_EPILOG, formatter_class=form)
    select.add_options(parser)
    parser.add_argument("--part", metavar="I/N", help="only every N-th case, from the I-th on (1/N to N/N)")
    parser.add_argument(
        "--warm", type=number(0, 1024), default=0, metavar="N", help="first compile everything, in N processes"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile (with --warm: in N processes) and measure nothing"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="build tables from the JSON files in DIR")
    parser.set_defaults(run=run, extra="train")
    return parser


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, slash, every = text.partition("/")
    if not (slash and first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise UserError(f"--part {text!r}: I/N with 1 ≤ I ≤ N is accepted, such as 2/4")
    return int(first), int(every)


def _selection(args: argparse.Namespace) -> list[str]:
    """The arguments that another process needs for the same cases, but for --part."""
    arguments = [*args.ops, "--limit", str(args.limit)]
    for option in ("stage", "dtype", "device"):
        arguments += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    for text in args.case or ():
        arguments += ["--case", text]
    return arguments


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when one of our own implementations failed."""
    if args.report is not None:
        from .report import build

        for path in build(args.report):
            say(f"wrote {path}")
        return 0

    from .warm import compile_only, warm

    first, every = _part(args.part)
    cases = select.select(declared.all_cases(), args)
    device = ""
    if not args.list:
        device, cases = select.here(cases, args.device)
    cases = cases[first - 1 :: every]
    if not cases:
        raise UserError(f"--part {args.part}: there are fewer cases than parts")
    if args.warm and not args.list:
        say(f"compiling in {args.warm} processes")
        spent = warm(_selection(args), (first, every), args.warm)
        say(f"compiled in {spent:.0f} s")
    elif args.compile_only and not args.list:
        compile_only(cases, select.timer(device, args.quick), limit_s=args.limit)
    if args.compile_only and not args.list:
        return 0
    if not args.list and (load := os.getloadavg()[0]) > 0.5:
        say(f"load average {load:.1f}: beside other processes times of this run will be too long")
    return select.measure(cases, args, declared.rivals({folder for folder, _ in cases}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(command_line(), argv)


if __name__ == "__main__":
    sys.exit(main())
