"""Measuring on a CPU from a script: cases that are no part of a spec, in the bench's own records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from onepass.core.spec import Case

from .session import Session
from .timers import CpuTimer


def measure(folder: str, cases: Sequence[Case], json: Path, *, measure_ms: float = 60.0) -> int:
    """Time all implementations of each case in turn, show tables and write records; 1 when one of ours failed.

    `us` is with cold caches, `host_us` with warm ones; the share of copy is against a copy on this CPU.
    `onepass bench --report` renders the file.
    """
    session = Session([(folder, case) for case in cases], "cpu", Console(highlight=False, width=120), json)
    return session.run(CpuTimer(measure_ms=measure_ms))
