"""The runs: the routed arm trains, then the dense one for as long; rates are tried for a third of that time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onepass.train.commands.errors import UserError
from research.ablate import resume, runner, text
from research.ablate.display import Display
from research.ablate.equal.arms import Task
from research.ablate.equal.records import ARMS, Record, Store, group, named, tuned

POINTS = 12  # measurements before the last step
SHARE = 3  # a rate is tried for one over this of a run's steps
TUNE_SEED = 1000  # no seed that is compared
MARGIN = 10.0  # seconds beside training that a run may need: measurements, compilers
CUT = 15.0  # seconds that the last measurement and the file of a run that is cut off may take
CURVE, FINAL = 2**18, 2**20  # bytes of validation text at each point, and in the end


class Ask(NamedTuple):
    """How long the routed arm trains: steps, or if they are 0 so many seconds; `device` and `data` of all runs."""

    steps: int
    seconds: float
    device: str
    data: str

    def third(self) -> Ask:
        """Return what a tried rate gets."""
        return self._replace(steps=math.ceil(self.steps / SHARE), seconds=self.seconds / SHARE)

    def told(self) -> Record:
        """Return it as a part of a record."""
        return {
            "asked_steps": self.steps, "asked_seconds": self.seconds, "device": self.device, "data": self.data,
        }  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One row of the table: a task at a length, with a setting of the routed arm."""

    task: str  # "causal" or "masked"
    size: text.Size
    ask: Ask

    def record(self, kind: str, arm: str, seed: int, lr: float) -> Record:
        """Return the head of a run's record."""
        size = self.size
        shape = {"n": size.n, "dim": size.dim, "blocks": size.blocks, "heads": size.heads, "batch": size.batch}
        setting = {"window": size.window, "k": size.k, "light_mult": size.light_mult}
        return {"kind": kind, "task": self.task, **shape, **setting, "arm": arm, "seed": seed, "lr": lr}


class OutOfTimeError(Exception):
    """The next run would not end before the deadline."""


@dataclass
class Trials:
    """Trains what is missing in a store, until the deadline (of `time.monotonic`)."""

    store: Store
    device: torch.device
    compiled: bool
    attention: str = ""
    deadline: float = math.inf
    # a run may be cut off by the deadline: its state goes to a file, and it goes on from there; and it is trained once
    # more where a better rate has been found since
    resumes: bool = False

    def tune(self, cell: Cell, arms: Sequence[str], rates: Sequence[float]) -> None:
        """Try rates, the routed arm's first, whose time is the dense arm's."""
        torch.compiler.reset()
        short = replace(cell, ask=cell.ask.third())
        for arm in sorted(arms, key=ARMS.index):
            for lr in rates:
                routed = [run for run in self.store.all if run["kind"] == "tune" and self._paired(run, short)]
                self.one(short, "tune", arm, TUNE_SEED, lr, self._given(arm, routed, short))

    def compare(self, cell: Cell, arms: Sequence[str], seeds: Sequence[int]) -> None:
        """Train the pairs of one cell."""
        # programs for the shapes of the cell before are used no more, and torch keeps a few only
        torch.compiler.reset()
        for seed in seeds:
            for arm in sorted(arms, key=ARMS.index):
                routed = [run for run in self.store.all if run["kind"] == "run" and self._paired(run, cell)]
                given = self._given(arm, [run for run in routed if run["seed"] == seed], cell)
                lr, tried = tuned(self.store.all, cell.record("run", arm, seed, 0.0)) or (cell.size.lr, {})
                self.one(cell, "run", arm, seed, lr, given, tried)

    @staticmethod
    def _paired(run: Record, cell: Cell) -> bool:
        return run["arm"] == "learned" and group(run) == group(cell.record("", "", 0, 0.0))

    def _given(self, arm: str, routed: Sequence[Record], cell: Cell) -> float:
        """Return the seconds that the routed runs took, which are the dense arm's; 0 for the routed arm."""
        if arm != "dense":
            return 0.0
        if not routed:
            raise UserError(f"--arm dense: no routed run of {named(cell.record('', '', 0, 0.0))}, to take the time of")
        for run in routed:
            self._refuse_other(run, cell)
        return sum(float(run["seconds"]) for run in routed) / len(routed)

    def one(
        self, cell: Cell, kind: str, arm: str, seed: int, lr: float, given: float, tried: Record | None = None
    ) -> None:
        """Train one arm with one seed, unless its record is there; `given` seconds, or what the cell asks for."""
        head = cell.record(kind, arm, seed, lr)
        if (there := self.store.find(head)) is not None:
            self._refuse_other(there, cell)
            if there["lr"] == lr or not self.resumes:
                return
        if time.monotonic() + (2 * CUT if self.resumes else MARGIN) > self.deadline:
            raise OutOfTimeError
        size, ask = replace(cell.size, lr=lr), cell.ask
        rates = size.rates()
        cut = self._cut(head) if self.resumes else None
        seconds = given or ask.seconds
        if cut is not None and cut.exists():
            steps = resume.read(cut)["steps"]
            ms = 1e3 * seconds / steps
        else:
            ms = runner.pace(self._task(arm, seed, size, cell), rates)
            # a captured step is a ring of references, which holds its memory until it is collected
            gc.collect()
            steps = max(1, math.floor(1e3 * seconds / ms)) if seconds else ask.steps
        if not self.resumes and time.monotonic() + 1.1e-3 * steps * ms + MARGIN > self.deadline:
            raise OutOfTimeError
        task = self._task(arm, seed, size, cell)
        with Display(f"{kind} {cell.task} {size.n} {arm} {seed} {lr:g}", steps) as display:
            result = runner.train(
                task, steps, rates, points=POINTS, closing=True, deadline=self.deadline - CUT * self.resumes,
                say=display.update, cut=cut,
            )  # fmt: skip
        if result.pop("steps_done") < steps:
            # the rate of a run that is cut off has not come down: no result
            raise OutOfTimeError
        extra: Record = {"pace_ms": round(ms, 3), "given_seconds": seconds, "tuned": tried or {}}
        if arm == "dense":
            heads = size.dense_heads or size.heads
            extra |= {"attention": task.attention, "compiled": task.compiled, "dense_heads": heads}
        extra["bytes"] = len(task.training)
        self.store.add({**head, **ask.told(), "torch": torch.__version__, **extra, **result})
        if cut is not None:
            cut.unlink(missing_ok=True)

    def _cut(self, head: Record) -> Path:
        name = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in head.values())
        return self.store.path.parent / f"cut-{name}.safetensors"

    def _task(self, arm: str, seed: int, size: text.Size, cell: Cell) -> Any:
        causal = cell.task == "causal"
        return Task(arm, seed, size, self.device, causal=causal, compiled=self.compiled, attention=self.attention)

    @staticmethod
    def _refuse_other(there: Record, cell: Cell) -> None:
        """Raise UserError where a record that is there is of other steps, data or hardware."""
        for name, value in cell.ask.told().items():
            if there[name] != value:
                what = f"the run of {named(there)}, {there['arm']}, seed {there['seed']}"
                raise UserError(f"{what}, has {name} {there[name]}, this command {value}; give another --out")
