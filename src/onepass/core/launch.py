"""Which path a tensor takes, and the few facts every Triton launch needs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Triton decides this when a kernel is decorated, so it can't change after import either.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# "auto" takes Triton wherever it runs; "torch" forces the plain path (to compare, or to let Inductor fuse).
BACKEND = os.environ.get("ONEPASS_BACKEND", "auto")

# Every launch states this, unless it states otherwise: Triton 3.9 warns that the default changes in 3.10.
OPTIONS = {"enable_fp_fusion": True}


@functools.cache
def triton_installed() -> bool:
    """True when `import triton` would find a package; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def path(x: Tensor) -> tuple[str, str]:
    """("triton" | "torch", why) for a tensor like x: what `onepass doctor` shows."""
    if BACKEND == "torch":
        return "torch", "ONEPASS_BACKEND=torch"
    if not triton_installed():
        return "torch", "Triton is not installed"
    if x.dtype == torch.float64:
        return "torch", "float64: the kernels compute in float32"
    if x.is_cuda:
        return "triton", f"{x.device} with Triton"
    if INTERPRET:
        return "triton", "TRITON_INTERPRET=1"
    return "torch", f"device {x.device.type} has no Triton path"


def uses_triton(x: Tensor) -> bool:
    """Tell whether a tensor like x goes to the Triton kernels: `path` without the words, for the hot path."""
    return (x.is_cuda or INTERPRET) and x.dtype != torch.float64 and BACKEND != "torch" and triton_installed()


_INT32_MAX = 2**31 - 1


class Compiled(NamedTuple):
    """A compiled kernel: `run(*grid, stream, *head, *pointers, *numbers, *constants)` launches it."""

    run: Any
    head: tuple[Any, ...]
    get_device: Any
    get_stream: Any
    hooks: Any
    kernel: Any  # keeps the id in the key taken


_compiled: dict[tuple[Any, ...], Compiled] = {}


class _Recording(threading.local):
    recorder: Any = None


_recording = _Recording()


def is_recording() -> bool:
    """Whether launches of this thread are being noted."""
    return _recording.recorder is not None


@contextlib.contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Tell `recorder.launched` of every launch in this thread."""
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None


def launch_specialized(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch `kernel[grid](*args, **options)` as Triton does, compiled for what it finds in the arguments.

    The only place that may: a recorder hears of every launch, of this one that it can't be replayed.
    """
    if _recording.recorder is not None:
        _recording.recorder.refuse()
    return kernel[grid](*args, **(OPTIONS | options))


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """Launch `kernel[grid](*tensors, *numbers, *constants, **options)` without Triton's work per call.

    Triton binds every argument anew at each launch to find out which compilation it needs; with two dozen arguments
    this takes longer than a small kernel runs. The answer depends only on what is the key here, as long as pointers
    are 16-byte aligned and integers fit 32 bits (kernels take theirs as `do_not_specialize`, and floats must be
    floats). In any other case, and while a profiler's launch hooks are set, the launch is Triton's own.
    """
    first = tensors[0]
    if INTERPRET or first is None or not first.is_cuda or max(numbers) > _INT32_MAX:
        launch_specialized(kernel, grid, *tensors, *numbers, *constants, **options)
        return
    pointers: list[int | None] = []
    device = first.device.index
    key: list[Any] = [id(kernel), device, constants, *options.items()]
    alignment = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            key.append(None)
        else:
            pointer = tensor.data_ptr()
            alignment |= pointer
            pointers.append(pointer)
            key.append(tensor.dtype)
    entry = _compiled.get(tuple(key))
    if entry is None or alignment & 15 or entry.hooks.launch_enter_hook.calls or entry.hooks.launch_exit_hook.calls:
        compiled = launch_specialized(kernel, grid, *tensors, *numbers, *constants, **options)
        if not alignment & 15:
            _remember(tuple(key), kernel, compiled)
        return
    if _recording.recorder is not None:
        _recording.recorder.launched(entry, grid, tensors, (*numbers, *constants))
    entry.run(*grid, entry.get_stream(device), *entry.head, *pointers, *numbers, *constants)


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any) -> None:
    """Keep a compiled kernel if this Triton is built as we know it; with another one every launch is the plain one."""
    from triton import knobs
    from triton.runtime import driver

    hooks = knobs.runtime
    known = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
    if known and hasattr(hooks.launch_enter_hook, "calls") and hasattr(hooks.launch_exit_hook, "calls"):
        run: Any = compiled.run
        head: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        if _only_calls_c(run):
            options = (run.launch_cooperative_grid, run.launch_pdl)
            head = (compiled.function, *options, None, None, compiled.packed_metadata, None, None, None)
            run = run.launch
        active = driver.active
        get_device = getattr(torch._C, "_cuda_getDevice", active.get_current_device)
        _compiled[key] = Compiled(run, head, get_device, active.get_current_stream, hooks, kernel)


def _only_calls_c(launcher: Any) -> bool:
    """Whether it is the launcher of Triton 3.6 with no more to do than call its C function, 1 to 2 µs of Python."""
    from triton import __version__

    return (
        __version__.startswith("3.6.")
        and type(launcher).__name__ == "CudaLauncher"
        # no tensor descriptors to unpack, no memory to allocate
        and isinstance(launcher.launch, types.BuiltinFunctionType)
        and launcher.global_scratch_size == launcher.profile_scratch_size == 0
    )


_NO_GUARD = contextlib.nullcontext()


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch on x's device, not on the current one; free when they agree."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(x.device)


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(x: Tensor) -> int:
    """Number of multiprocessors of x's GPU (4 under the interpreter, where programs run one after another)."""
    return _sm_count(x.device.index) if x.is_cuda else 4


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two ≥ n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """(..., n) → (rows, n) with unit column stride, as a view wherever strides allow one.

    A slice, a row step or an expanded leading dimension stays a view; only a
    layout that no (row stride, 1) pair describes is copied.
    """
    n = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), n)
    return rows if n <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def aligned(x: Tensor) -> Tensor:
    """X, or a copy of it where it does not start on a 16-byte boundary.

    How wide loads are decides which thread adds up what: the bits of a sum would depend on where x lies.
    """
    return x if x.data_ptr() % 16 == 0 else x.clone()


def even_rows(x: Tensor, unit: int = 16) -> Tensor:
    """X (..., n) with unit column stride, or a copy where its rows start less evenly than those of a contiguous one.

    Then a launch takes gcd(unit, n) for what divides all strides, whatever they are, and sums are in one order.
    """
    divisor = math.gcd(unit, x.shape[-1])
    even = all(s % divisor == 0 for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return aligned(x) if even else x.contiguous()
