"""The command `onepass train` and its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from onepass.train.commands.options import command, number
from onepass.train.config import CHECKPOINT_EVERY, CHOICES, PRESETS, RANGES

HELP = "train a model on text and see what it makes of each byte"
TEXT = """\
Train a model on the files it is given: an encoder that guesses hidden bytes (15 %, all of them behind a mask token), or
with --task causal a language model that guesses each byte from those before it; on a GPU routers then choose the
experts that a byte takes. With --model routed they choose the few bytes that get a heavy branch. Directories are read
with all the text files below them. Each whole file is learned from or measured on, by a hash of its path. With no PATH
it reads the sources of Python's own standard library."""
EXAMPLES = """\
examples:
  onepass train                              a few minutes on a CPU; everything is left in runs/<time>
  onepass train ~/notes --out runs/notes     your own text
  onepass train --task causal --steps 400    a language model, for `onepass generate`
  onepass train --resume                     go on with the newest run below runs/, as if it had never stopped
  onepass train --resume --steps 1600        train a run longer; the learning rate follows the longer schedule
  torchrun --standalone --nproc-per-node 2 -m onepass train --out runs/two
                                             the same run by two GPUs (docs/scale.md); any number of them resumes it
  onepass show runs/notes letter.txt         see the routing of any other file

what is left in DIR:
  routing.html                a validation text, every byte in the colour of its expert, its compute or its surprise
  loss.png, metrics.jsonl     bits per byte over the steps
  checkpoint.safetensors      weights, momentum and place; config.json and data.json say what the run is
"""
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


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the command line; options that are not given are None."""
    parser = command(commands, "train", _run, (HELP, TEXT, EXAMPLES), "train")
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
    for name, text in helps.items():
        add(f"--{name}", choices=("auto", *CHOICES[name]) if name == "device" else CHOICES[name], help=text)
    for name, text in NUMBERS.items():
        values = tuple(str(preset[name]) for preset in PRESETS.values() if name in preset)
        default = f" (default: {' or '.join(values)}, by preset)" if values else ""
        add(f"--{name}", type=_number(name), metavar="X" if name == "lr" else "N", help=text + default)
    every = f"steps between checkpoints (default: {' or '.join(map(str, CHECKPOINT_EVERY.values()))}, by preset)"
    add("--checkpoint-every", type=_number("checkpoint_every"), metavar="N", help=every)
    add(
        "--fsdp", action="store_true",
        help="with torchrun: each process holds a part of the weights, for a model that fits on no GPU; slower",
    )  # fmt: skip
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from the last checkpoint, bit for bit on a CPU")
    again.add_argument(
        "--force", action="store_true", help="start over in the directory of a run, whose files are lost"
    )


def _run(args: argparse.Namespace) -> int:
    # what trains is not imported to print help
    from onepass.train import cli

    return cli.run(args)


def _number(name: str) -> Callable[[str], int | float]:
    low, high = RANGES.get(name, (1, 10**9))
    return number(low, high, float if name == "lr" else int)
