"""Compiling before measuring: the same cases in several processes, which leave what they compile in caches on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    # the processes are many already: none starts a pool of its own
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def warm(arguments: Sequence[str], part: tuple[int, int], processes: int) -> float:
    """Run `onepass bench <arguments> --compile-only` on `part` (the I-th of N) in so many processes; seconds spent."""
    began = time.perf_counter()
    first, every = part
    command = [sys.executable, "-m", "onepass", "bench", *arguments, "--compile-only", "--part"]
    started = [_start([*command, f"{first + every * i}/{every * processes}"]) for i in range(processes)]
    for process in started:
        # a part without a case ends with an error; what can't compile is told by the measurement
        process.wait()
    return time.perf_counter() - began
