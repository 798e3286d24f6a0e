"""What an operator declares about itself in its `spec.py`.

Three kinds of declaration, each with one reader:

* `Spec` → tests/contract: values, gradients, strides, dtypes, errors, compile, torch.func, determinism;
* `Kernel` → tests/codegen: registers, spills and load widths, without a GPU;
* `Case` → `onepass bench`: sizes, byte floors and rivals.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """One call of an operator: `op(*args, **kwargs)`; floating-point tensors in args and kwargs may want gradients."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never mutated


class BadCall(NamedTuple):
    """A call that must be refused, and how: exception type and a pattern for its words."""

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
        torch_ops: the registered ops (for opcheck): name → sample arguments.
        differentiable: parameters (by position or keyword) whose gradients are compared; default: all floating tensors.
        tolerances: per dtype, for values; gradients get `grad_factor` times as much.
        interpret: names of samples small enough for the Triton interpreter (None: all).
    """

    name: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[Callable[..., Tensor]], Iterator[Sample]]
    bad_calls: Sequence[BadCall] = ()
    opchecks: Callable[[], Iterator[tuple[Any, tuple[Any, ...]]]] = lambda: iter(())
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    grad_factor: float = 4.0


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
        max_registers: budget per thread on NVIDIA targets.
        max_spill_bytes: local memory for spills allowed (0 for everything a launch table uses).
        vector_loads: 16-byte global loads must appear.
    """

    name: str
    fn: Callable[[], Any]
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: Sequence[str] = ()
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 128
    max_spill_bytes: int = 0
    vector_loads: bool = True


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: an operator at a size, ours and the rivals', over the bytes it must move.

    Attributes:
        op: operator name, the JSON file's name.
        stage: "forward", "backward" or "step".
        params: what the case is, for the record ({"rows": 4096, "cols": 1024}).
        dtype: element type.
        floor_bytes: the fewest bytes that must move.
        make: builds inputs on the GPU and returns {impl name: thunk}. A thunk of a rival that is not installed is
            left out by `rivals`. "onepass" is ours.
        check: tolerance of the comparison of every impl's result with ours before timing (None: not comparable).
    """

    op: str
    stage: str
    params: Mapping[str, Any]
    dtype: torch.dtype
    floor_bytes: int
    make: Callable[[], Mapping[str, Callable[[], Any]]]
    check: float | None = None


def _spec_modules() -> Iterator[Any]:
    import onepass.ops

    for package in sorted(m.name for m in pkgutil.iter_modules(onepass.ops.__path__) if m.ispkg):
        if importlib.util.find_spec(f"onepass.ops.{package}.spec") is not None:
            yield importlib.import_module(f"onepass.ops.{package}.spec")


def all_specs() -> list[Spec]:
    """Every operator's contract."""
    return [s for m in _spec_modules() for s in getattr(m, "SPECS", ())]


def all_kernels() -> list[Kernel]:
    """Every kernel compilation under a budget."""
    return [k for m in _spec_modules() for k in getattr(m, "KERNELS", ())]


def all_cases() -> list[Case]:
    """Every benchmark case."""
    return [c for m in _spec_modules() for c in getattr(m, "CASES", ())]
