"""A run that takes a second: how it is started, disturbed and refused, and what it came to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from onepass.__main__ import main
from onepass.train import loop
from onepass.train.config import COMMON, PRESETS, Config, build

TINY = ["--dim", "16", "--blocks", "2", "--seq", "32", "--batch", "4", "--steps", "12", "--device", "cpu"]
# measurements take most of a small run's time; with experts there are choices to test
WINDOWS = {"eval_windows": 4, "final_windows": 8, "experts": 4}
WORDS = ["route", "token", "heavy", "light", "byte", "k", "norm", "=", "(x)", "é", "\n", "mask\n"]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Few measurements; pictures are drawn and not encoded, by the first process: others import no matplotlib."""
    with (
        mock.patch.dict(PRESETS["cpu"], WINDOWS),
        mock.patch.dict(COMMON, {"eval_every": 4}),
        mock.patch("matplotlib.figure.Figure.savefig") if os.getenv("RANK", "0") == "0" else contextlib.nullcontext(),
    ):
        yield


def write_texts(folder: Path) -> Path:
    """A directory of 24 different texts."""
    (folder / "deep").mkdir(parents=True)
    for number in range(24):
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(120)]
        where = folder / "deep" if number % 3 == 0 else folder
        (where / f"{number}.txt").write_text(f"{number} " + " ".join(words), encoding="utf-8")
    return folder


def config(**values: object) -> Config:
    small = {"seed": 0, "dim": 16, "blocks": 2, "seq": 32, "batch": 4, "steps": 100}
    rest = {"device": "cpu", "precision": "fp32", "threads": 1, "data": "d", "paths": ("a", "b")}
    return build("cpu", **{**small, **rest, **values})


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics of a run without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocked = {"seconds", "tokens_per_s"}
    return [{name: value for name, value in row.items() if name not in clocked} for row in lines]


def same(one: Path, other: Path) -> None:
    """Two runs came to the same numbers, bit for bit."""
    assert rows(one) == rows(other)
    a, b = (load_file(run / "checkpoint.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)
    assert any(name.startswith("optimizer/") for name in a)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a directory but for its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextlib.contextmanager
def at_step(number: int, do: Callable[[], object]) -> Iterator[None]:
    """Call `do` when a run has made this many steps."""
    step = loop.Training._one_step

    def disturbed(self: loop.Training) -> torch.Tensor:
        if self.step == number:
            do()
        return step(self)

    with mock.patch.object(loop.Training, "_one_step", disturbed):
        yield


def power_cut(*_: object) -> None:
    raise RuntimeError("power cut")


def cut_off(number: int, run: Callable[[], object]) -> None:
    """Let a run die after this many steps."""
    with at_step(number, power_cut), pytest.raises(RuntimeError, match="power cut"):
        run()


def command(*arguments: object) -> tuple[int, str, str]:
    """Exit code and prints of `onepass ARGUMENTS`; a refusal is one line, and nothing gives orders to a terminal."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in "oe")
    with mock.patch.object(sys, "stdout", out), mock.patch.object(sys, "stderr", err):
        try:
            code: Any = main([str(argument) for argument in arguments]) or 0
        except SystemExit as stop:
            code = stop.code or 0
    said, refusal = (stream.buffer.getvalue().decode("utf-8", "backslashreplace") for stream in (out, err))
    if code == 2:
        assert refusal.count("\n") == 1, refusal
        assert refusal[:-1].isprintable(), refusal
        assert refusal.startswith("onepass"), refusal
    assert all(c.isprintable() or c in "\n\t\r" for c in said), said
    return code, said, refusal


def refused(*arguments: object) -> str:
    """The line of a command that has to end with code 2."""
    code, said, refusal = command(*arguments)
    assert code == 2, said
    return refusal


def printed(*arguments: object) -> str:
    """What a command prints that has to succeed."""
    code, said, refusal = command(*arguments)
    assert code == 0, refusal
    return said


# one process imports torch once; its forks are the real processes
BEGIN = f"""
import errno, fcntl, os, random, signal, subprocess, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from onepass.__main__ import main
from onepass.train.commands.errors import UserError
from onepass.train.run import Run
import onepass.train.loop, torch._dynamo
from onepass.train import config, pictures
pictures.Figure.savefig = lambda *_, **__: None
config.PRESETS["cpu"] |= {WINDOWS}
config.COMMON["eval_every"] = 4
folder, ARGS = Path(sys.argv[1]), sys.argv[2:]
os.chdir(folder)

def fork(do, log):
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os._exit(do())
"""


def drive(script: str, folder: Path, *arguments: str) -> str:
    """What a script after `BEGIN` prints."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(folder), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
