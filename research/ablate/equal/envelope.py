"""`--envelope`: for a budget of seconds, the best width of each arm. Short runs decide which widths get long ones.

DIR/60s, DIR/200s and DIR/600s are directories of `--equal-time`, in which every arm has the budget as its time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onepass.train.cli import pick_device
from onepass.train.commands.errors import UserError
from research.ablate.equal import command
from research.ablate.equal.records import ARMS, HYBRID, Record, Store, load, tuned
from research.ablate.equal.trials import TUNE_SEED, Cell, OutOfTimeError, Trials

BUDGETS = (60.0, 200.0, 600.0)
BLOCKS = {256: 4, 512: 6, 1024: 8}  # of each width
RATES = {256: 4e-4, 512: 2e-4, 1024: 1e-4}  # the middle one of those that are tried
LENGTHS = (8192, 32768)  # rates are tried at the first that a command has
SHORT = 8192
WINDOW = 256  # as `RoutedBlock` has it
WIDTHS = (None, 2, 1)  # of each arm that get a budget: all, then the best after the budget before
FAR = 1.0  # bits; a width that is farther behind gets no more time
LEVEL = 0.03  # bits; arms that are nearer get a second seed
ALL = (*ARMS, HYBRID)


class Run(NamedTuple):
    """What the plan asks for next; `rates` to try, or none: one run of the best rate that was tried."""

    budget: float
    task: str
    n: int
    dim: int
    arm: str
    seed: int = 0
    rates: tuple[float, ...] = ()


def folder(out: Path, budget: float) -> Path:
    """Return where the runs of a budget stand."""
    return out / f"{budget:g}s"


def plan(
    runs: Mapping[float, list[Record]],
    arms: Sequence[str],
    lengths: Sequence[int],
    tasks: Sequence[str],
    rates: Mapping[int, tuple[float, ...]],
) -> Iterator[Run]:
    """Yield everything that the records so far ask for, done or not, in the order in which it is trained."""
    for number, budget in enumerate(BUDGETS):
        for task, n in itertools.product(tasks, lengths):
            # hidden bytes get the shortest budget, and only next bytes at 8 k the longest
            if n > SHORT and (task == "masked" or budget == BUDGETS[-1]):
                continue
            if number and task == "masked":
                continue
            for arm in arms:
                if arm == HYBRID and (task == "masked" or budget == BUDGETS[-1]):
                    continue
                dims = sorted(rates) if not number else best(runs[BUDGETS[number - 1]], task, n, arm)
                if budget == BUDGETS[-1]:
                    dims = level(runs[BUDGETS[number - 1]], task, n, arm)
                dims = [dim for dim in dims if not far(runs[BUDGETS[0]], task, n, arm, dim)]
                for dim in dims[: 1 if number and arm == HYBRID else WIDTHS[number]]:
                    if not number and n == lengths[0]:
                        yield Run(budget, task, n, dim, arm, rates=rates[dim])
                        yield from further(runs[budget], Run(budget, task, n, dim, arm))
                    yield Run(budget, task, n, dim, arm)
            yield from again(runs[budget], budget, task, n, arms)


def further(runs: Sequence[Record], run: Run) -> Iterator[Run]:
    """Yield a rate beyond the best that was tried, while that is the lowest or the highest: two at most."""
    cell = run.task, run.n, run.dim, run.arm
    tried = [r for r in runs if r["kind"] == "tune" and (r["task"], r["n"], r["dim"], r["arm"]) == cell]
    if len(tried) in (3, 4):
        lowest, *_, highest = sorted(r["lr"] for r in tried)
        found = min(tried, key=lambda r: r["final"]["bits"] if math.isfinite(r["final"]["bits"]) else math.inf)["lr"]
        if found in (lowest, highest):
            yield run._replace(rates=(found / 2 if found == lowest else 2 * found,))


def first(runs: Sequence[Record], task: str, n: int, arm: str) -> dict[int, float]:
    """Return the bits of the first seed of each width of an arm; infinite where they are no number."""
    some = [run for run in runs if _of(run, task, n, arm) and run["seed"] == 0]
    return {r["dim"]: r["final"]["bits"] if math.isfinite(r["final"]["bits"]) else math.inf for r in some}


def best(runs: Sequence[Record], task: str, n: int, arm: str) -> list[int]:
    """Return the widths of an arm's first runs, the best first."""
    bits = first(runs, task, n, arm)
    return sorted(bits, key=lambda dim: bits[dim])


def level(runs: Sequence[Record], task: str, n: int, arm: str) -> list[int]:
    """Return the widths within `LEVEL` of an arm's best, the widest first: it gains the most from more time."""
    bits = first(runs, task, n, arm)
    return sorted((dim for dim in bits if bits[dim] < min(bits.values()) + LEVEL), reverse=True)


def far(runs: Sequence[Record], task: str, n: int, arm: str, dim: int) -> bool:
    """Return whether a width's first run was more than `FAR` behind the best of its arm: it gets no more time."""
    bits = first(runs, task, n, arm)
    return dim in bits and bits[dim] > min(bits.values()) + FAR


def again(runs: Sequence[Record], budget: float, task: str, n: int, arms: Sequence[str]) -> Iterator[Run]:
    """Yield a second seed for the best of two arms that lie within `LEVEL`."""
    bits = {arm: found for arm in arms if (found := first(runs, task, n, arm))}
    for arm, found in bits.items():
        if any(other != arm and abs(min(bits[other].values()) - min(found.values())) < LEVEL for other in bits):
            yield Run(budget, task, n, min(found, key=lambda dim: found[dim]), arm, seed=1)


def _of(run: Record, task: str, n: int, arm: str) -> bool:
    return bool(run["kind"] == "run" and (run["task"], run["n"], run["arm"]) == (task, n, arm))


def run(args: argparse.Namespace) -> int:
    """Train what the plan asks for until the time is up; then write table and picture."""
    import torch

    from onepass.train.progress import say
    from research.ablate.equal import envelope_report

    deadline = time.monotonic() + args.seconds if args.seconds else math.inf
    device = torch.device(pick_device(args.device))
    small = (args.size or ("full" if device.type == "cuda" else "small")) == "small"
    tasks = (args.task,) if args.task else command.TASKS
    lengths = tuple(dict.fromkeys(args.n or ((128,) if small else LENGTHS)))
    rates = {dim: (lr / 2, lr, 2 * lr) for dim, lr in ({16: 1e-3, 32: 1e-3} if small else RATES).items()}
    cell = _cells(args, device, small)
    refusal = _hybrid_refused(device)
    some = tuple(dict.fromkeys(args.arm or (ARMS if refusal else ALL)))
    if other := [arm for arm in some if arm not in ALL]:
        raise UserError(f"--arm {other[0]}: --envelope compares {', '.join(ALL)}")
    if HYBRID in some and refusal:
        raise UserError(f"--arm {HYBRID} {refusal}")
    try:
        for budget in BUDGETS:
            folder(args.out, budget).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't use {args.out}: {(error.strerror or str(error)).lower()}") from None
    kept = {budget: Store(folder(args.out, budget), args.part or "") for budget in BUDGETS}
    compiled = device.type == "cuda" and not args.no_compile
    share = args.budget / BUDGETS[-1] if args.budget else 1.0
    done: set[Run] = set()
    shape: tuple[Any, ...] = ()
    try:
        # each run may change what the plan asks for
        while asked := [one for one in plan(_runs(kept), some, lengths, tasks, rates) if one not in done][:1]:
            (ask,) = asked
            if shape != (shape := (ask.task, ask.n, ask.dim, ask.arm)):
                # programs for the shapes of the cell before are used no more, and torch keeps a few only
                torch.compiler.reset()
            trials = Trials(kept[ask.budget], device, compiled, args.attention or "", deadline, resumes=True)
            _one(trials, ask, cell(ask, ask.budget * share), kept[BUDGETS[0]].all)
            done.add(ask)
    except OutOfTimeError:
        say("the time is up; the same command goes on there")
    except torch.OutOfMemoryError:
        raise UserError("the device has too little memory for these steps; lower --batch or --n") from None
    return envelope_report.write(args.out)


def _hybrid_refused(device: Any) -> str:
    """Say what flash-linear-attention's gated delta nets need and is not here."""
    import torch

    if importlib.util.find_spec("fla") is None:
        return "needs flash-linear-attention: pip install flash-linear-attention"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if hopper and importlib.util.find_spec("tilelang") is None:
        version = torch.torch_version.TorchVersion(importlib.metadata.version("triton"))
        # its own check (flash-linear-attention#640)
        if "3.4" <= version < "3.7.1":
            return f"needs Triton 3.7.1 or newer on a Hopper GPU, or tilelang; this is Triton {version}"
    return ""


def _runs(kept: dict[float, Store]) -> dict[float, list[Record]]:
    return {budget: store.all for budget, store in kept.items()}


def _one(trials: Trials, ask: Run, cell: Cell, tried: list[Record]) -> None:
    if ask.rates:
        short = replace(cell, ask=cell.ask.third())
        for lr in ask.rates:
            trials.one(short, "tune", ask.arm, TUNE_SEED, lr, 0.0)
        return
    lr, tries = tuned(tried, cell.record("run", ask.arm, ask.seed, 0.0)) or (cell.size.lr, {})
    trials.one(cell, "run", ask.arm, ask.seed, lr, 0.0, tries)


def _cells(args: argparse.Namespace, device: Any, small: bool) -> Callable[[Run, float], Cell]:
    """Return the function that makes the cell of a run."""

    window = args.window or (None if small else WINDOW)

    def cell(ask: Run, seconds: float) -> Cell:
        blocks = args.blocks or (1 if small else BLOCKS[ask.dim])
        changed = {"n": [ask.n], "dim": ask.dim, "blocks": blocks, "budget": seconds, "steps": None, "task": ask.task}
        changed["window"] = window
        (found,) = command.cells(argparse.Namespace(**{**vars(args), **changed}), "small" if small else "full", device)
        return found

    return cell


def read(out: Path) -> dict[float, list[Record]]:
    """Return the runs of every budget in a directory."""
    return {budget: load(folder(out, budget)) for budget in BUDGETS if folder(out, budget).is_dir()}
