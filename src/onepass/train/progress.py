"""Progress output of a run: a few lines, on a terminal and elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from onepass.train.commands.errors import printable

LINES = 20  # per run


def size(count: int) -> str:
    """Write a number of bytes as 620 bytes, 84.0 kB or 10.4 MB."""
    return f"{count:,} bytes" if count < 1000 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def say(text: str = "") -> None:
    """Print one line and flush it, also into a pipe."""
    # escape what the terminal's encoding lacks, which would raise, and control characters from file names
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


class Progress:
    """Print loss, bits per byte, tokens/s and time left of a run of `total` steps that starts at `step`."""

    def __init__(self, total: int, step: int) -> None:
        self.total, self.first = total, step
        self.started = time.perf_counter()
        self.line = -1  # number of the last line

    def update(self, step: int, loss: float, bits: float, speed: float) -> None:
        """Print the state after `step` steps, about LINES times per run."""
        before, self.line = self.line, step * LINES // self.total
        if self.line == before and step != self.total:
            return
        done = step - self.first
        left = timedelta(seconds=round((time.perf_counter() - self.started) / max(done, 1) * (self.total - step)))
        state = f"loss {loss:.3f}  {bits:.2f} bits/byte  {speed:,.0f} tokens/s  {left} left"
        say(f"step {step:>{len(str(self.total))}}/{self.total}  {state}")
