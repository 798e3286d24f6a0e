"""A GPU made of CPU tensors, for tests of what is launched and replayed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from onepass.core import launch as core
from onepass.core.replay import replayed


class FakeGpu:
    """A GPU made of CPU tensors: one kernel, y = a·x (+ b), whose launches are seen."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.hooks = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
        )
        self.device: Any = None

    def launch(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], a: float) -> None:
        """What `core.launch.launch` does with a kernel that it remembers."""
        entry = core.Compiled(self.run, ("head",), lambda: self.device, lambda device: "stream", self.hooks, None)
        if core._recording.recorder is not None:
            core._recording.recorder.launched(entry, grid, tensors, (a,))
        self.run(*grid, "stream", "head", *(None if t is None else t.data_ptr() for t in tensors), a)

    def run(self, *args: Any) -> None:
        self.launched.append(args)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """`function` with a memory, and how often it ran as written."""
    calls = [0]

    def run(*args: Any) -> Any:
        calls[0] += 1
        return function(*args)

    return replayed(run), calls
