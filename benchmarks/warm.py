"""Compile before measuring: several processes run the same cases and fill the compilers' caches on disk."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.bench import runner
from benchmarks.bench.timers import Timer
from benchmarks.case import Case


class Untimed:
    """Stands in for a timer: every implementation is called and compared, none is timed."""

    def __init__(self, timer: Timer) -> None:
        self.synchronize, self.held_bytes, self.peak_bytes = timer.synchronize, timer.held_bytes, timer.peak_bytes

    def us(self, call: Callable[[], Any]) -> float:
        return math.nan

    def host_us(self, call: Callable[[], Any]) -> float:
        return math.nan

    def copy_gbps(self) -> float:
        return math.nan


def compile_only(cases: Sequence[tuple[str, Case]], timer: Timer, *, limit_s: float = 0.0) -> None:
    """Call every implementation once, so that compilers' caches on disk know it; the measurement reports errors."""
    for _ in runner.run(cases, Untimed(timer), limit_s=limit_s):
        pass


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # there are many processes already, so none starts a pool of its own
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "BENCHMARKS_COMPILE_ONLY": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def warm(arguments: Sequence[str], part: tuple[int, int], processes: int) -> float:
    """Run `benchmarks <arguments> --compile-only` on `part` (the I-th of N) in so many processes; seconds spent."""
    began = time.perf_counter()
    first, every = part
    command = [sys.executable, "-m", "benchmarks", *arguments, "--compile-only", "--part"]
    started = [_start([*command, f"{first + every * i}/{every * processes}"]) for i in range(processes)]
    for process in started:
        # a part without a case ends with an error; the measurement reports what can't compile
        process.wait()
    return time.perf_counter() - began
