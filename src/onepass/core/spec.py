"""What an operator declares about itself in its `spec.py`.

Three kinds of declaration, each with one reader:

* `Spec` → tests/contract: values, gradients, strides, dtypes, errors, compile, torch.func, determinism;
* `Kernel` → tests/codegen: registers, spills and load widths, without a GPU;
* `Case` → `python -m benchmarks`: sizes, byte floors and rivals.

A spec.py holds lists of them: SPECS, KERNELS, CASES. It may also hold RIVALS, a mapping from import name to
distribution ({"liger_kernel": "liger-kernel"}) of the packages that its cases compare with. The bench records their
versions and names those that are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .garbage import collected


class Sample(NamedTuple):
    """One call of an operator: `op(*args, **kwargs)`; floating-point tensors in args and kwargs may need gradients."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never mutated


class BadCall(NamedTuple):
    """A call that must raise: the exception's type and a pattern for its message."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    match: str


class Tolerance(NamedTuple):
    """|ours − float64| ≤ atol + rtol·|float64|; the default holds for row-wise operators with fp32 accumulation."""

    rtol: float
    atol: float


DEFAULT_TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-9, 1e-9),
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}


@dataclass(frozen=True)
class Spec:
    """A functional operator's contract.

    Attributes:
        name: the public name.
        op: the public function.
        reference: the definition in plain torch, same signature; differentiable by autograd; run in float64 by tests.
        samples: `samples(make)` yields `Sample`s; `make(*shape)` gives a random tensor of the dtype and device
            under test (fixed seed), so one declaration serves every dtype and device.
        bad_calls: calls that must raise.
        opchecks: yields (registered op, arguments) for `torch.library.opcheck`.
        tolerances: per dtype, for values.
        grad_factor: the tolerance of gradients, as a multiple of that of values.
        surrogate: gradients are straight-through, not the slopes of the values, so finite differences don't apply.
        of_rows: `of_rows(make, width)` returns functions by name; each maps a tensor (rows, width) to (rows, ...), and
            the bits of a row must depend on this row alone (docs/bits.md).
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[Callable[..., Tensor]], Iterator[Sample]]
    bad_calls: Sequence[BadCall] = ()
    opchecks: Callable[[], Iterator[tuple[Any, tuple[Any, ...]]]] = lambda: iter(())
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    grad_factor: float = 4.0
    surrogate: bool = False
    of_rows: Callable[[Callable[..., Tensor], int], Mapping[str, Callable[[Tensor], Any]]] = lambda make, width: {}


@dataclass(frozen=True)
class Kernel:
    """One compilation of a Triton kernel with its budget.

    Attributes:
        name: shown in the test id.
        fn: thunk that imports and returns the @triton.jit function (Triton stays lazy).
        signature: argument → Triton type ("*bf16", "i32", "fp32", …); constexprs are left out.
        constexprs: argument → value.
        divisible: arguments the launcher guarantees to be multiples of 16.
        num_warps, num_stages: launch options.
        maxnreg: the launch's limit of registers per thread on NVIDIA targets (0: no limit).
        max_registers: budget of registers per thread on NVIDIA targets.
        max_spill_bytes: budget of local memory for spills (0 for everything a launch table uses).
        vector_loads: 16-byte global loads must appear.
        max_amd_spills: budget of spilled vector registers on AMD (0 is the aim; more is what remains to improve).
        amd: False for a kernel that runs on NVIDIA GPUs only (another one does its work on AMD).
        least_arch: the oldest NVIDIA target that it compiles for (another compilation does its work on older ones).
    """

    name: str
    fn: Callable[[], Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int = 0
    max_registers: int = 128
    max_spill_bytes: int = 0
    vector_loads: bool = True
    max_amd_spills: int = 0
    amd: bool = True
    least_arch: int = 80


@dataclass(frozen=True)
class Missing:
    """A rival in `Case.make`'s mapping that can't run here: the bench names it and continues."""

    needs: str


@dataclass(frozen=True)
class Prepared:
    """An implementation that the bench sets up right before timing it, and frees afterwards.

    Use it for set-up that is costly or may fail: a backward pass needs its forward first, a rival may not import.
    `build()` returns the thunk to time. An ImportError inside counts as `Missing`, any other exception as a failure
    of this implementation alone.
    """

    build: Callable[[], Callable[[], Any]]


def optional(import_name: str) -> Any:
    """Return the module `import_name`, or None when it is not installed or does not import here."""
    try:
        return importlib.import_module(import_name)
    except Exception:
        # other people's packages raise anything at import: a missing symbol, an unknown GPU, a version check
        return None


def backward_of(forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Prepared:
    """Return the backward pass of `forward()` with respect to `inputs`, as an implementation to time."""

    def build() -> Callable[[], Any]:
        out = forward()
        return lambda: torch.autograd.grad(out, tuple(inputs), grad, retain_graph=True)

    return Prepared(build)


def graphed(prepare: Callable[[], Callable[[], Any]]) -> Prepared:
    """Return the replay of a CUDA graph of the call that `prepare` returns, as an implementation to time."""

    def build() -> Callable[[], Any]:
        # autograd runs a backward pass on the stream of its forward pass, so both run on the stream of the capture
        new_stream: Any = torch.cuda.Stream
        stream, graph = new_stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run = prepare()
            run()
        torch.cuda.synchronize()
        with collected(), torch.cuda.graph(graph, stream=stream):
            run()
        return graph.replay

    return Prepared(build)


Impl = Callable[[], Any] | Prepared | Missing


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: an operator at one size, ours and the rivals', with its byte floor.

    Attributes:
        op: operator name as the record shows it; results are filed by operator folder.
        stage: "forward", "backward" or "step".
        params: sizes and options of the case, for the record ({"rows": 4096, "cols": 1024}).
        dtype: element type.
        floor_bytes: the fewest bytes that the operator must move.
        make: builds inputs (seed already set) on `device` and returns {impl name: impl}. "onepass" is ours and comes
            first; an impl is a thunk, a `Prepared`, or `Missing("distribution")` for a rival that is not installed
            (see `optional`). Names of rivals that compile contain "torch.compile": `--no-compile` leaves them out.
            Inputs are random, never zeros.
        check: largest accepted |theirs − ours|, relative to the largest |ours|, checked before timing; thunks return
            the same tensors in the same order (None: no comparison, e.g. of an in-place step).
        device: where `make` puts its inputs.
    """

    op: str
    stage: str
    params: Mapping[str, Any]
    dtype: torch.dtype
    floor_bytes: int
    make: Callable[[], Mapping[str, Impl]]
    check: float | None = None
    device: str = "cuda"


def folders() -> list[str]:
    """Return the names of the folders that have a `spec.py`: those of operators, and `fused`."""
    import onepass.ops

    names = sorted(m.name for m in pkgutil.iter_modules(onepass.ops.__path__) if m.ispkg)
    found = [n for n in names if importlib.util.find_spec(f"onepass.ops.{n}.spec") is not None]
    return [*found, "fused"]


def package(folder: str) -> str:
    """Return the import name of a folder that has a spec."""
    return f"onepass.{folder}" if folder == "fused" else f"onepass.ops.{folder}"


def load(folder: str) -> Any:
    """Return the module `spec` of a folder."""
    return importlib.import_module(f"{package(folder)}.spec")


def all_specs() -> list[Spec]:
    """Return every operator's contract."""
    return [s for f in folders() for s in getattr(load(f), "SPECS", ())]


def all_kernels() -> list[Kernel]:
    """Return every kernel compilation with a budget."""
    return [k for f in folders() for k in getattr(load(f), "KERNELS", ())]
