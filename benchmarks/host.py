"""What an eager call of the norms and of weighted_sum costs the host, µs: median (minimum).

python benchmarks/host.py [--calls 2000]

On a GPU the calls are real, ten between two waits; below an operator stand its launches, kernel by kernel. Without
a GPU, CPU tensors take the kernels' path and the launches do nothing: the time of the Python code, of allocations on a
CPU and of the autograd engine without its threads.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.core.launch import compiled as core
from onepass.core.launch import replay
from onepass.ops._shared import kernels_partials
from onepass.ops.norm import launch as norm_launch
from onepass.ops.norm import plain as norm_op
from onepass.ops.weighted_sum import kernels_triton as sum_kernels
from onepass.ops.weighted_sum import op as sum_op

ON_GPU = torch.cuda.is_available()
SHAPES = ((64, 1024), (64, 8192), (64, 16384), (16, 65536))
# a C function that takes anything and does nothing
NOTHING = memoryview(b"").__exit__


class Nothing(torch.autograd.Function):
    """What autograd takes for itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """Keep both, compute nothing."""
        ctx.save_for_backward(x, w)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Compute nothing."""
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def without_gpu() -> None:
    """Let CPU tensors take the path of CUDA tensors, up to the launch."""
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[]))
    head = (None, False, True, None, None, None, None, None, None)
    entry = core.Compiled(NOTHING, head, lambda: None, lambda index: 0, hooks, None)

    def launch(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        if core._recording.listener is not None:
            core._recording.listener.launched(entry, grid, tensors, (*numbers, *constants))

    for module in (norm_launch, sum_kernels, kernels_partials):
        module.launch = launch
    norm_launch.sm_count = sum_kernels.sm_count = lambda x: 132
    norm_launch.dependent_launch = lambda x: True
    for module in (norm_op, sum_op):
        module.uses_triton = lambda x: True
    replay._on_gpu = lambda x: type(x) in replay.PLAIN_TYPES
    # a call on the CPU would try torch's own operator first
    dict(zip(norm_op.norm.__code__.co_freevars, norm_op.norm.__closure__, strict=True))["native"].cell_contents = None


def microseconds(call: Callable[[], Any], calls: int) -> list[float]:
    """Return the time of each call; nothing waits for the device but every tenth."""
    times = []
    for i in range(calls):
        if ON_GPU and i % 10 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append(1e-3 * (time.perf_counter_ns() - start))
    return times[calls // 10 :]


def show(times: list[float]) -> str:
    """Median (minimum)."""
    return f"{statistics.median(times):6.1f} ({min(times):5.1f})"


@contextlib.contextmanager
def launches_timed() -> Iterator[dict[str, list[float]]]:
    """Time every launch of the kernels that are known by now, in the calls that are recorded from now on."""
    found: dict[str, list[float]] = {}

    def timed(run: Any, name: str) -> Any:
        def call(*args: Any) -> None:
            start = time.perf_counter_ns()
            run(*args)
            found.setdefault(name, []).append(1e-3 * (time.perf_counter_ns() - start))

        return call

    before = dict(core._compiled)
    for key, entry in before.items():
        core._compiled[key] = entry._replace(run=timed(entry.run, entry.kernel.__name__))
    yield found
    core._compiled.update(before)


def operators(x: Tensor, w: Tensor, b: Tensor) -> Iterator[tuple[str, Callable[[], Tensor], tuple[Tensor, ...]]]:
    """(name, forward, what gradients are asked for)."""
    yield "layer_norm", lambda: onepass.layer_norm(x, w, b), (x, w, b)
    yield "rms_norm", lambda: onepass.rms_norm(x, w), (x, w)
    yield "weighted_sum", lambda: onepass.weighted_sum(x, w), (x, w)
    if ON_GPU:
        yield "F.layer_norm", lambda: F.layer_norm(x, w.shape, w, b), (x, w, b)
    yield "nothing", lambda: Nothing.apply(x, w), (x, w)  # type: ignore[no-untyped-call]


def inputs_of(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and b, which all want gradients."""
    device = "cuda" if ON_GPU else "cpu"
    sizes = ((rows, cols), (cols,), (cols,))
    x, w, b = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes)
    return x, w, b


def calls_of(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the backward pass alone, and forward with `.backward()`."""
    y = forward()
    dy = torch.randn_like(y)

    def both() -> None:
        forward().backward(dy)
        for t in inputs:
            t.grad = None

    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True), both


def show_launches(name: str, rows: int, cols: int, n_calls: int) -> None:
    """Print what the launches of forward and backward take, kernel by kernel."""
    with launches_timed() as launches:
        # another number of rows runs the same kernels, and its second call is recorded with the clocks in it
        for other, forward, inputs in operators(*inputs_of(rows + 8, cols)):
            if other == name:
                microseconds(calls_of(forward, inputs)[1], n_calls)
    for kernel, times in launches.items():
        print(f"    launch of {kernel:24} {show(times)}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000, help="per number (default 2000)")
    n_calls = parser.parse_args().calls
    torch.set_num_threads(1)
    if not ON_GPU:
        without_gpu()
    print(
        f"torch {torch.__version__}, bf16, {torch.cuda.get_device_name() if ON_GPU else 'no GPU: launches do nothing'}"
    )
    for rows, cols in SHAPES:
        print(f"-- {rows}x{cols}")
        for name, forward, inputs in operators(*inputs_of(rows, cols)):
            backward, both = calls_of(forward, inputs)
            with torch.no_grad():
                found = {"no gradients": microseconds(forward, n_calls)}
            found["forward"] = microseconds(forward, n_calls)
            found["backward"] = microseconds(backward, n_calls)
            found["forward + .backward()"] = microseconds(both, n_calls)
            if ON_GPU:
                with torch.autograd.set_multithreading_enabled(False):
                    found["in one thread"] = microseconds(both, n_calls)
            print(f"{name:13}" + "".join(f" {stage} {show(times)} " for stage, times in found.items()))
            if ON_GPU:
                show_launches(name, rows, cols, n_calls // 4)


if __name__ == "__main__":
    main()
