"""The directory of a run: created, reopened, overwritten only with --force, used by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onepass.train import checkpoint, metrics, progress
from onepass.train.checkpoint import Checkpoint
from onepass.train.commands import files
from onepass.train.commands.errors import UserError, doing
from onepass.train.config import Config, from_json

CONFIG, DATA, METRICS, LOSS, LOCK = "config.json", "data.json", "metrics.jsonl", "loss.png", ".lock"
LEFT_OUT = "left_out.txt"  # files of the data that were left out, and why
PICTURE = "routing"  # stem of the .html; `onepass show` puts the file's name in front
_FILES = {CONFIG, DATA, LEFT_OUT, METRICS, LOSS, LOCK, checkpoint.NAME, f"{PICTURE}.html"}
RUNS = Path("runs")


def _is_run_file(name: str) -> bool:
    name = files.partial_of(name) or name
    return name in _FILES or name.removesuffix(f".{PICTURE}.html") not in ("", name)


def fresh_out() -> Path:
    """Create a directory named after the current time; a second run in the same second gets another name."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    for name in (stamp, *(f"{stamp}-{number}" for number in range(2, 1000))):
        with doing(f"make {RUNS / name}"), contextlib.suppress(FileExistsError):
            (RUNS / name).mkdir(parents=True)
            return RUNS / name
    raise UserError(f"can't find a free name like {RUNS / stamp}; choose one with --out DIR")


def newest() -> Path:
    """Return the directory of the run below `runs` that was started last."""
    runs = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: (path.stat().st_mtime_ns, path))
    if not runs:
        raise UserError(f"there is no run to resume in {RUNS}/; name its directory with --out DIR")
    return runs[-1].parent


class Run:
    """The directory of a run and its metrics, which only `rewind` shortens; without `writes` another process writes."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.mark = metrics.Mark()  # where the metrics end
        self._digest = hashlib.sha256()  # of the metrics before `mark`
        self._lock: os.stat_result | None = None  # the lock file, while held

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def refuse_overwriting(self, force: bool) -> None:
        """Raise UserError if the directory holds other things than a run, or a run without `force`."""
        names: list[str] = []
        with doing(f"use {self.path} as a directory"), contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(self.path))
        # every run has a lock file: without one, a config.json belongs to something else
        foreign = [name for name in names if not _is_run_file(name) or LOCK not in names]
        if foreign:
            raise UserError(f"{self.path} holds other things than a run ({foreign[0]!r:.60}); choose another --out")
        # a run starts with its config.json: what a process killed before that left may be overwritten
        begun = [name for name in names if name not in {LOCK, DATA} and files.partial_of(name) not in {DATA, CONFIG}]
        if begun and not force:
            raise UserError(f"{self.path} already holds a run; add --resume to go on or --force to start over")

    def create(self, config: Config, manifest: str) -> None:
        """Empty the directory, then write data.json and config.json.

        A directory is a run if it has config.json, so this file is deleted first and written last.
        """
        with doing(f"empty {self.path}"):
            for name in sorted(os.listdir(self.path), key=lambda name: (name != CONFIG, name)):
                if name != LOCK:
                    (self / name).unlink()
        self.write(DATA, manifest)
        self.write(CONFIG, config.to_json())

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file into the directory; raise UserError if the directory was replaced."""
        self.refuse_replaced()
        files.write(self / name, content)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other processes. The system releases the lock however this process ends."""
        with doing(f"use {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with doing(f"use {self / LOCK}"):
            handle = files.open_regular(self / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            if not _lock(handle, self.path):
                progress.say(f"note        {self.path} is on a file system without locks: let one process use it")
            self._lock = os.fstat(handle)
            self.refuse_replaced()
            self._sweep()
            yield
        finally:
            self._lock = None
            _unlock(handle)
            os.close(handle)

    def refuse_replaced(self) -> None:
        """Raise UserError if the path no longer leads to the locked directory: another process may own the new one."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self / LOCK), self._lock):
                return
        raise UserError(f"{self.path} was moved, replaced or emptied while this run was using it")

    def _sweep(self) -> None:
        """Remove unfinished files of killed training processes; those of `onepass show` stay, as it may be at work."""
        for name in os.listdir(self.path):
            if files.partial_of(name) in _FILES:
                with contextlib.suppress(OSError):
                    (self / name).unlink()

    def config(self) -> Config:
        """Read the configuration."""
        return from_json(files.read(self / CONFIG), f"{self / CONFIG}: ")

    def checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint; None if the run ended before its first one."""
        where = self / checkpoint.NAME
        # lexists: a broken link counts as a checkpoint and raises, since its target may come back
        return checkpoint.load(where) if os.path.lexists(where) else None

    def append(self, rows: Sequence[metrics.Row]) -> None:
        """Append rows to the metrics and sync them to disk."""
        if not self.writes:
            return
        lines = b"".join(map(metrics.line, rows))
        self.refuse_replaced()
        files.extend(self / METRICS, lines, self.mark.length)
        self._digest.update(lines)
        self.mark = metrics.Mark(self.mark.length + len(lines), self._digest.hexdigest())

    def rewind(self, saved: Checkpoint | None) -> None:
        """Check the metrics up to the checkpoint and cut off what follows; without a checkpoint, cut all."""
        if not self.writes:
            return
        where = self / METRICS
        if saved is None and where.exists() and where.stat().st_size:
            # the first checkpoint is written before the first row
            raise UserError(f"{self / checkpoint.NAME} is gone; put it back, or start over with --force")
        self.mark = metrics.Mark()
        if saved:
            self._digest, self.mark = self.verify(saved)
        self.refuse_replaced()
        files.cut(where, self.mark.length)

    def verify(self, saved: Checkpoint) -> tuple[Any, metrics.Mark]:
        """Return SHA-256 and mark of the metrics up to a checkpoint; raise UserError if they are not its run's."""
        where, length = self / METRICS, saved.metrics_bytes
        size = where.stat().st_size if where.exists() else 0
        if size < length:
            raise UserError(f"{where} has {size:,} bytes, fewer than the {length:,} at the checkpoint; put it back")
        digest = hashlib.sha256()
        for line in self._lines(length):
            digest.update(line)
        mark = metrics.Mark(length, digest.hexdigest() if length else "")
        if saved.metrics_digest != mark.digest:
            raise UserError(f"{where}: it is damaged, or of another run than {checkpoint.NAME}; put it back")
        return digest, mark

    def rows(self) -> Iterator[metrics.Row]:
        """Read the metrics that were written so far."""
        return (metrics.parsed(line, self / METRICS) for line in self._lines(self.mark.length))

    def _lines(self, length: int) -> Iterator[bytes]:
        where = self / METRICS
        if not length:
            return
        with doing(f"read {where}"), os.fdopen(files.open_regular(where, os.O_RDONLY), "rb") as file:
            while length > 0 and (line := file.readline(length)):
                length -= len(line)
                yield line


def _lock(handle: int, path: Path) -> bool:
    """Lock a file for this process alone; return False if the system can't."""
    if os.name != "posix":
        return False
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(f"{path} is in use by another process; wait or choose another --out") from None
    except OSError:
        return False
    return True


def _unlock(handle: int) -> None:
    """Release the lock explicitly: after a mere close, a forked child would hold it as long as it lives."""
    if os.name == "posix":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
