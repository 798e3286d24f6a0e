"""Which cases are measured, on which device, and how long."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onepass.train.commands.errors import UserError
from onepass.train.commands.options import number
from onepass.train.progress import say

if TYPE_CHECKING:
    from benchmarks.case import Case

    from .timers import Timer

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
QUICK_MS, MEASURE_MS = 15.0, 60.0
LIMIT_S = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select cases and set how they are measured."""
    parser.add_argument("ops", nargs="*", metavar="op", help="operators or operator folders (default: all)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the records; a directory gets a file per folder"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--stage", metavar="PASS", help="only this pass, such as backward")
    parser.add_argument(
        "--case", action="append", metavar="TEXT", help="only cases whose name contains TEXT (see --list); repeatable"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="only this dtype, such as bf16 or float32")
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


def _one_of(option: str, given: str | None, accepted: Iterable[str]) -> None:
    if given is not None and given not in accepted:
        raise UserError(f"{option} {given!r}: accepted are {', '.join(accepted)}")


def select(cases: Sequence[tuple[str, Case]], args: argparse.Namespace) -> list[tuple[str, Case]]:
    """Return the cases that the arguments select; raise UserError if an argument is unknown or no case matches."""
    from onepass.core.about import dtype_name

    from .runner import STAGES, label

    _one_of("--stage", args.stage, STAGES)
    _one_of("--dtype", args.dtype, (*DTYPES, *DTYPES.values()))
    _one_of("--device", args.device, ("cuda", "cpu"))
    accepted = sorted({f for f, _ in cases} | {c.op for _, c in cases})
    for op in args.ops:
        if op not in accepted:
            raise UserError(f"unknown operator {op!r}: accepted are {', '.join(accepted)}")
    dtype = DTYPES.get(args.dtype, args.dtype)
    selected = [
        (f, c)
        for f, c in cases
        if (not args.ops or f in args.ops or c.op in args.ops)
        and args.stage in (None, c.stage)
        and dtype in (None, dtype_name(c.dtype))
        and (not args.case or any(text in label(c.params) for text in args.case))
        and args.device in (None, c.device)
    ]
    if not selected:
        raise UserError("no case matches; --list shows what there is")
    return selected


def _list(cases: Sequence[tuple[str, Case]]) -> None:
    from onepass.core.about import dtype_name

    from .runner import label

    for folder, case in cases:
        line = f"{folder}  {case.op}  {case.stage}  {dtype_name(case.dtype)}  {label(case.params)}"
        say(line + ("" if case.device == "cuda" else f"  ({case.device})"))


def here(cases: Sequence[tuple[str, Case]], wanted: str | None) -> tuple[str, list[tuple[str, Case]]]:
    """Return (device, its cases); raise UserError if this machine lacks the device or no case is for it."""
    import torch

    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UserError("--device cuda: torch sees no CUDA GPU here; `onepass doctor` says more")
    device = wanted or ("cuda" if has_gpu else "cpu")
    selected = [(f, c) for f, c in cases if c.device == device]
    if not selected and device == "cpu":
        raise UserError("these cases need a CUDA GPU and torch sees none here; `onepass doctor` says more")
    if not selected:
        raise UserError("these cases are for the CPU: add --device cpu")
    return device, selected


def timer(device: str, quick: bool) -> Timer:
    """Return the timer of a device."""
    from .timers import CpuTimer, CudaTimer

    kind = CudaTimer if device == "cuda" else CpuTimer
    return kind(measure_ms=QUICK_MS if quick else MEASURE_MS)


def measure(cases: Sequence[tuple[str, Case]], args: argparse.Namespace, rivals: Mapping[str, str]) -> int:
    """List the cases or measure them; return 1 if an implementation of onepass failed, else 0."""
    if args.list:
        _list(cases)
        return 0
    device, cases = here(cases, args.device)

    from .session import Session

    options = {"compile": not args.no_compile, "limit_s": args.limit}
    session = Session(cases, device, rivals, args.json, **options)
    return session.run(timer(device, args.quick))
