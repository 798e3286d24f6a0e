"""Progress output of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from onepass.train.commands.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress

LINES = 20  # plain lines per run


def size(count: int) -> str:
    """Write a number of bytes as 620 bytes, 84.0 kB or 10.4 MB."""
    return f"{count:,} bytes" if count < 1000 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"


def say(text: str = "") -> None:
    """Print one line and flush it, also into a pipe."""
    # escape what the terminal's encoding lacks, which would raise, and control characters from file names
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(printable(text).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


class Display:
    """Show loss, bits per byte, tokens/s and time left of a run of `total` steps that starts at `step`."""

    def __init__(self, total: int, step: int) -> None:
        self.total, self.first = total, step
        self.started = time.perf_counter()
        self.line = -1  # number of the last plain line
        self.bar: Progress | None = None
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._start_bar(step)

    def _start_bar(self, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bar = Progress(
            MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[state]}", markup=False),
            console=Console(file=sys.stdout, highlight=False), expand=True,
        )  # fmt: skip
        self.bar.start()
        self.task = self.bar.add_task("train", total=self.total, completed=step, state="first steps …")

    def update(self, step: int, loss: float, bits: float, speed: float) -> None:
        """Show the state after `step` steps; without a terminal, about LINES times per run."""
        done = step - self.first
        left = timedelta(seconds=round((time.perf_counter() - self.started) / max(done, 1) * (self.total - step)))
        state = f"loss {loss:.3f}  {bits:.2f} bits/byte  {speed:,.0f} tokens/s  {left} left"
        if self.bar:
            self.bar.update(self.task, completed=step, state=state)
        elif step * LINES // self.total != self.line or step == self.total:
            self.line = step * LINES // self.total
            say(f"step {step:>{len(str(self.total))}}/{self.total}  {state}")

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.bar:
            self.bar.console.print(printable(text), markup=False)
        else:
            say(text)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
