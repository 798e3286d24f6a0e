"""`onepass show`: the routing picture of any file, drawn with the model of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from onepass.train.commands.errors import UserError, doing
from onepass.train.commands.options import command, number

TEXT = """\
Draw the routing of any file as `onepass train` does for a validation text: every byte in the colour of its expert, or
shaded by its heavy branches or its surprise. Leaves <FILE's name>.routing.html in RUN, or in --out DIR."""
EXAMPLES = """\
examples:
  onepass show runs/notes letter.txt                         runs/notes/letter.txt.routing.html
  onepass show runs/notes letter.txt --out . --bytes 2000    its first 2000 bytes, the page here
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `show` to the command line."""
    parser = command(commands, "show", run, ("draw which bytes of a file a run routes", TEXT, EXAMPLES), "train")
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of a run, as left by `onepass train`")
    parser.add_argument("file", type=Path, metavar="FILE", help="any text")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to leave the page (default: RUN)")
    limit = number(1, 2**24)
    parser.add_argument("--bytes", type=limit, default=65536, metavar="N", help="how much to read (default: 65536)")


def run(args: argparse.Namespace) -> int:
    """Load the model, trace the file, write the page."""
    from onepass.train import html, sources
    from onepass.train.checkpoint import of_run
    from onepass.train.commands import files
    from onepass.train.progress import say
    from onepass.train.run import METRICS, PICTURE, Run
    from onepass.train.trace import trace

    saved, model = of_run(args.directory)
    if args.file.is_dir():
        raise UserError(f"{args.file} is a directory; give one file of text")
    content = sources.read_text(args.file)
    # metrics are optional: a checkpoint may be passed on without them
    if (args.directory / METRICS).exists():
        Run(args.directory).verify(saved)
    out = args.out or args.directory
    with doing(f"use {out}"):
        out.mkdir(parents=True, exist_ok=True)
    traced = trace(model, saved.config, args.file.name, content, args.bytes)
    source = f"{args.file.name}, by {args.directory.resolve().name} after {saved.step:,} steps"
    page = out / f"{args.file.name}.{PICTURE}.html"
    files.write(page, html.page(traced, source))
    say(html.numbers(traced))
    say(f"file  {page}")
    return 0
