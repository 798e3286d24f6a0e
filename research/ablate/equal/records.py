"""The records: every file `equal*.json` of a directory holds some of the runs, and together they are the result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from onepass.train.commands import files
from onepass.train.commands.errors import UserError

Record = dict[str, Any]
Place = tuple[int, int, int, float, float]  # where rates were tried: n, batch, and the setting
PATTERN = "equal*.json"
ARMS = ("learned", "dense")  # that are compared at equal width
HYBRID = "hybrid"  # of the envelope alone
NAMES = {"causal": "next byte", "masked": "hidden bytes"}  # of tasks, in tables
Seeds = dict[int, dict[str, Record]]  # seed → arm → run
# of the routed arm; a dense run has those of the routed run whose time it took
SETTING = ("window", "k", "light_mult")
LIGHT = 0.5  # light_mult of records that do not tell it
# what two runs that are compared have in common
SAME = ("task", "n", "dim", "blocks", "heads", "batch", *SETTING)
# what tells one run from another
KEY = ("kind", *SAME, "arm", "seed", "lr")
NUMBERS = (
    "n", "dim", "blocks", "heads", "batch", *SETTING, "seed", "steps", "lr", "seconds", "ms_per_step", "parameters",
)  # fmt: skip


def key(record: Record) -> tuple[Any, ...]:
    """Return what tells a run from others; the rate does so where rates are tried, elsewhere it was chosen."""
    return tuple(record[name] if name != "lr" or record["kind"] == "tune" else None for name in KEY)


def group(record: Record) -> tuple[Any, ...]:
    """Return what the two arms of a pair share, their seed aside."""
    return tuple(record[name] for name in SAME)


def named(record: Record) -> str:
    """Name the pair of a run, but for its seed."""
    setting = f"window {record['window']}, share {record['k']:g}, light {record['light_mult']:g}"
    return f"{record['task']}, n = {record['n']}, {setting}"


def read(path: Path) -> list[Record]:
    """Read one file; raise UserError if it is none of ours."""
    try:
        runs = [{"light_mult": LIGHT, **run} for run in json.loads(path.read_bytes())["runs"]]
        if not all(_whole(run) for run in runs):
            raise ValueError
        return runs
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is no record of `research.ablate text --equal-time`; move it away") from None


def _whole(run: Record) -> bool:
    """Return whether a run has what tables and pictures read."""
    numbers = [run[name] for name in NUMBERS]
    numbers += [point[name] for point in run["curve"] for name in ("step", "seconds", "bits")]
    numbers += [run["final"]["step"], run["final"]["bits"]]
    fit = all(type(value) is float or (type(value) is int and abs(value) < 2**63) for value in numbers)
    texts = all(type(run[name]) is str for name in ("task", "device", "torch", "data"))
    known = run["arm"] in (*ARMS, HYBRID) and run["kind"] in ("run", "tune")
    setting = run["window"] > 0 and 0 < run["k"] <= 1 and run["light_mult"] > 0
    return bool(fit and texts and known and setting and run["curve"] and run["n"] > 0)


def merge(parts: dict[str, Sequence[Record]]) -> list[Record]:
    """Unite the runs of several files; the same run twice is one, another of the same name is refused."""
    found: dict[tuple[Any, ...], tuple[str, Record]] = {}
    for name, runs in parts.items():
        for run in runs:
            other, there = found.setdefault(key(run), (name, run))
            if there != run:
                what = f"{named(run)}, {run['arm']}, seed {run['seed']}"
                raise UserError(f"{other} and {name} have two different runs of {what}; move one of the files away")
    return [run for _, run in sorted(found.values(), key=lambda pair: [str(part) for part in key(pair[1])])]


def load(folder: Path) -> list[Record]:
    """Read and merge all files of a directory."""
    return merge({path.name: read(path) for path in sorted(folder.glob(PATTERN))})


class Store:
    """The runs of a directory; new ones go to one file of it, which is written after every run."""

    def __init__(self, folder: Path, part: str = "") -> None:
        self.path = folder / (f"equal.{part}.json" if part else "equal.json")
        self.all = load(folder)
        self.own = read(self.path) if self.path.exists() else []

    def find(self, wanted: Record) -> Record | None:
        """Return the run with the key of `wanted`, if it is there."""
        return next((run for run in self.all if key(run) == key(wanted)), None)

    def add(self, run: Record) -> None:
        """Keep a run, in place of one with its key, in one stroke: the file on disk is whole at any moment."""
        for runs in (self.all, self.own):
            runs[:] = [*(other for other in runs if key(other) != key(run)), run]
        files.write(self.path, json.dumps({"runs": self.own}, indent=1) + "\n")


def pairs(runs: Iterable[Record]) -> dict[tuple[Any, ...], dict[int, dict[str, Record]]]:
    """Group the runs that are compared: group → seed → arm, where both arms are there."""
    found: dict[tuple[Any, ...], dict[int, dict[str, Record]]] = {}
    for run in runs:
        if run["kind"] == "run" and run["arm"] in ARMS:
            found.setdefault(group(run), {}).setdefault(run["seed"], {})[run["arm"]] = run
    whole = {
        name: {seed: arms for seed, arms in sorted(seeds.items()) if len(arms) == 2} for name, seeds in found.items()
    }
    return {name: seeds for name, seeds in sorted(whole.items()) if seeds}


def tuned(runs: Iterable[Record], like: Record) -> tuple[float, Record] | None:
    """Return the best rate that was tried for this arm, task and model, and what was tried.

    Tries with the same setting come first, then those at the nearest length, then those of the nearest setting. Tries
    of two settings are never mixed.
    """
    same = ("task", "dim", "blocks", "heads", "arm")
    tried = [run for run in runs if run["kind"] == "tune" and all(run[name] == like[name] for name in same)]
    if not tried:
        return None

    def far(place: Place) -> tuple[Any, ...]:
        n, batch, *setting = place
        away = [abs(math.log(value / like[name])) for name, value in zip(SETTING, setting, strict=True)]
        return any(away), abs(math.log(n / like["n"])), n, batch != like["batch"], batch, sum(away), setting

    at = min({_place(run) for run in tried}, key=far)
    bits = {run["lr"]: run["final"]["bits"] for run in tried if _place(run) == at}
    best = min(bits, key=lambda lr: bits[lr] if math.isfinite(bits[lr]) else math.inf)
    n, _, *setting = at
    tries = {f"{lr:g}": bits[lr] for lr in sorted(bits)}
    return best, {"n": n, **dict(zip(SETTING, setting, strict=True)), "bits": tries}


def _place(run: Record) -> Place:
    return run["n"], run["batch"], run["window"], run["k"], run["light_mult"]
