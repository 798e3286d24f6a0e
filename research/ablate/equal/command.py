"""The options of `--equal-time`, what they may not be, and the command's run."""

from __future__ import annotations

import argparse
import math
import re
import time
from typing import TYPE_CHECKING, Any

from onepass.train.cli import pick_device
from onepass.train.commands.errors import UserError
from onepass.train.commands.options import number

if TYPE_CHECKING:
    from research.ablate.equal.trials import Cell
    from research.ablate.text import Size

HELP = "the routed arm trains, then a dense one (flash attention, feed-forward of 4·dim) for the same seconds"
ENVELOPE = (
    "the best of several widths for 60, 200 and 600 seconds, of these two and of a hybrid of gated delta nets "
    "(flash-linear-attention); --budget: seconds of the longest"
)
# options that only these two have
OWN = ("budget", "tune", "rate", "part", "attention", "no_compile")
MODEL = ("n", "dim", "blocks", "heads", "batch", "window", "share", "light")
NUMBERS = {
    "n": (64, 2**20), "dim": (8, 2**14), "blocks": (1, 256), "heads": (1, 256), "batch": (1, 4096),
    "window": (1, 2**14),
}  # fmt: skip
HELPS = {
    "n": "tokens in view; may be repeated with --equal-time (default there: 2048, 8192, 32768)",
    "dim": "width of a token",
    "blocks": "number of blocks",
    "heads": "of the routed arm; the dense one has heads of 64, the fastest width",
    "batch": "sequences a step (default: as many as hold 16384 tokens)",
    "window": "tokens of a window of the routed arm's local attention (default: 32; --envelope: 256)",
}
LENGTHS = {"small": (128,), "full": (2048, 8192, 32768), "100m": (8192,)}
TASKS = ("causal", "masked")
TOKENS = 16384  # of a step
SEEDS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `text`."""
    one = parser.add_argument_group("the model, and equal time")
    add = one.add_argument
    add("--equal-time", action="store_true", help=HELP)
    add("--envelope", action="store_true", help=ENVELOPE)
    for name, (low, high) in NUMBERS.items():
        more: dict[str, Any] = {"action": "append"} if name == "n" else {}
        add(f"--{name}", type=number(low, high), metavar="N", help=HELPS[name], **more)
    part = "part of the tokens in the routed arm's heavy branch, 0 < X ≤ 1 (default: 0.125; small: 0.0625)"
    add("--share", type=number(1e-6, 1.0, float), metavar="X", help=part)
    wide = "hidden units of the routed arm's light feed-forward, as a multiple of dim (default: 0.5)"
    add("--light", type=number(1e-3, 64.0, float), metavar="X", help=wide)
    add("--budget", type=number(0.01, 10**6, float), metavar="X", help="seconds of training of a run, for --steps")
    add("--tune", action="store_true", help="try rates for a third of the time; later runs take the best")
    rate = "one rate to try; may be repeated (default: half of, one and two times the size's)"
    add("--rate", action="append", type=number(1e-7, 1.0, float), metavar="X", help=rate)
    add("--part", type=_part, metavar="NAME", help="keep this command's runs in DIR/equal.NAME.json")
    kernels = "torch's kernel of the dense arm's attention on CUDA (default: the faster one, found by timing)"
    add("--attention", choices=("flash", "cudnn"), help=kernels)
    add("--no-compile", action="store_true", help="capture the dense arm on CUDA without torch.compile")


def _part(text: str) -> str:
    if not re.fullmatch(r"[\w-]{1,40}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be letters, digits, - and _, got {text!r:.60}")
    return text


def check(args: argparse.Namespace) -> None:
    """Raise UserError for options that don't go together."""
    if args.envelope:
        _check_envelope(args)
        return
    if not args.equal_time:
        given = [name for name in OWN if getattr(args, name)]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} goes with --equal-time")
        if args.size == "100m":
            raise UserError("--size 100m goes with --equal-time")
        if len(args.n or ()) > 1:
            raise UserError("--n: several lengths go with --equal-time; give one")
        return
    if args.calibrate:
        raise UserError("--calibrate looks for a width that --equal-time does not use; leave one of them out")
    if other := [arm for arm in args.arm or () if arm not in ("learned", "dense")]:
        raise UserError(f"--arm {other[0]}: --equal-time compares learned and dense")
    if args.steps and args.budget:
        raise UserError("--steps and --budget both say how long a run is; give one of them")
    if args.rate and not args.tune:
        raise UserError("--rate goes with --tune")
    if args.tune and args.seed:
        raise UserError("--seed: --tune has a seed of its own, which is not compared")


def _check_envelope(args: argparse.Namespace) -> None:
    """Raise UserError for options that the plan of the envelope decides."""
    for name in ("equal_time", "calibrate", "steps", "dim", "tune", "rate", "seed"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')}: --envelope decides that; leave one of them out")
    if args.size == "100m":
        raise UserError("--size 100m: --envelope has widths of its own; leave it out")


def sizes(args: argparse.Namespace, base: str, lengths: tuple[int, ...] = ()) -> list[Size]:
    """Return the model and the batch at every length that was asked for; `lengths` where none was."""
    from dataclasses import replace

    from research.ablate import text
    from research.ablate.equal.trials import CURVE, FINAL

    known = {**text.SIZES, "100m": text.Size(1024, 8, 16, 8192, 4, 4000, ("torch",), k=1 / 8, window=32, lr=2e-4)}
    size = known[base]
    dim = args.dim or size.dim
    heads = args.heads or (size.heads if dim == size.dim else max(1, dim // 32))
    if dim % heads or dim // heads % 2:
        raise UserError(f"--heads {heads}: {dim} channels do not part into that many heads of even width")
    dense = dim // 64 if dim % 64 == 0 else heads
    found = []
    for n in dict.fromkeys(args.n or lengths or LENGTHS[base]):
        changes: dict[str, Any] = {"dim": dim, "heads": heads, "dense_heads": dense, "blocks": args.blocks, "n": n}
        changes["batch"] = args.batch or (size.batch if base != "full" else max(1, TOKENS // n))
        # as many steps as earlier records have: fewer where each has more tokens in view
        changes["steps"] = 0 if args.budget else args.steps or (size.steps if n < 32768 else size.steps // 2)
        if base != "small":
            changes.update(curve_windows=max(1, CURVE // n), final_windows=max(1, FINAL // n))
            # larger than a step's: forward alone waits for the host there
            changes["measured"] = max(changes["batch"], 4 * TOKENS // n)
        changes["paths"] = tuple(args.data or ())
        changes |= {"window": args.window, "k": args.share, "light_mult": args.light}
        found.append(replace(size, **{name: value for name, value in changes.items() if value is not None}))
        _check_setting(found[-1])
    return found


def _check_setting(size: Size) -> None:
    """Raise UserError for a window or a share that leaves a part of the routed arm without work at this length."""
    if size.window >= size.n:
        # next bytes: routed queries see keys of earlier windows alone, and there is none; hidden bytes: with windows of
        # n/2 every token already sees all
        raise UserError(f"--window {size.window}: must be smaller than the {size.n:,} tokens in view (--n)")
    if size.k * size.n < 1:
        raise UserError(f"--share {size.k:g}: is less than one of the {size.n:,} tokens in view (--n)")
    if size.light_mult * size.dim < 1:
        raise UserError(f"--light {size.light_mult:g}: is less than one hidden unit at {size.dim} channels (--dim)")


def run(args: argparse.Namespace) -> int:
    """Tune, or train the pairs that are missing; then write tables and picture of what there is."""
    import torch

    from onepass.train.progress import say
    from research.ablate.equal import report
    from research.ablate.equal.records import ARMS, Store
    from research.ablate.equal.trials import OutOfTimeError, Trials

    deadline = time.monotonic() + args.seconds if args.seconds else math.inf
    device = torch.device(pick_device(args.device))
    base = args.size or ("full" if device.type == "cuda" else "small")
    rows = cells(args, base, device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"can't use {args.out}: {(error.strerror or str(error)).lower()}") from None
    compiled = device.type == "cuda" and not args.no_compile
    trials = Trials(Store(args.out, args.part or ""), device, compiled, args.attention or "", deadline)
    some = tuple(dict.fromkeys(args.arm or ARMS))
    try:
        for cell in rows:
            if args.tune:
                lr = cell.size.lr
                trials.tune(cell, some, tuple(dict.fromkeys(args.rate or (lr / 2, lr, 2 * lr))))
            else:
                trials.compare(cell, some, tuple(dict.fromkeys(args.seed or range(SEEDS))))
    except OutOfTimeError:
        say("the time is up before the next run would end; the same command goes on there")
    except torch.OutOfMemoryError:
        raise UserError("the device has too little memory for these steps; lower --batch or --n") from None
    return report.write(args.out) if trials.store.all else 0


def cells(args: argparse.Namespace, base: str, device: Any) -> list[Cell]:
    """Return the rows of the table that were asked for."""
    from research.ablate import runner, text
    from research.ablate.equal.trials import Ask, Cell

    found = []
    for size in sizes(args, base):
        read = text.corpus(size.paths, size.packages)
        for part, content in (("training", read.training), ("validation", read.validation)):
            if len(content) <= size.n:
                raise UserError(
                    f"--n {size.n}: the {part} data has {len(content):,} bytes; give more text or a smaller --n"
                )
        ask = Ask(size.steps, args.budget or 0.0, runner.about(device)["device"], read.digest[:16])
        found += [Cell(task, size, ask) for task in ((args.task,) if args.task else TASKS)]
    return found
