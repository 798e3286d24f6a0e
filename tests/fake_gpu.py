"""A GPU made of CPU tensors, for tests of what is launched and replayed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.core.launch import compiled as core
from onepass.core.launch import replay, replayed


def no_hooks() -> SimpleNamespace:
    """Return what a launch asks of Triton's hooks, of which there are none."""
    return SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))


class FakeGpu:
    """A GPU made of CPU tensors: one kernel, y = a·x (+ b), whose launches are seen."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.hooks = no_hooks()
        self.device: Any = None
        # whether the launcher takes the kernel's own arguments as one tuple
        self.packed = False

    def launch(self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], a: float) -> None:
        """What `core.launch.launch` does with a kernel that it remembers."""
        device, stream = (lambda: self.device), (lambda device: "stream")
        entry = core.Compiled(self.run, ("head",), device, stream, self.hooks, None, self.packed)
        if core._recording.listener is not None:
            core._recording.listener.launched(entry, grid, tensors, (a,))
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        self.run(*core.launch_arguments(grid, "stream", entry.head, pointers, (a,), self.packed))

    def run(self, *args: Any) -> None:
        self.launched.append(args)


def counted(function: Callable[..., Any], *state: Callable[[], Any]) -> tuple[Callable[..., Any], list[int]]:
    """`function` with a memory, and how often it ran as written."""
    calls = [0]

    def run(*args: Any) -> Any:
        calls[0] += 1
        return function(*args)

    return replayed(run, *state), calls


def scale(gpu: FakeGpu) -> Callable[..., Any]:
    """Return a call of two launches: y = a·x (+ b), and sums."""

    def run(x: Tensor, bias: Tensor | None, a: float) -> tuple[Tensor, Tensor | None]:
        y, sums = torch.empty_like(x), torch.zeros(3, len(x), dtype=torch.float64)
        gpu.launch((len(x), 1, 1), (x, bias, y, sums), a)
        gpu.launch((1, 1, 1), (x[None], sums[0]), a)
        return y, None

    return run


def everywhere(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Put functions in the place of those that modules of the package, all kernels' among them, have by these names."""
    import onepass

    for found in pkgutil.walk_packages(onepass.__path__, "onepass."):
        if ".kernels" in found.name:
            importlib.import_module(found.name)
    for name, module in [*sys.modules.items()]:
        for key in functions.keys() & vars(module).keys() if name.startswith("onepass.") else ():
            if callable(vars(module)[key]):
                monkeypatch.setattr(module, key, functions[key])


class Host:
    """CPU tensors that take the way of CUDA tensors; counts launches, and how often a stretch of a node ran as written.

    `nodes`: modules whose functions made by `replayed` get a memory of their own; of one name the first module's.
    """

    # a class's: what one test recorded another may replay
    launches = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: Any) -> None:
        Host.launches = 0
        self.written: Counter[str] = Counter()

        def run(*args: Any) -> None:
            Host.launches += 1

        entry = core.Compiled(run, (None,), lambda: None, lambda device: None, no_hooks(), None)

        def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
            if core._recording.listener is not None:
                core._recording.listener.launched(entry, grid, tensors, (*numbers, *constants))
            run()

        everywhere(monkeypatch, launch=launch, uses_triton=lambda *tensors: True)
        monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
        code = replayed(print).__code__
        found = [(name, node) for node in nodes for name, f in vars(node).items() if getattr(f, "__code__", 0) is code]
        self.stretches = dict(reversed(found))
        for name, node in self.stretches.items():
            monkeypatch.setattr(node, name, self._counted(name, getattr(node, name)))

    def _counted(self, name: str, stretch: Any) -> Callable[..., Any]:
        def written(*args: Any) -> Any:
            self.written[name] += 1
            return stretch.__wrapped__(*args)

        return replayed(written)


def autocast_pass(layer: torch.nn.Module, x: Tensor, mask: Tensor | None = None, **cast: Any) -> Tensor:
    """Forward and backward under bf16 autocast; all gradients are asked for."""
    with torch.autocast("cpu", torch.bfloat16, **cast):
        y = layer(x, mask)
    assert isinstance(y, Tensor)
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    return y


def launches(layer: torch.nn.Module, x: Tensor) -> tuple[int, int]:
    """Launches of a forward pass, and of one with its backward pass, once everything is replayed."""
    for _ in range(3):
        autocast_pass(layer, x)
    Host.launches = 0
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    forward = Host.launches
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    return forward, Host.launches


def torch_calls_of_a_pass(layer: torch.nn.Module, x: Tensor) -> Counter[str]:
    """What torch is called for by both passes, once everything is replayed; not what that calls in turn."""
    for _ in range(3):
        autocast_pass(layer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        autocast_pass(layer, x)
    found = Counter(
        e.name.removeprefix("aten::")
        for e in seen.events()
        if e.name.startswith("aten::") and (e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::"))
    )
    for own in ("ones_like", "to"):  # of the test: the gradient; of a CPU: products that give fp32 are cast
        del found[own]
    return found
