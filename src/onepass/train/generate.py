"""`onepass generate`: text that a trained language model writes after a prompt, one byte at a time."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from pathlib import Path

from onepass.train.commands.errors import UserError, printable
from onepass.train.commands.options import command, number

TEXT = """\
Let the language model of a run, trained with --task causal, write on after a prompt. It reads the prompt once, then
takes one step per byte, with the choices of the full model. The text appears as it is written; the same seed gives the
same text on the same machine. A last line on standard error tells how fast it was."""
EXAMPLES = """\
examples:
  onepass train --task causal ~/notes --out runs/notes            first a model
  onepass generate runs/notes --prompt "def "                     256 bytes after "def "
  onepass generate runs/notes --prompt "# " --temperature 0       the likeliest byte each time
  onepass generate runs/notes --prompt "a" --length 99 --seed 7   another length, another draw
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `generate` to the command line."""
    parser = command(commands, "generate", run, ("let a trained language model write on", TEXT, EXAMPLES), "train")
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory that `onepass train --task causal` left")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with, at least one byte")
    parser.add_argument("--length", type=number(1, 2**17), default=256, metavar="N", help="in bytes (default: 256)")
    parser.add_argument(
        "--temperature", type=number(0, 100, float), default=0.8, metavar="T",
        help="0: the likeliest byte each time; 1: as likely as the model finds it (default: 0.8)",
    )  # fmt: skip
    parser.add_argument("--seed", type=number(0, 2**63 - 1), default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")


def run(args: argparse.Namespace) -> int:
    """Load the model, read the prompt, write on."""
    import torch

    from onepass.train.checkpoint import of_run
    from onepass.train.model import pick_device

    saved, model = of_run(args.directory)
    if saved.config.task != "causal":
        raise UserError(f"the run in {args.directory} guesses hidden bytes; generate needs one of --task causal")
    seq = saved.config.seq  # bytes that the model has seen at a time
    prompt = args.prompt.encode("utf-8", "surrogateescape")
    if not prompt:
        raise UserError("--prompt is empty; give at least one byte to go on from")
    if len(prompt) > seq:
        raise UserError(f"--prompt has {len(prompt):,} bytes, more than the {seq:,} that the model has seen at a time")
    device = pick_device(args.device)
    if len(prompt) + args.length > seq:
        sys.stderr.write(f"note: what follows byte {seq:,} is longer than any text the model has seen\n")
    decoder = model.to(device).decoder(1, len(prompt) + args.length - 1, temperature=args.temperature, seed=args.seed)
    show = codecs.getincrementaldecoder("utf-8")("replace")
    _write(show.decode(prompt))
    began = time.perf_counter()
    try:
        for tokens in decoder.stream(torch.tensor([list(prompt)], device=device), args.length):
            _write(show.decode(bytes(tokens[0].tolist())))
    except ValueError as error:
        raise UserError("the model's outputs are no numbers; its weights are damaged or diverged") from error
    finally:
        # end the text's line before the message of an error or of Ctrl-C
        _write(show.decode(b"", final=True) + "\n")
    sys.stderr.write(f"{args.length / (time.perf_counter() - began):,.0f} tokens/s\n")
    return 0


def _write(text: str) -> None:
    """Print a piece of text at once; control characters, which a terminal would obey, appear as escapes."""
    sys.stdout.write("".join(c if c in "\n\t" else printable(c) for c in text))
    sys.stdout.flush()
