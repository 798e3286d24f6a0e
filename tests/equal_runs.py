"""Sizes, options and made-up records of the tests of `research.ablate text --equal-time`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from research.ablate import text
from research.ablate.equal import records
from research.ablate.equal.trials import Ask, Cell, Trials

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
DATA = (str(ROOT / "research"), str(ROOT / "examples"))
SIZE = dataclasses.replace(
    text.SIZES["small"], dim=16, heads=2, blocks=1, n=64, batch=2, steps=12, paths=DATA, curve_windows=2,
    final_windows=4,
)  # fmt: skip
OPTIONS = ["text", "--equal-time", "--size", "small", "--device", "cpu", "--data", DATA[0], "--data", DATA[1]]
TINY = [*OPTIONS, "--dim", "16", "--heads", "2", "--blocks", "1", "--n", "64", "--batch", "2", "--steps", "6"]


def cell(task: str = "causal", steps: int = 12, seconds: float = 0.0) -> Cell:
    return Cell(task, dataclasses.replace(SIZE, steps=steps), Ask(steps, seconds, "cpu", "some"))


def trials(folder: Path, part: str = "", **options: Any) -> Trials:
    return Trials(records.Store(folder, part), CPU, False, **options)


def run(**changes: Any) -> records.Record:
    """A record as the command writes it, for the tables."""
    point = {"step": 0, "seconds": 0.0, "bits": 8.0}
    last = {"step": 10, "seconds": 2.0, "bits": 2.0}
    head = cell().record("run", "learned", 0, 1e-3)
    about = {"device": "cpu", "torch": "2", "data": "some", "seconds": 2.0, "steps": 10, "ms_per_step": 200.0}
    return {**head, **about, "parameters": 5, "curve": [point, last], "final": {"step": 10, "bits": 2.0}, **changes}
