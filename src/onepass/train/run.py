"""A run's directory: made, opened again, never overwritten unasked, used by one process at a time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from onepass.core.errors import UserError, reason
from onepass.train import checkpoint, files, metrics, progress
from onepass.train.checkpoint import Checkpoint
from onepass.train.config import Config, from_json

CONFIG, DATA, METRICS, LOSS, LOCK = "config.json", "data.json", "metrics.jsonl", "loss.png", ".lock"
PICTURE = "routing"  # of .html and .png; `onepass show` puts the file's name in front
_OWN = {CONFIG, DATA, METRICS, LOSS, LOCK, checkpoint.NAME, f"{PICTURE}.html", f"{PICTURE}.png"}
_SHOWN = re.compile(rf".+\.{PICTURE}\.(html|png)", re.DOTALL)
RUNS = Path("runs")


def _is_own(name: str) -> bool:
    name = files.partial_of(name) or name
    return name in _OWN or bool(_SHOWN.fullmatch(name))


def fresh_out() -> Path:
    """Make a new directory named after the time of day; two runs that start together get one each."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    for name in (stamp, *(f"{stamp}-{number}" for number in range(2, 1000))):
        try:
            (RUNS / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"can't make {RUNS / name}: {reason(error)}") from None
        return RUNS / name
    raise UserError(f"can't find a free name like {RUNS / stamp}; choose one with --out DIR")


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
        self.mark = metrics.Mark()  # where the metrics end
        self._lock: os.stat_result | None = None  # the lock file that we hold

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def refuse_absent(self) -> None:
        """Stop when there is no run to go on with."""
        if not self.path.is_dir():
            raise UserError(f"there is no run in {self.path} (no such directory); leave out --resume to start one")
        if not (self / CONFIG).is_file():
            raise UserError(f"there is no run in {self.path} (no {CONFIG}); leave out --resume to start one")

    def refuse_overwriting(self, force: bool) -> None:
        """Stop when something is in the way: without `force` anything, with it what is no run."""
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise UserError(f"{self.path} is a file or below one; --out must name a directory") from None
        except OSError as error:
            raise UserError(f"can't read {self.path}: {reason(error)}") from None
        # every run has its lock: a stray config.json without one belongs to something else
        foreign = [name for name in names if not _is_own(name) or LOCK not in names]
        if foreign:
            raise UserError(f"{self.path} holds other things than a run ({foreign[0]!r:.60}); choose another --out")
        # a run that was killed before it began may be lost: with config.json it begins
        begun = [name for name in names if name not in {LOCK, DATA} and files.partial_of(name) not in {DATA, CONFIG}]
        if begun and not force:
            raise UserError(f"{self.path} already holds a run; add --resume to go on or --force to start over")

    def create(self, config: Config, manifest: str) -> None:
        """Empty the directory and write what the run is. config.json goes first and comes last: it makes the run."""
        try:
            for name in sorted(os.listdir(self.path), key=lambda name: (name != CONFIG, name)):
                if name != LOCK:
                    (self / name).unlink()
        except OSError as error:
            raise UserError(f"can't empty {self.path}: {reason(error)}") from None
        self.write(DATA, manifest)
        self.write(CONFIG, config.to_json())

    def write(self, name: str, content: bytes | str) -> None:
        """Put a file into the directory, if that is still ours."""
        self.refuse_replaced()
        files.write(self / name, content)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out of the directory. The system lets go of the lock however this one ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"can't use {self.path}: {reason(error)}") from None
        try:
            handle = files.open_regular(self / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UserError(f"can't use {self / LOCK}: {reason(error)}") from None
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
        """Stop when the path no longer leads to the directory that we locked: another process may own what is there."""
        if self._lock is None:
            return
        try:
            same = os.path.samestat(os.lstat(self / LOCK), self._lock)
        except OSError:
            same = False
        if not same:
            raise UserError(f"{self.path} was moved, replaced or emptied while this run was using it")

    def _sweep(self) -> None:
        """Remove the unfinished files of processes that were killed; `onepass show` may be writing one of its own."""
        for name in os.listdir(self.path):
            if files.partial_of(name) in _OWN:
                with contextlib.suppress(OSError):
                    (self / name).unlink()

    def config(self) -> Config:
        """Read what the run is."""
        where = self / CONFIG
        try:
            text = files.read(where).decode()
        except UnicodeDecodeError:
            raise UserError(f"{where}: is no JSON (not UTF-8)") from None
        return from_json(text, f"{where}: ")

    def checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint; None when the run ended before its first."""
        where = self / checkpoint.NAME
        # a link to nowhere is there: its checkpoint may come back
        return checkpoint.load(where) if os.path.lexists(where) else None

    def append(self, rows: Sequence[metrics.Row]) -> None:
        """Add to the metrics and bring them to the disk."""
        lines, after = metrics.written(rows, self.mark)
        self.refuse_replaced()
        files.extend(self / METRICS, lines, self.mark.length)
        self.mark = after

    def rewind(self, saved: Checkpoint | None) -> None:
        """Cut the metrics to what they were at the checkpoint, having seen that they are whole so far."""
        where = self / METRICS
        if saved is None and where.exists() and where.stat().st_size:
            # a checkpoint comes before the first row
            raise UserError(f"{self / checkpoint.NAME} is gone; put it back, or start over with --force")
        self.mark = self.verify(saved) if saved else metrics.Mark()
        self.refuse_replaced()
        files.cut(where, self.mark.length)

    def verify(self, saved: Checkpoint) -> metrics.Mark:
        """See that the metrics are whole up to a checkpoint and belong to it; return the place there."""
        where, length = self / METRICS, saved.metrics_bytes
        size = where.stat().st_size if where.exists() else 0
        if size < length:
            raise UserError(f"{where} has {size:,} bytes, fewer than the {length:,} at the checkpoint; put it back")
        last = deque(self._parsed(length), maxlen=1)
        mark = last[0][1] if last else metrics.Mark()
        # checkpoints from before there were digests name none
        if saved.metrics_digest not in (None, mark.digest):
            raise UserError(f"{where} can't be used: it is of another run than {checkpoint.NAME}; put it back")
        return mark

    def rows(self) -> Iterator[metrics.Row]:
        """Read the metrics that were written so far."""
        return (row for row, _ in self._parsed(self.mark.length))

    def _parsed(self, length: int) -> Iterator[tuple[metrics.Row, metrics.Mark]]:
        where = self / METRICS
        if not length:
            return
        try:
            with os.fdopen(files.open_regular(where, os.O_RDONLY), "rb") as file:
                yield from metrics.parsed(_lines(file, length), where)
        except OSError as error:
            raise UserError(f"can't read {where}: {reason(error)}") from None


def _lines(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length > 0 and (line := file.readline(length)):
        length -= len(line)
        yield line


def _lock(handle: int, path: Path) -> bool:
    """Lock a file for this process alone; False where the file system or the system has neither kind of lock."""
    if os.name != "posix":
        return False
    import fcntl

    for take in (fcntl.flock, fcntl.lockf):
        try:
            take(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"{path} is in use by another process; wait or choose another --out") from None
        except OSError:
            continue
        return True
    return False


def _unlock(handle: int) -> None:
    """Let go at once: a child that was forked meanwhile would keep the lock as long as it lives."""
    if os.name != "posix":
        return
    import fcntl

    for take in (fcntl.flock, fcntl.lockf):
        with contextlib.suppress(OSError):
            take(handle, fcntl.LOCK_UN)
