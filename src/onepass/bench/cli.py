"""`onepass bench`: measure operators on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.core.errors import UserError, printable
from onepass.core.options import number

if TYPE_CHECKING:
    from rich.console import Console

    from onepass.core.spec import Case

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
QUICK_MS, MEASURE_MS = 15.0, 60.0
LIMIT_S = 20.0

_EPILOG = """\
examples:
  onepass bench weighted_sum --dtype bf16 --no-compile
  onepass bench norm --case 4096 --stage backward
  onepass bench --json benchmarks/results/h200/     (one file per operator folder)
  onepass bench --report benchmarks/results/h200    (tables and plots from what is there)
  onepass bench norm --warm 12                      (compile in 12 processes first, then measure in one)
  onepass bench norm --part 1/2 --json a.json       (half of it, here; the other half on another GPU of this host)
  onepass bench --merge benchmarks/results/h200/norm.json a.json b.json

% of copy is the operator's byte floor over its time, against a device copy measured in the same run.
A median of calls with cold caches; host µs is the wall time of enqueueing one call.
"""


def add_command(subparsers: Any) -> None:
    """Add `onepass bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="measure operators against a device copy and installed rivals",
        description="Measure operators against a device copy and the rivals that are installed, in one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ops", nargs="*", metavar="op", help="operators or operator folders (default: all)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the records; a directory gets a file per folder"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--stage", metavar="PASS", help="only this pass: forward, backward, forward+backward or step")
    parser.add_argument(
        "--case", action="append", metavar="TEXT", help="only cases whose name contains TEXT (see --list); repeatable"
    )
    parser.add_argument("--part", metavar="I/N", help="only every N-th case, from the I-th on (1/N to N/N)")
    parser.add_argument("--dtype", metavar="DTYPE", help="only this dtype: fp32, fp16, bf16 or fp64")
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--quick", action="store_true", help="shorter measurements, rougher medians")
    parser.add_argument("--no-compile", action="store_true", help="leave out rivals that torch.compile builds")
    parser.add_argument(
        "--limit",
        type=number(0, 86_400, float),
        default=LIMIT_S,
        metavar="S",
        help=f"give up on a rival not ready in S s (default: {LIMIT_S:g}; 0: never)",
    )
    parser.add_argument(
        "--warm", type=number(0, 1024), default=0, metavar="N", help="first compile everything, in N processes"
    )
    parser.add_argument("--compile-only", action="store_true", help="call everything once and measure nothing")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="write the first FILE from the others, parts of one run"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="build tables and plots from the JSON files in DIR")
    parser.set_defaults(run=run, extra="bench")


def _one_of(option: str, given: str | None, accepted: Iterable[str]) -> None:
    if given is not None and given not in accepted:
        raise UserError(f"{option} {given!r}: accepted are {', '.join(accepted)}")


def select(cases: Sequence[tuple[str, Case]], args: argparse.Namespace) -> list[tuple[str, Case]]:
    """Cases that the arguments ask for; UserError when there is no such operator or nothing is left."""
    from onepass.core.about import dtype_name

    from .runner import STAGES, label

    _one_of("--stage", args.stage, STAGES)
    _one_of("--dtype", args.dtype, (*DTYPES, *DTYPES.values()))
    _one_of("--device", args.device, ("cuda", "cpu"))
    first, every = _part(args.part)
    accepted = sorted({f for f, _ in cases} | {c.op for _, c in cases})
    for op in args.ops:
        if op not in accepted:
            raise UserError(f"unknown operator {op!r}: accepted are {', '.join(accepted)}")
    dtype = DTYPES.get(args.dtype, args.dtype)
    found = [
        (f, c)
        for f, c in cases
        if (not args.ops or f in args.ops or c.op in args.ops)
        and args.stage in (None, c.stage)
        and dtype in (None, dtype_name(c.dtype))
        and (not args.case or any(text in label(c.params) for text in args.case))
        and args.device in (None, c.device)
    ]
    if not found[first - 1 :: every]:
        raise UserError("no case matches; `onepass bench --list` shows what there is")
    return found[first - 1 :: every]


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    first, slash, every = text.partition("/")
    if not (slash and first.isdigit() and every.isdigit() and 1 <= int(first) <= int(every)):
        raise UserError(f"--part {text!r}: I/N with 1 ≤ I ≤ N is accepted, such as 2/4")
    return int(first), int(every)


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def _list(cases: Sequence[tuple[str, Case]], console: Console) -> None:
    from onepass.core.about import dtype_name

    from .runner import label

    for folder, case in cases:
        line = f"{folder}  {case.op}  {case.stage}  {dtype_name(case.dtype)}  {label(case.params)}"
        console.print(line + ("" if case.device == "cuda" else f"  ({case.device})"), markup=False, soft_wrap=True)


def _here(cases: list[tuple[str, Case]], device: str | None) -> tuple[str, list[tuple[str, Case]]]:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU here; `onepass doctor` says more")
    here = [(f, c) for f, c in cases if c.device == device]
    if not here and device == "cpu":
        raise UserError("these cases need a CUDA GPU and torch sees none here; `onepass doctor` says more")
    if not here:
        raise UserError("these cases are for the CPU: add --device cpu")
    return device, here


def _selection(args: argparse.Namespace) -> list[str]:
    """The arguments that another process needs for the same cases, but for --part."""
    given = [*args.ops, "--limit", str(args.limit)]
    for option in ("stage", "dtype", "device"):
        given += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    for text in args.case or ():
        given += ["--case", text]
    return given


def run(args: argparse.Namespace) -> int:
    """Run the command; 1 when one of our own implementations failed."""
    console = _console()
    if args.report is not None:
        from .report import build

        for path in build(args.report):
            console.print(printable(f"wrote {path}"), markup=False, soft_wrap=True)
        return 0
    if args.merge is not None:
        from .merge import merge

        merge(args.merge[0], args.merge[1:])
        console.print(printable(f"wrote {args.merge[0]}"), markup=False, soft_wrap=True)
        return 0

    from .cases import all_cases

    cases = select(all_cases(), args)
    if args.list:
        _list(cases, console)
        return 0
    device, cases = _here(cases, args.device)

    from .runner import compile_only
    from .session import Session
    from .timers import CpuTimer, CudaTimer
    from .warm import warm

    kind = CudaTimer if device == "cuda" else CpuTimer
    timer = kind(measure_ms=QUICK_MS if args.quick else MEASURE_MS)
    if args.compile_only:
        compile_only(cases, timer, limit_s=args.limit)
        return 0
    if args.warm:
        console.print(f"compiling in {args.warm} processes", style="dim", markup=False)
        spent = warm(_selection(args), _part(args.part), args.warm)
        console.print(f"compiled in {spent:.0f} s", style="dim", markup=False)
    return Session(cases, device, console, args.json, compile=not args.no_compile, limit_s=args.limit).run(timer)
