"""How many CPU threads a run takes: as many as the machine has cores to spare.

Threads of one operation wait for each other. Where other processes hold a core, each wait lasts until the system runs
the late thread again: two threads on two cores beside two busy processes are slower than one thread
(benchmarks/results/cpu/raw/train_threads.txt).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

SAMPLE = 0.1  # seconds of watching, ten ticks of the counters in /proc/stat


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def idle_cores() -> float | None:
    """Return how many of our cores are idle now while this process sleeps; None where the system does not tell."""
    before = _ticks()
    if before:
        time.sleep(SAMPLE)
        shares = [_share(then, now) for then, now in zip(before, _ticks(), strict=False)]
        if any(share is not None for share in shares):
            return sum(share or 0.0 for share in shares)
    try:
        return max(0.0, cores() - os.getloadavg()[0])
    except (OSError, AttributeError):
        return None


def _ticks() -> list[tuple[int, int]]:
    """Return (idle, all) ticks of each of our cores since the machine started; empty except on Linux."""
    try:
        ours = os.sched_getaffinity(0)
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        rows = [(line[0], [int(value) for value in line[1:9]]) for line in lines if line[0][:3] == "cpu"]
        return [(row[3] + row[4], sum(row)) for name, row in rows if name[3:] and int(name[3:]) in ours]
    except (OSError, AttributeError, ValueError, IndexError):
        return []


def _share(then: tuple[int, int], now: tuple[int, int]) -> float | None:
    ticks = now[1] - then[1]
    return (now[0] - then[0]) / ticks if ticks > 0 else None


def busy(idle: float | None, need: int) -> str | None:
    """Return how many of our cores others keep busy, if fewer than `need` are idle."""
    if idle is None or idle > min(need, cores()) - 0.5:
        return None
    return f"other processes keep {max(0.0, cores() - idle):.1f} of {cores()} CPU cores busy"


def threads(wanted: int | None, most: int) -> tuple[int, str | None]:
    """Return the number of threads and, on a loaded machine, a line to print.

    `most` is what torch would take. `wanted` overrides all; OMP_NUM_THREADS is a choice, too.
    """
    idle = idle_cores()
    if wanted is None and "OMP_NUM_THREADS" in os.environ:
        wanted = most
    need = wanted or most
    told = busy(idle, need)
    if told is None or idle is None:
        return need, None
    count = wanted or max(1, min(most, round(idle)))
    plural = "s" * (count > 1)
    if count < need:
        return count, f"{told}: this run takes {count} thread{plural}; --threads N takes N"
    return count, f"{told}: {count} thread{plural} may be slow" + (", and fewer --threads faster" if count > 1 else "")
