"""The command `onepass` run in this process: exit code, what it wrote, and whether it kept its manners."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .engine import FaultError, SlowCaseError, require


class Answer(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str
    trace: str


def call(arguments: list[str], where: Path) -> Answer:
    """Run `onepass <arguments>` here, in the directory `where`."""
    from onepass.__main__ import main

    out, err, trace = _stream(), _stream(), ""
    before, threads = os.getcwd(), torch.get_num_threads()
    os.chdir(where)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = main(arguments)
            except SystemExit as stop:
                code = stop.code
            except (SlowCaseError, KeyboardInterrupt):
                raise
            except BaseException:
                code, trace = -1, traceback.format_exc()
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "backslashreplace"))
    return Answer(0 if code is None else code, *texts, trace)


def _stream() -> Any:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)


def call_apart(arguments: list[str], where: Path) -> Answer:
    """The same in a process of its own."""
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "onepass", *arguments], cwd=where, env=environment, capture_output=True, timeout=100,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    texts = (t.decode("utf-8", "backslashreplace") for t in (done.stdout, done.stderr))
    out, err = texts
    return Answer(done.returncode, out, err, err if "Traceback (most recent call last)" in err else "")


def manners(answer: Answer, what: str, allowed: tuple[int, ...] = (0, 2)) -> None:
    """No traceback; an exit code that is documented; a refusal in one line."""
    if answer.trace:
        last = answer.trace.strip().splitlines()[-1]
        raise FaultError(f"{what} {last.split(':')[0]}", last[:300], traceback=answer.trace[-1500:])
    require(answer.code in allowed, f"{what} exit code", f"{answer.code}: {answer.err[-300:]}")
    if answer.code == 2:
        lines = answer.err.count("\n")
        require(lines == 1, f"{what} lines", f"{lines} lines: {answer.err[:400]!r}")
        raw = [c for c in answer.err.rstrip("\n") if ord(c) < 32 or 127 <= ord(c) < 160]
        require(not raw, f"{what} control characters", repr(answer.err[:300]))
    raw = [c for c in answer.out if (ord(c) < 32 and c not in "\n\t\r") or 127 <= ord(c) < 160]
    require(not raw, f"{what} control characters in the output", repr(answer.out[:300]))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="onepass-fuzz-") as name:
        yield Path(name)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a directory but for its lock."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }  # fmt: skip
