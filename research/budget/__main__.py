"""`research.budget`: train lists of runs, several processes sharing them; tables and pictures of the records."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepass.__main__ import Parser, run_command
from onepass.train.commands.errors import UserError, doing
from onepass.train.commands.options import number
from onepass.train.model import pick_device

TEXT = """\
The best byte model for a budget of seconds: each run trains one model of one family for its seconds on one GPU, with
the whole step in a CUDA graph, and leaves one JSON in DIR.

  dense    global attention in every block        windows  attention within windows in every block
  global   windows, every Nth block global        experts  the same with experts for feed-forwards
  routed   RoutedBlock

Start the same command once a GPU: each process takes the next run that nobody has. A command that was stopped goes on
with the rest, and a run that --limit cut goes on where it was."""
EXAMPLES = """\
examples:
  python -m research.budget text ~/linux text.xz         one file of a folder's text
  python -m research.budget run runs/budget --text text.xz --run "family=dense width=256,512 rate=2e-4,4e-4"
  CUDA_VISIBLE_DEVICES=1 python -m research.budget run runs/budget --text text.xz --list research/budget/round1.txt
  python -m research.budget report runs/budget           budget.md and budget.png of all records in a folder
"""


def command_line() -> Parser:
    """Build the parser."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m research.budget", description=TEXT, epilog=EXAMPLES, formatter_class=form)
    subparsers = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    parser_ = subparsers.add_parser("text", help="write a folder's text as one file")
    parser_.add_argument("folder", type=Path, metavar="DIR")
    parser_.add_argument("out", type=Path, metavar="FILE", help=".xz compresses")
    parser_.set_defaults(run=write_text)
    parser_ = subparsers.add_parser("run", help="train what is missing", description=TEXT, formatter_class=form)
    parser_.add_argument("out", type=Path, metavar="DIR", help="where the records lie")
    runs_help = 'every combination, as "family=global window=128,256 every=4"; may be repeated'
    parser_.add_argument("--run", action="append", default=[], dest="runs", metavar="RUNS", help=runs_help)
    parser_.add_argument("--list", type=Path, metavar="FILE", help="a file with such runs in every line")
    parser_.add_argument("--text", type=Path, required=True, metavar="FILE", help="what `text` wrote")
    limit_help = "take no run after this time; the state of one that is cut stays in DIR"
    parser_.add_argument("--limit", type=number(0.0, 10**8, float), metavar="SECONDS", help=limit_help)
    parser_.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: auto, cuda if there is one")
    parser_.set_defaults(run=train)
    parser_ = subparsers.add_parser("report", help="write budget.md and budget.png of a folder's records")
    parser_.add_argument("out", type=Path, metavar="DIR")
    parser_.set_defaults(run=write_report, extra="train")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(command_line(), argv)


def write_text(args: argparse.Namespace) -> int:
    """Write a folder's text as one file."""
    from onepass.train.progress import say
    from research.budget import text

    say(text.write(args.folder, args.out))
    return 0


def train(args: argparse.Namespace) -> int:
    """Train the runs that nobody has until none is left or the time is up; return 1 if one failed."""
    import torch

    from onepass.train.progress import say
    from research.budget import runs, text

    deadline = time.monotonic() + args.limit if args.limit is not None else math.inf
    requested = [run for line in args.runs for run in runs.parse(line)]
    requested += runs.read_list(args.list) if args.list else []
    if not requested:
        raise UserError('there is no run to train; give some, as in --run "family=dense width=256,512", or --list FILE')
    with doing(f"use {args.out}"):
        args.out.mkdir(parents=True, exist_ok=True)
    read = text.read(args.text, torch.device(pick_device(args.device)))
    failed = False
    for run in dict.fromkeys(requested):
        with runs.claim(args.out, run) as claimed:
            record = _one(args.out, run, read, deadline) if claimed and time.monotonic() < deadline else None
            if record:
                runs.save(args.out, run, record)
                failed |= "bits" not in record
                line = "bits {bits:.4f}  {ms:.2f} ms  {steps:,} steps  {peak_mib:,} MiB  setup {setup:.0f} s"
                say(f"{run.name}  {line.format(**record) if 'bits' in record else record['error']}")
            elif claimed:
                say("the time is up; the same command goes on with the rest")
                break
    return int(failed)


def _one(out: Path, run: Any, read: Any, deadline: float) -> dict[str, Any] | None:
    """Return the record of a run; that of one that fails says why. None if its time was up."""
    import torch

    from research.budget import runs
    from research.budget.train import train as trained

    try:
        return trained(run, read, runs.cut(out, run), deadline)
    except (RuntimeError, ValueError, TypeError) as error:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # what broke the device would fail every run after it: that ends the command
            torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {error!s:.300}", "torch": torch.__version__}
    finally:
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def write_report(args: argparse.Namespace) -> int:
    """Write table and picture beside the records, and show the table."""
    from onepass.train.commands import files
    from onepass.train.progress import say
    from research.budget import report, runs

    records = runs.load(args.out) if args.out.is_dir() else []
    if not any("bits" in record for _, record in records):
        raise UserError(f"there are no records of `research.budget run` in {args.out}")
    table = report.table(records)
    files.write(args.out / "budget.md", table)
    files.write(args.out / "budget.png", report.png(records))
    for line in table.splitlines():
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
