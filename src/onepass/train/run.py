"""A run's directory: made, opened again, never overwritten unasked, used by one process at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from onepass.core.errors import UserError
from onepass.train import checkpoint, files
from onepass.train.config import Config, from_json

CONFIG, DATA, METRICS, LOSS, LOCK = "config.json", "data.json", "metrics.jsonl", "loss.png", ".lock"
PICTURE = "routing"  # of .html and .png; `onepass show` puts the file's name in front
_OWN = {CONFIG, DATA, METRICS, LOSS, LOCK, checkpoint.NAME}
RUNS = Path("runs")


def _is_own(name: str) -> bool:
    name = name.removesuffix(files.SUFFIX)
    return name in _OWN or name.removesuffix(".html").removesuffix(".png").split(".")[-1] == PICTURE


def fresh_out() -> Path:
    """Name a directory after the time of day."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    choices = [RUNS / stamp, *(RUNS / f"{stamp}-{number}" for number in range(2, 1000))]
    return next(path for path in choices if not path.exists())


def newest() -> Path:
    """Find the run that was started last below `runs`."""
    runs = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: (path.stat().st_mtime_ns, path))
    if not runs:
        raise UserError(f"there is no run to resume in {RUNS}/; name its directory with --out DIR")
    return runs[-1].parent


class Run:
    """The directory of one run and its metrics, which only ever grow but for `rewind`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def refuse_overwriting(self, force: bool) -> None:
        """Stop when something is in the way: without `force` anything, with it what is no run."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise UserError(f"{self.path} is a file or below one; --out must name a directory") from None
        except OSError as error:
            raise UserError(f"can't read {self.path}: {(error.strerror or str(error)).lower()}") from None
        # every run has its lock: a stray config.json without one belongs to something else
        foreign = [name for name in names if not _is_own(name) or LOCK not in names]
        if foreign:
            raise UserError(f"{self.path} holds other things than a run ({foreign[0]!r:.60}); choose another --out")
        # what is left when a run was killed before it began: with config.json it begins
        beginnings = {LOCK, DATA, DATA + files.SUFFIX, CONFIG + files.SUFFIX}
        if set(names) - beginnings and not force:
            raise UserError(f"{self.path} already holds a run; add --resume to go on or --force to start over")

    def create(self, config: Config, manifest: str) -> None:
        """Make the directory and write what the run is. config.json comes last: with it the run exists."""
        try:
            for name in sorted(os.listdir(self.path)):
                if name != LOCK:
                    (self / name).unlink()
        except OSError as error:
            raise UserError(f"can't empty {self.path}: {(error.strerror or str(error)).lower()}") from None
        files.write(self / DATA, manifest)
        files.write(self / CONFIG, config.to_json())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out of the directory. The system lets go of the lock however this one ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self / LOCK, "a")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"can't use {self.path}: {(error.strerror or str(error)).lower()}") from None
        with lock:
            if os.name == "posix":
                import fcntl

                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"{self.path} is in use by another process; wait or choose another --out") from None
                except OSError:
                    # a file system without locks: go on without, as on any other system that has none
                    pass
            yield

    def config(self) -> Config:
        """Read what the run is."""
        where = self / CONFIG
        if not where.is_file():
            raise UserError(f"there is no run in {self.path} (no {CONFIG}); leave out --resume to start one")
        try:
            text = where.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"can't read {where}: {(error.strerror or str(error)).lower()}") from None
        except UnicodeDecodeError:
            raise UserError(f"{where}: is no JSON (not UTF-8)") from None
        return from_json(text, f"{where}: ")

    def checkpoint(self) -> checkpoint.Checkpoint | None:
        """Read the checkpoint; None when the run ended before its first."""
        where = self / checkpoint.NAME
        return checkpoint.load(where) if where.exists() else None

    def append(self, lines: str) -> int:
        """Add to the metrics, bring them to the disk, return their length."""
        try:
            with open(self / METRICS, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            raise UserError(f"can't write {self / METRICS}: {(error.strerror or str(error)).lower()}") from None

    def rewind(self, length: int) -> None:
        """Cut the metrics to what they were at the checkpoint."""
        where = self / METRICS
        try:
            size = where.stat().st_size if where.exists() else 0
            if size < length:
                raise UserError(f"{where} has {size:,} bytes, fewer than the {length:,} at the checkpoint; put it back")
            with open(where, "ab") as file:
                file.truncate(length)
        except OSError as error:
            raise UserError(f"can't write {where}: {(error.strerror or str(error)).lower()}") from None

    def metrics(self) -> str:
        return (self / METRICS).read_text(encoding="utf-8")
