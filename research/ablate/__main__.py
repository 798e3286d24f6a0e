"""`research.ablate`: train every arm with every seed, then put tables and curves beside the records."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.__main__ import Parser, run_command
from onepass.train.cli import pick_device
from onepass.train.commands.errors import UserError
from onepass.train.commands.options import number
from research.ablate.equal import command

if TYPE_CHECKING:
    import torch

TEXT = """\
Compare who chooses the tokens of the heavy branch, at equal steps, data and initial weights:

  learned  a router                     random  chance, at the same compute
  oracle   the planted tokens (planted) light   nobody: no heavy branch
  all      every token gets the heavy branch too (text): what there is to gain, at any price
  dense    every token sees one branch, of the width that makes a step take as long as the learned arm's

Each arm with each seed leaves one JSON in DIR when it is done. What is there already is not trained again, so a
stopped command goes on where it was, and several may share the work and the directory."""
EXAMPLES = """\
examples:
  python -m research.ablate planted --size small     about two minutes on a CPU; leaves runs/ablate
  python -m research.ablate planted --start adverse  routers begin pointing away from what they have to find
  python -m research.ablate text --task causal --arm learned --arm random --seed 0 --seed 1
  python -m research.ablate text --equal-time        routed against dense with the same seconds; leaves runs/ablate
  python -m research.ablate text --envelope --out runs/envelope    the best width of each for 60, 200 and 600 seconds
  python -m research.ablate report runs/ablate       tables and curves of all records in a directory
"""
TASKS = {
    "planted": "long sequences of filler in which a few tokens, to be told by their content, carry a computation",
    "text": "hidden bytes, or each next byte, of Python's own sources (full size: and of torch's)",
}
REPORT = "tables and curves of the records in a directory"
ARMS = {
    "planted": ("learned", "random", "oracle", "light", "dense"),
    "text": ("learned", "random", "light", "dense", "all"),
}
MORE = ("hybrid",)  # arms of --envelope alone
SEEDS = 5


def command_line() -> Parser:
    """Build the parser of the tasks and of the report."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m research.ablate", description=TEXT, epilog=EXAMPLES, formatter_class=form)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for task, what in TASKS.items():
        one = kinds.add_parser(task, help=what, description=TEXT, formatter_class=form)
        add = one.add_argument
        if task == "text":
            what = "what to guess (default: masked; with --equal-time both)"
            add("--task", choices=("masked", "causal"), help=what)
            files = "text files or a directory of them, instead of Python's sources; may be repeated"
            add("--data", action="append", metavar="DIR", help=files)
            command.add_options(one)
        else:
            where = "where learned routers begin: anywhere, or pointing away from the planted tokens"
            add("--start", choices=("random", "adverse"), default="random", help=where)
        names = (*ARMS[task], *(MORE if task == "text" else ()))
        add("--arm", action="append", choices=names, help="one arm; may be repeated (default: every arm)")
        seeds = f"may be repeated (default: 0 to {SEEDS - 1})"
        add("--seed", action="append", type=number(0, 2**31), metavar="N", help=seeds)
        sizes = "small: for a CPU; full: for a GPU (default: by the device)"
        large = "; 100m: 100 million parameters, with --equal-time" if task == "text" else ""
        add("--size", choices=("small", "full", *["100m"] * bool(large)), help=sizes + large)
        add("--steps", type=number(1, 10**8), metavar="N", help="training steps (default: by the size)")
        add("--seconds", type=number(1, 10**8, float), metavar="X", help="stop after this time, keeping what there is")
        add("--device", choices=("auto", "cpu", "cuda"), help="where to train (default: auto, cuda if there is one)")
        add("--out", type=Path, default=Path("runs/ablate"), metavar="DIR", help="default: runs/ablate")
        add("--calibrate", action="store_true", help="only find the dense arm's width; do so before sharing a GPU")
        one.set_defaults(run=run, extra="train")
    report = kinds.add_parser("report", help=REPORT, description=f"Write {REPORT}: report.md and a picture a task.")
    report.add_argument("out", type=Path, metavar="DIR")
    report.set_defaults(run=write_report, extra="train")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(command_line(), argv)


def run(args: argparse.Namespace) -> int:
    """Train what is missing, then write the report."""
    import torch

    from onepass.train.progress import say

    if args.kind == "text":
        command.check(args)
        if args.envelope:
            from research.ablate.equal import envelope

            return envelope.run(args)
        if args.equal_time:
            return command.run(args)
    deadline = time.monotonic() + args.seconds if args.seconds else math.inf
    module: Any = importlib.import_module(f"research.ablate.{args.kind}")
    device = torch.device(pick_device(args.device))
    trials = Trials(args, module, device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't use {args.out}: {(error.strerror or str(error)).lower()}") from None
    if args.calibrate:
        say(f"dense  hidden width {trials.hidden()['hidden']:,}")
        return 0
    # all arms of a seed before the next seed: what there is at any moment is paired
    for seed in dict.fromkeys(args.seed or range(SEEDS)):
        for arm in dict.fromkeys(args.arm or ARMS[args.kind]):
            if time.monotonic() < deadline:
                trials.one(arm, int(seed), deadline)
    return 0 if args.arm else write_report(args)


class Trials:
    """The records of one task in one directory."""

    def __init__(self, args: argparse.Namespace, module: Any, device: torch.device) -> None:
        import dataclasses

        self.module, self.kind, self.device, self.out = module, args.kind, device, args.out
        base = args.size or ("full" if device.type == "cuda" else "small")
        size = module.SIZES[base]
        changes: dict[str, Any] = {"steps": args.steps} if args.steps else {}
        self.options: dict[str, Any] = {}
        if args.kind == "planted":
            self.name = "planted" + (f"-{args.start}" if args.start != "random" else "")
            changes["start"] = args.start
        else:
            self.name = f"text-{args.task or 'masked'}"
            self.options["causal"] = args.task == "causal"
            changes["paths"] = tuple(args.data or ())
            if any(getattr(args, name) for name in command.MODEL):
                (size,) = command.sizes(args, base, (size.n,))
        self.size = dataclasses.replace(size, **changes)

    def task(self, arm: str, seed: int, hidden: int = 0) -> Any:
        """Build one arm with one seed."""
        return self.module.Task(arm, seed, self.size, self.device, hidden, **self.options)

    def one(self, arm: str, seed: int, deadline: float) -> None:
        """Train one arm with one seed, unless its record is there."""
        from research.ablate import runner
        from research.ablate.display import Display

        path = self.out / f"{self.name}.{arm}.{seed}.json"
        if path.exists():
            return
        dense = self.hidden() if arm == "dense" else {"hidden": 0}
        task = self.task(arm, seed, int(dense["hidden"]))
        with Display(f"{self.name} {arm} {seed}", self.size.steps) as display:
            result = runner.train(
                task, self.size.steps, self.size.rates(), deadline=deadline, say=display.update
            )  # fmt: skip
        record = {
            "task": self.name,
            "arm": arm,
            "seed": seed,
            **runner.about(self.device),
            "size": task.describe(),
            **result,
        }
        runner.save(path, {**record, **({"dense": dense} if arm == "dense" else {})})

    def hidden(self) -> dict[str, Any]:
        """Find the dense arm's hidden width, or read what an earlier command found."""
        import json

        from research.ablate import runner

        path = self.out / f"{self.name}.width.json"
        if path.exists():
            return dict(json.loads(path.read_text()))
        learned = runner.Timed(self.task("learned", 0))

        def fits(units: int) -> bool:
            wanted, took = runner.race([learned, runner.Timed(self.task("dense", 0, units * 16))])
            return took <= wanted

        # the widest that is not slower: double, then halve the distance
        low, high = 0, 1
        while high <= 64 * self.size.dim // 16 and fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 8):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        hidden = 16 * max(1, low)
        # the records' own times may be of runs that shared the device
        arms = {arm: self.task(arm, 0, hidden) for arm in ARMS[self.kind]}
        ms = runner.race([runner.Timed(task) for task in arms.values()])
        found = {"hidden": hidden, "slower": low == 0, "ms": dict(zip(arms, ms, strict=True))}
        runner.save(path, found)
        return found


def write_report(args: argparse.Namespace) -> int:
    """Write tables and curves of a directory's records, and show the tables."""
    from onepass.train.commands import files
    from onepass.train.progress import say
    from research.ablate import curves, tables
    from research.ablate.equal import report

    records, found = tables.load(args.out), report.here(args.out)
    if found:
        report.write(args.out)
    if not records:
        if found:
            return 0
        raise UserError(f"there are no records of `research.ablate` in {args.out}")
    table = tables.markdown(records)
    files.write(args.out / "report.md", table)
    for task in sorted({record["task"] for record in records}):
        files.write(args.out / f"{task}.png", curves.png([one for one in records if one["task"] == task]))
    for line in table.splitlines():
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
