"""Launch a kernel through its compiled form, without Triton's work per call."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .backend import INTERPRET

# Default options of every launch: explicit, because Triton 3.9 warns that its own default changes in 3.10.
OPTIONS = {"enable_fp_fusion": True}

_INT32_MAX = 2**31 - 1

Grid = tuple[int, int, int]
T = TypeVar("T")


class Compiled(NamedTuple):
    """A compiled kernel: `run(*launch_arguments(…))` launches it."""

    run: Callable[..., Any]
    head: tuple[Any, ...]  # the launcher's arguments between the stream and the kernel's own arguments
    get_device: Callable[[], int]
    get_stream: Callable[[int], int]
    hooks: Any
    kernel: Any  # keeps the kernel alive, so that id(kernel) stays unique
    packed: bool = False  # `run` takes the kernel's own arguments as one tuple


def launch_arguments(
    grid: Sequence[T], stream: T, head: Sequence[T], pointers: Sequence[T], scalars: Sequence[T], packed: bool
) -> tuple[T | tuple[T, ...], ...]:
    """Return a launch's values, or their names in a replay's program, in the order of Triton's launchers."""
    kernel_arguments = (*pointers, *scalars)
    return (*grid, stream, *head, kernel_arguments) if packed else (*grid, stream, *head, *kernel_arguments)


class _Recording(threading.local):
    # each launch of a compiled kernel calls its `launched`, each other launch its `refuse`
    listener: Any = None


_recording = _Recording()
_compiled: dict[tuple[Any, ...], Compiled] = {}


def is_recording() -> bool:
    """Return whether a listener receives this thread's launches."""
    return _recording.listener is not None


@contextlib.contextmanager
def recording(listener: Any) -> Iterator[None]:
    """Report every launch in this thread to `listener`."""
    _recording.listener = listener
    try:
        yield
    finally:
        _recording.listener = None


def launch_specialized(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch `kernel[grid](*args, **options)` by Triton's own launch, which specializes on the arguments' values.

    Every such launch goes through here, so that a listener refuses to replay the call.
    """
    if _recording.listener is not None:
        _recording.listener.refuse()
    return kernel[grid](*args, **(OPTIONS | options))


def launch(
    kernel: Any, grid: Grid, tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...],
    constants: tuple[Any, ...], **options: Any,
) -> None:  # fmt: skip
    """Launch `kernel[grid](*tensors, *numbers, *constants, **options)` without Triton's work per call.

    Triton binds every argument anew at each launch to find the compilation it needs; with two dozen arguments this
    takes longer than a small kernel runs. Here a dictionary finds it by kernel, device, dtypes, constants and options.
    These decide the compilation as long as pointers are 16-byte aligned and integers fit 32 bits (kernels declare
    their integers `do_not_specialize`, and floats must be floats). In any other case, and while a profiler's launch
    hooks are set, Triton's own launch runs. The device is that of the tensors, whichever is the current one.
    """
    first = tensors[0] if tensors[0] is not None else next(t for t in tensors if t is not None)
    device = first.device.index
    if first.is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, **options)
        return
    if INTERPRET or not first.is_cuda or max(numbers, default=0) > _INT32_MAX:
        launch_specialized(kernel, grid, *tensors, *numbers, *constants, **options)
        return
    pointers: list[int | None] = []
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
    scalars = (*numbers, *constants)
    if _recording.listener is not None:
        _recording.listener.launched(entry, grid, tensors, scalars)
    entry.run(*launch_arguments(grid, entry.get_stream(device), entry.head, pointers, scalars, entry.packed))


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any) -> None:
    """Keep a compiled kernel if it has the attributes used here; with another Triton every launch is Triton's own."""
    from triton import knobs
    from triton.runtime import driver

    hooks = knobs.runtime
    has_attributes = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
    if has_attributes and hasattr(hooks.launch_enter_hook, "calls") and hasattr(hooks.launch_exit_hook, "calls"):
        run, head, packed = _c_function(compiled)
        active = driver.active
        get_device = getattr(torch._C, "_cuda_getDevice", active.get_current_device)
        _compiled[key] = Compiled(run, head, get_device, active.get_current_stream, hooks, kernel, packed)


def _c_function(compiled: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return `run`, `head` and `packed` of a `Compiled`: the launcher's C function if its Python does nothing else.

    Calling the C function directly saves 1 to 2 µs with Triton 3.6, and more with 3.7 to 3.9, whose Python is longer.
    """
    run: Any = compiled.run
    version = _launcher_version(run)
    if version is None:
        return run, (compiled.function, compiled.packed_metadata, None, None, None), False
    options = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if version == "3.6":
        return run.launch, (*options, None, None, compiled.packed_metadata, None, None, None), False
    # metadata and hooks of the launch, scratch memory of kernel and profiler
    unused = (None, None, None, None, None)
    head = (*options, compiled.packed_metadata, *unused, run.arg_annotations, run.kernel_signature)
    return run.launch, head, True


def _launcher_version(launcher: Any) -> str | None:
    """Return Triton's version if this launcher is known to do nothing but call its C function, else None."""
    from triton import __version__

    version = ".".join(__version__.split(".")[:2])
    is_plain = (
        version in ("3.6", "3.7", "3.8", "3.9")
        and type(launcher).__name__ == "CudaLauncher"
        # no tensor descriptors to unpack, no memory to allocate, no sanitizer
        and isinstance(launcher.launch, types.BuiltinFunctionType)
        and launcher.global_scratch_size == launcher.profile_scratch_size == 0
        and not getattr(launcher, "gsan_enabled", False)
    )
    return version if is_plain else None
