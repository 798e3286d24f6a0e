"""The options of `onepass train`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from onepass.train.commands.options import number
from onepass.train.config import MODELS, PRESETS, RANGES, TASKS

CHECKPOINT_EVERY = {"cpu": 50, "gpu": 1000}  # a GPU takes a step in the hundredth part of what writing takes
NUMBERS = {
    "steps": "training steps; with --resume more than before trains longer",
    "seed": "of weights, data order and hidden bytes (default: 0)",
    "batch": "sequences a step",
    "seq": "bytes a sequence",
    "dim": "width of a token",
    "blocks": "number of blocks",
    "lr": "peak learning rate",
    "threads": "CPU threads (default: torch's)",
}
CHOICES = {
    "preset": tuple(PRESETS),
    "task": TASKS,
    "model": MODELS,
    "device": ("auto", "cpu", "cuda"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options; what is left open is None."""
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="text files or directories (default: Python's standard library)")
    add("--out", type=Path, metavar="DIR", help="the run's directory (default: runs/<time>; with --resume the newest)")
    cpu, gpu = (f"{preset['batch']} × {preset['seq']} bytes a step" for preset in (PRESETS["cpu"], PRESETS["gpu"]))
    helps = {
        "preset": f"cpu: {cpu}, < 4 minutes on 2 cores; gpu: {gpu}, bf16 (default: by the device)",
        "task": "guess hidden bytes, or each next byte (default: masked)",
        "model": "blocks with attention and experts, or routed blocks (default: transformer)",
        "device": "where to train (default: auto, cuda if there is one)",
    }
    for name, values in CHOICES.items():
        add(f"--{name}", choices=values, help=helps[name])
    for name, what in NUMBERS.items():
        values = tuple(str(preset[name]) for preset in PRESETS.values() if name in preset)
        default = f" (default: {' or '.join(values)}, by preset)" if values else ""
        add(f"--{name}", type=_number(name), metavar="X" if name == "lr" else "N", help=what + default)
    every = f"steps between checkpoints (default: {' or '.join(map(str, CHECKPOINT_EVERY.values()))}, by preset)"
    add("--checkpoint-every", type=_number("checkpoint_every"), metavar="N", help=every)
    add(
        "--fsdp", action="store_true",
        help="with torchrun: each process holds a part of the weights, for a model that fits on no GPU; slower",
    )  # fmt: skip


def _number(name: str) -> Callable[[str], int | float]:
    low, high = RANGES.get(name, (1, 10**9))
    return number(low, high, float if name == "lr" else int)
