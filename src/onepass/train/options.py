"""The options of `onepass train`, on the command line and in a configuration file of the same names."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onepass.train.commands.errors import UserError
from onepass.train.commands.files import read
from onepass.train.commands.options import number
from onepass.train.config import PRESETS, RANGES, TASKS

CHECKPOINT_EVERY = 50
NUMBERS = {
    "steps": "training steps; with --resume more than before trains longer",
    "seed": "of weights, data order and hidden bytes (default: 0)",
    "batch": "sequences a step",
    "seq": "bytes a sequence",
    "dim": "width of a token",
    "blocks": "number of blocks",
    "lr": "peak learning rate",
    "threads": "CPU threads (default: one for each idle core)",
}
CHOICES = {
    "preset": tuple(PRESETS),
    "task": TASKS,
    "device": ("auto", "cpu", "cuda"),
}
FLAGS = {
    "binary": "read files with NUL bytes as well; without it they are no text",
    "follow_links": "read files behind links that lead out of a given directory",
    "fsdp": "with torchrun: each process holds a part of the weights, for a model that fits on no GPU; slower",
    "tensorboard": "write the metrics for TensorBoard into DIR, too (needs the package tensorboard)",
}
GONE = {"sequence_parallel": "went with rows over several processes: leave it out, each takes its rows of a batch"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options; those that a file may set have the default None."""
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help="text files or directories (default: Python's standard library)")
    add("--out", type=Path, metavar="DIR", help="the run's directory (default: runs/<time>; with --resume the newest)")
    add("--config", type=Path, metavar="FILE", help="TOML file with any of these options; the command line wins")
    cpu, gpu = (f"{preset['batch']} × {preset['seq']} bytes a step" for preset in (PRESETS["cpu"], PRESETS["gpu"]))
    helps = {
        "preset": f"cpu: {cpu}, < 4 minutes on 2 cores; gpu: {gpu}, bf16 (default: by the device)",
        "task": "guess hidden bytes, or each next byte (default: masked)",
        "device": "where to train (default: auto, cuda if there is one)",
    }
    for name, values in CHOICES.items():
        add(f"--{name}", choices=values, help=helps[name])
    for name, what in NUMBERS.items():
        values = tuple(str(preset[name]) for preset in PRESETS.values() if name in preset)
        default = f" (default: {' or '.join(values)}, by preset)" if values else ""
        add(f"--{name}", type=_number(name), metavar="X" if name == "lr" else "N", help=what + default)
    every = f"steps between checkpoints (default: {CHECKPOINT_EVERY})"
    add("--checkpoint-every", type=_number("checkpoint_every"), metavar="N", help=every)
    for name, what in FLAGS.items():
        add(f"--{name.replace('_', '-')}", action="store_true", default=None, help=what)
    for name in GONE:
        add(f"--{name.replace('_', '-')}", action="store_true", default=None, help=argparse.SUPPRESS)


def _number(name: str) -> Callable[[str], int | float]:
    low, high = RANGES.get(name, (1, 10**9))
    return number(low, high, float if name == "lr" else int)


def fill(args: argparse.Namespace) -> None:
    """Set what the command line left open from the file of --config, then from the defaults."""
    for name, value in from_file(args.config).items() if args.config else ():
        if getattr(args, name) in (None, []):
            setattr(args, name, value)
    for name, why in GONE.items():
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} {why}")
    args.checkpoint_every = args.checkpoint_every or CHECKPOINT_EVERY


def from_file(path: Path) -> dict[str, Any]:
    """Read a TOML file of options; raise UserError for an unknown name or a value that the option would refuse."""
    # tomllib is part of Python from 3.11 on
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        values = toml.loads(read(path).decode())
    except UnicodeDecodeError:
        raise UserError(f"{path} is no TOML (not UTF-8)") from None
    except toml.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML ({error!s:.100})") from None
    return {(clean := name.replace("-", "_")): _checked(path, clean, value) for name, value in values.items()}


def _checked(path: Path, name: str, value: object) -> object:
    where = f"{path}: {name}"
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise UserError(f"{where} must be one of {', '.join(CHOICES[name])}, got {value!r:.40}")
    elif name in FLAGS or name in GONE:
        if not isinstance(value, bool):
            raise UserError(f"{where} must be true or false, got {value!r:.40}")
    elif name in NUMBERS or name == "checkpoint_every":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{where} must be a number, got {value!r:.40}")
        try:
            return _number(name)(str(value))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{where} {error}") from None
    elif name == "paths":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise UserError(f"{where} must be a list of texts, got {value!r:.40}")
    elif name == "out":
        if not isinstance(value, str):
            raise UserError(f"{where} must be a text, got {value!r:.40}")
        return Path(value)
    else:
        known = ", ".join(sorted([*CHOICES, *FLAGS, *NUMBERS, "checkpoint_every", "out", "paths"]))
        raise UserError(f"{where} is unknown; the file may set {known}")
    return value
