"""What a run of `research.ablate` shows while it goes on: a bar on a terminal, else one line when it is done."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from onepass.train.progress import clock, say


class Display:
    """A context around one run; `update` after every measurement."""

    def __init__(self, title: str, steps: int) -> None:
        self.title, self.steps = title, steps
        self.started = time.perf_counter()
        self.bar: Any = None
        self.last = (0, "")

    def __enter__(self) -> Display:
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            what, figures = TextColumn("{task.description}"), TextColumn("{task.fields[at]}")
            self.bar = Progress(what, BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn(), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.steps, at="")
        return self

    def update(self, step: int, figures: dict[str, Any]) -> None:
        """Show the first few figures of a measurement."""
        short = [f"{name} {value:.3f}" for name, value in figures.items() if name != "step"][:3]
        self.last = step, "  ".join(short)
        if self.bar:
            self.bar.update(self.task, completed=step, at=self.last[1])

    def __exit__(self, kind: object, *rest: object) -> None:
        if self.bar:
            self.bar.stop()
        if kind is None:
            step, figures = self.last
            cut = "" if step == self.steps else f" (stopped after {step:,} of {self.steps:,} steps)"
            say(f"{self.title:32}  {figures}  {clock(time.perf_counter() - self.started)}{cut}")
