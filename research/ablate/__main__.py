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
SEEDS = 5
# of the text's model
MODEL = {
    "n": ("tokens in view", number(64, 2**20)), "dim": ("width of a token", number(8, 2**14)),
    "blocks": ("number of blocks", number(1, 256)), "heads": ("heads of attention", number(1, 256)),
    "batch": ("sequences a step", number(1, 4096)),
    "window": ("tokens of a window of the routed arms' local attention", number(1, 2**14)),
    "share": ("part of the tokens that get the heavy branch, 0 < X ≤ 1", number(1e-6, 1.0, float)),
    "light": ("hidden units of the light feed-forward, as a multiple of dim", number(1e-3, 64.0, float)),
}  # fmt: skip


def command_line() -> Parser:
    """Build the parser of the tasks and of the report."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m research.ablate", description=TEXT, epilog=EXAMPLES, formatter_class=form)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for task, what in TASKS.items():
        one = kinds.add_parser(task, help=what, description=TEXT, formatter_class=form)
        add = one.add_argument
        if task == "text":
            add("--task", choices=("masked", "causal"), default="masked", help="what to guess (default: masked)")
            files = "text files or a directory of them, instead of Python's sources; may be repeated"
            add("--data", action="append", metavar="DIR", help=files)
            for name, (what, kind) in MODEL.items():
                add(f"--{name}", type=kind, metavar="X", help=f"{what} (default: by the size)")
        else:
            where = "where learned routers begin: anywhere, or pointing away from the planted tokens"
            add("--start", choices=("random", "adverse"), default="random", help=where)
        add("--arm", action="append", choices=ARMS[task], help="one arm; may be repeated (default: every arm)")
        seeds = f"may be repeated (default: 0 to {SEEDS - 1})"
        add("--seed", action="append", type=number(0, 2**31), metavar="N", help=seeds)
        sizes = "small: for a CPU; full: for a GPU (default: by the device)"
        add("--size", choices=("small", "full"), help=sizes)
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
            self.name = f"text-{args.task}"
            self.options["causal"] = args.task == "causal"
            changes["paths"] = tuple(args.data or ())
            names = {"share": "k", "light": "light_mult"}
            given = {names.get(name, name): getattr(args, name) for name in MODEL}
            changes.update({name: value for name, value in given.items() if value is not None})
        self.size = dataclasses.replace(size, **changes)
        if args.kind == "text":
            _check_model(self.size)

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


def _check_model(size: Any) -> None:
    """Raise UserError for a text's model that no block is made of, or that leaves a part of it without work."""
    if size.dim % size.heads or size.dim // size.heads % 2:
        raise UserError(f"--heads {size.heads}: {size.dim} channels do not part into that many heads of even width")
    if size.window >= size.n:
        raise UserError(f"--window {size.window}: must be smaller than the {size.n:,} tokens in view (--n)")
    if size.k * size.n < 1:
        raise UserError(f"--share {size.k:g}: is less than one of the {size.n:,} tokens in view (--n)")
    if size.light_mult * size.dim < 1:
        raise UserError(f"--light {size.light_mult:g}: is less than one hidden unit at {size.dim} channels (--dim)")


def write_report(args: argparse.Namespace) -> int:
    """Write tables and curves of a directory's records, and show the tables."""
    from onepass.train.commands import files
    from onepass.train.progress import say
    from research.ablate import curves, tables

    records = tables.load(args.out)
    if not records:
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
