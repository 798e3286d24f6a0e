"""How a run of `onepass train` starts, goes on and ends, and its summary."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

import torch

from onepass.train import checkpoint, choices, data, html, loop, model, parallel
from onepass.train import config as configs
from onepass.train import run as runs
from onepass.train.checkpoint import Checkpoint
from onepass.train.commands.errors import UserError, enough_memory, printable
from onepass.train.config import Config
from onepass.train.data import Corpus
from onepass.train.loop import Training
from onepass.train.parallel import World
from onepass.train.progress import Progress, say, size
from onepass.train.run import LEFT_OUT, Run, fresh_out, newest
from onepass.train.trace import trace

# options that decide the result, named as in a configuration
SETTINGS = ("preset", "task", "model", "steps", "seed", "device", "batch", "seq", "dim", "blocks", "lr", "threads")


def run(args: argparse.Namespace) -> int:
    """Train, draw the pictures, print a summary; return the exit code."""
    threads = torch.get_num_threads()
    with parallel.joined() as world:
        world.fsdp = args.fsdp
        try:
            return world.leave((lead if world.first else follow)(args, world))
        except loop.InterruptedRunError as stop:
            say(f"stopped after {stop.step:,} of {stop.steps:,} steps, all of them saved")
            command = "-m", "onepass", "train", "--resume", "--out", str(stop.path), *["--fsdp"] * args.fsdp
            say(f"go on with: {shlex.join((sys.executable, *world.launcher, *command))}")
            return world.leave(128 + stop.signum)
        finally:
            torch.set_num_threads(threads)


def lead(args: argparse.Namespace, world: World) -> int:
    """Start or resume a run as the process that writes its directory; return the exit code."""
    if world.restarted(args.out):
        args.resume, args.force = True, False
    if args.resume:
        run_ = Run(args.out or newest())
        if not (run_ / runs.CONFIG).is_file():
            raise UserError(f"there is no run in {run_.path} (no {runs.CONFIG}); leave out --resume to start one")
    else:
        if args.out:
            # refuse before reading data; checked again below under the lock
            Run(args.out).refuse_overwriting(args.force)
        config, corpus = started(args)
        world.check(config)
        run_ = Run(args.out or fresh_out())
    with run_.locked():
        if args.resume:
            config, corpus, saved = resumed(args, run_)
            world.check(config)
        else:
            # another process may have trained here while this one read the data
            run_.refuse_overwriting(args.force)
            run_.create(config, corpus.manifest())
            if corpus.left_out:
                run_.write(LEFT_OUT, "".join(f"{printable(f'{name}: {why}')}\n" for name, why in corpus.left_out))
            saved = None
        torch.set_num_threads(config.threads)
        world.announce(run_, config, saved)
        return train(args, run_, config, corpus, saved, world)


def follow(args: argparse.Namespace, world: World) -> int:
    """Take part in the run that the first process announces; return the exit code."""
    run_, config, saved = world.follow()
    corpus = data.load(args.paths or config.paths)
    if corpus.digest != config.data:
        raise UserError(f"process {world.rank} reads other data than process 0: every host needs the same files")
    torch.set_num_threads(config.threads)
    return train(args, run_, config, corpus, saved, world)


def started(args: argparse.Namespace) -> tuple[Config, Corpus]:
    """Read the data and build the configuration of a new run."""
    device = model.pick_device(args.device)
    preset = args.preset or ("gpu" if device == "cuda" else "cpu")
    corpus = data.load(args.paths)
    # the gpu preset uses bf16 on a GPU that supports it; on a CPU bf16 would be slower
    bf16 = preset == "gpu" and device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    options = {name: getattr(args, name) for name in SETTINGS if name not in ("preset", "device", "threads")}
    config = configs.build(
        preset, device=device, precision="bf16" if bf16 else "fp32", threads=args.threads or torch.get_num_threads(),
        data=corpus.digest, paths=tuple(os.path.abspath(path) for path in args.paths), **options,
    )  # fmt: skip
    refuse_longer(config, corpus)
    return config, corpus


def refuse_longer(config: Config, corpus: Corpus) -> None:
    """Raise UserError if a sequence is longer than the data."""
    for part, text in (("training", corpus.training), ("validation", corpus.validation)):
        if len(text) < config.seq:
            raise UserError(
                f"a sequence of {config.seq:,} bytes is longer than the {part} data ({len(text):,} bytes); "
                f"give more text or a smaller --seq"
            )


def resumed(args: argparse.Namespace, run_: Run) -> tuple[Config, Corpus, Checkpoint | None]:
    """Read configuration, data and checkpoint of a run; raise UserError if an option of today or the data differs.

    Two values may change when a run goes on: more steps, and the number of threads, which changes the last bits.
    """
    config = run_.config()
    options = {name: getattr(args, name) for name in SETTINGS if name not in ("steps", "threads")}
    if args.device == "auto":
        options["device"] = None
    if difference := configs.difference(config, options):
        raise UserError(f"--resume: {difference}; leave the option out, or start another run")
    if args.steps and args.steps < config.steps:
        raise UserError(f"--resume --steps {args.steps:,}: the run has {config.steps:,}; give more to train longer")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--resume: the run was on a CUDA device, and torch sees none here; start another run")
    corpus = data.load(args.paths or config.paths)
    if corpus.digest != config.data:
        raise UserError(
            f"--resume: the data has changed since the run began; put back the files that {run_ / runs.DATA} lists, or "
            f"start another run"
        )
    refuse_longer(config, corpus)
    # the data has the run's digest: write its list of files anew, in case somebody changed that file
    run_.write(runs.DATA, corpus.manifest())
    saved = run_.checkpoint()
    if saved and (name := configs.contradiction(config, saved.config)):
        there, here = (str(getattr(values, name))[:40] for values in (saved.config, config))
        raise UserError(f"{saved.path} is of another configuration: {name} is {there} there and {here} in config.json")
    updated = configs.changed(config, saved.step if saved else 0, steps=args.steps, threads=args.threads)
    if updated != config:
        run_.write("config.json", updated.to_json())
    return updated, corpus, saved


def train(
    args: argparse.Namespace, run_: Run, config: Config, corpus: Corpus, saved: Checkpoint | None, world: World
) -> int:
    """Train in the locked directory, then write pictures and a summary; return the exit code."""
    step = f"{config.batch} × {config.seq:,} bytes a step"
    with enough_memory(f"the device has too little memory for {step}; lower --batch or --seq"):
        every = args.checkpoint_every or configs.CHECKPOINT_EVERY[config.preset]
        training = Training(config, corpus, run_, every, world)
        training.restore(saved)
        introduce(training)
        training.go(Progress(config.steps, training.step))
        conclude(training)
    return 0


def introduce(training: Training) -> None:
    """Print the data, the model and the run's directory."""
    config, corpus = training.config, training.corpus
    measured = sum(source.validation for source in corpus.sources)
    learned = f"{size(len(corpus.training))} to learn from ({len(corpus.sources) - measured:,} files)"
    held_out = f"{size(len(corpus.validation))} to measure on ({measured or 1:,})"
    say(f"data        {learned}, {held_out}")
    if len(corpus.sources) == 1:
        say("            there is one file: its last tenth is the validation text")
    if corpus.left_out:
        say(f"            left out: {len(corpus.left_out):,} files, {LEFT_OUT} says why")
    count = sum(parameter.numel() for parameter in training.model.parameters())
    say(f"model       {count:,} parameters: {config.blocks} blocks of width {config.dim}, {model.words(config)}")
    step = f"steps of {config.batch} × {config.seq:,} bytes on {config.device}, {config.precision}"
    by = f", {training.world.size} processes" if training.world.size > 1 else ""
    after = f", going on after step {training.step:,}" if training.step else ""
    say(f"run         {training.run.path}: {config.steps:,} {step}{by}{after}")


def conclude(training: Training) -> None:
    """Measure the trained model, draw the pictures, print the summary."""
    # matplotlib takes a while to import, and other processes draw nothing
    from onepass.train import pictures

    config, corpus, run_ = training.config, training.corpus, training.run
    bits_per_byte, numbers = training.measure(config.final_windows)
    name, content = validation_text(corpus, 3 * config.seq)
    training.model.eval()
    traced = trace(training.model, config, name, content, max(8192, config.seq))
    if not training.world.first:
        return
    unigram = data.unigram_entropy(corpus.validation, config.seq, config.final_windows)
    run_.write(runs.LOSS, pictures.loss_png(run_.rows(), config, unigram))
    bits = f"{bits_per_byte:.3f} bits per byte of all validation text"
    source = f"{name}, a validation file; {bits} after {training.step:,} steps, {run_.path.name}"
    run_.write(f"{runs.PICTURE}.html", html.page(traced, source))
    change = 100 * (bits_per_byte / unigram - 1) if unigram else 0.0
    say()
    beside = f"byte-unigram entropy of the same text {unigram:.3f} ({change:+.0f} %)"
    say(f"validation  {bits_per_byte:.3f} bits per byte; {beside}")
    say(f"speed       {training.speed():,.0f} tokens/s")
    if numbers:
        say(choices.summary(numbers))
    say(f"drawn       {name}: {html.numbers(traced)}")
    names = [f"{runs.PICTURE}.html", runs.LOSS, runs.METRICS, runs.CONFIG, checkpoint.NAME]
    say(f"files       {run_.path}{os.sep} {'  '.join(names)}")


def validation_text(corpus: Corpus, page_bytes: int) -> tuple[str, bytes]:
    """Return (name, content) of the validation file to draw: the first by hash that fills a page, else the longest."""
    validation = [source for source in corpus.sources if source.validation]
    if not validation:
        return corpus.sources[0].name, corpus.validation.tobytes()
    best = max(validation, key=lambda source: (min(len(source.content), page_bytes), -data.position(source.name)))
    return best.name, best.content
