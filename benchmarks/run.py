"""Measure operators and modules as `onepass bench` does, in parts on several GPUs; make tables and plots of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from onepass.__main__ import Parser, run_command
from onepass.bench import cli
from onepass.bench.rivals import known
from onepass.core.errors import UserError
from onepass.core.options import number
from onepass.core.spec import Case

_EPILOG = """\
examples:
  python -m benchmarks.run fused                                     kernels of routed layers, and the modules
  python -m benchmarks.run --json benchmarks/results/h200/           one file per operator folder
  python -m benchmarks.run --report benchmarks/results/h200          tables and plots from what is there
  python -m benchmarks.run --performance docs/performance.md         every bar, from all committed results
  python -m benchmarks.run norm --warm 12                            compile in 12 processes, then measure in one
  python -m benchmarks.run norm --part 1/2 --json a.json             half of it; the other half on another GPU
  python -m benchmarks.run --merge benchmarks/results/h200/norm.json a.json b.json
"""


def command_line() -> Parser:
    """Build the parser: the options of `onepass bench` and those for runs in parts and for reports."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m benchmarks.run", description=__doc__, epilog=_EPILOG, formatter_class=form)
    cli.add_options(parser)
    parser.add_argument("--part", metavar="I/N", help="only every N-th case, from the I-th on (1/N to N/N)")
    parser.add_argument(
        "--warm", type=number(0, 1024), default=0, metavar="N", help="first compile everything, in N processes"
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile (with --warm: in N processes) and measure nothing"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="write the first FILE from the others, parts of one run"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="build tables and plots from the JSON files in DIR")
    parser.add_argument(
        "--performance", type=Path, metavar="FILE", help="write the page of all bars from the committed results to FILE"
    )
    parser.set_defaults(run=run, extra="bench")
    return parser


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, slash, every = text.partition("/")
    if not (slash and first.isdigit() and every.isdigit() and 1 <= int(first) <= int(every)):
        raise UserError(f"--part {text!r}: I/N with 1 ≤ I ≤ N is accepted, such as 2/4")
    return int(first), int(every)


def _selection(args: argparse.Namespace) -> list[str]:
    """The arguments that another process needs for the same cases, but for --part."""
    given = [*args.ops, "--limit", str(args.limit)]
    for option in ("stage", "dtype", "device"):
        given += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    for text in args.case or ():
        given += ["--case", text]
    return given


def _rivals(cases: Sequence[tuple[str, Case]]) -> dict[str, str]:
    from . import modules

    declared = {id(case) for folder in modules.CASES.values() for case in folder}
    of_modules = modules.RIVALS if any(id(case) in declared for _, case in cases) else {}
    return dict(sorted({**known(dict.fromkeys(f for f, _ in cases)), **of_modules}.items()))


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when one of our own implementations failed."""
    console = cli.console()
    if args.report is not None:
        from .report import build

        for path in build(args.report):
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
        return 0
    if args.performance is not None:
        from . import programs
        from .performance import RESULTS, write

        write(args.performance)
        programs.picture(RESULTS / "h200" / "raw", args.performance.parent / programs.PICTURE)
        console.print(f"wrote {args.performance}", markup=False, soft_wrap=True)
        return 0
    if args.merge is not None:
        from .merge import merge

        merge(args.merge[0], args.merge[1:])
        console.print(f"wrote {args.merge[0]}", markup=False, soft_wrap=True)
        return 0

    from .modules import all_cases
    from .warm import compile_only, warm

    first, every = _part(args.part)
    cases = cli.select(all_cases(), args)
    device = ""
    if not args.list:
        device, cases = cli.here(cases, args.device)
    cases = cases[first - 1 :: every]
    if not cases:
        raise UserError(f"--part {args.part}: there are fewer cases than parts")
    if args.warm and not args.list:
        console.print(f"compiling in {args.warm} processes", style="dim", markup=False)
        spent = warm(_selection(args), (first, every), args.warm)
        console.print(f"compiled in {spent:.0f} s", style="dim", markup=False)
    elif args.compile_only and not args.list:
        compile_only(cases, cli.timer(device, args.quick), limit_s=args.limit)
    if args.compile_only and not args.list:
        return 0
    return cli.measure(cases, args, _rivals(cases), console)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(command_line(), argv)


if __name__ == "__main__":
    sys.exit(main())
