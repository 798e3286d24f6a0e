"""One row of the benchmark, as `benchmarks/cases` declares them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.core.garbage import collected


@dataclass(frozen=True)
class Prepared:
    """An implementation that the bench sets up right before timing it, and frees afterwards.

    Use it for set-up that is costly or may fail: a backward pass needs its forward first, a rival may not import.
    `build()` returns the thunk to time. An ImportError inside means that a rival is missing: the bench names it and
    goes on. Any other exception is a failure of this implementation alone. `seen(result)`, outside the time, is what of
    its result is compared.
    """

    build: Callable[[], Callable[[], Any]]
    seen: Callable[[Any], Any] = lambda result: result


@dataclass(frozen=True)
class Definition:
    """What every implementation should return, in float64 or rounded from it: in `Case.make`'s mapping, not timed."""

    call: Callable[[], Any]


Timed = Callable[[], Any] | Prepared
Impl = Timed | Definition


def rival(module: str, use: Callable[[Any], Callable[[], Any]]) -> Prepared:
    """Return what `use` makes of a module, as an implementation that is missing where the module does not import."""

    def build() -> Callable[[], Any]:
        try:
            found = importlib.import_module(module)
        except Exception as error:
            # other people's packages raise anything at import: a missing symbol, an unknown GPU, a version check
            raise ImportError(str(error), name=module.partition(".")[0]) from error
        return use(found)

    return Prepared(build)


def upstream(*outs: Tensor) -> list[Tensor]:
    """Return random gradients of outputs, the same for every implementation."""
    generator = torch.Generator(outs[0].device).manual_seed(7)
    return [torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator) for t in outs]


def backward_of(forward: Timed, inputs: Sequence[Tensor]) -> Prepared:
    """Return the backward pass of `forward` with respect to `inputs`, as an implementation to time."""

    def build() -> Callable[[], Any]:
        out = (forward.build() if isinstance(forward, Prepared) else forward)()
        outs = [t for t in ([out] if isinstance(out, Tensor) else out) if t.requires_grad]
        grads = upstream(*outs)
        return lambda: torch.autograd.grad(outs, tuple(inputs), grads, retain_graph=True)

    return Prepared(build)


def staged(stage: str, impls: Mapping[str, Timed], inputs: Sequence[Tensor]) -> dict[str, Impl]:
    """Return implementations of a forward pass as they are, or for "backward" the backward pass of each."""
    if stage == "forward":
        return dict(impls)
    for t in inputs:
        t.requires_grad_()
    return {name: backward_of(f, inputs) for name, f in impls.items()}


def graphed(prepare: Callable[[], Callable[[], Any]], seen: Callable[[Any], Any] = lambda r: r) -> Prepared:
    """Return the replay of a CUDA graph of the call that `prepare` returns, as an implementation to time."""

    def build() -> Callable[[], Any]:
        # autograd runs a backward pass on the stream of its forward pass, so both run on the stream of the capture
        new_stream: Any = torch.cuda.Stream
        stream, graph = new_stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run = prepare()
            # from the third call on `core.launch.replay` repeats launches: let it learn them before the capture
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        with collected(), torch.cuda.graph(graph, stream=stream):
            captured = run, run()  # keep `run`, too: the graph reads memory that only it owns

        def replay() -> Any:
            graph.replay()
            return captured[1]

        return replay

    return Prepared(build, seen)


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
            first; an impl is a thunk or a `Prepared`, such as a `rival`. Names of rivals that compile contain
            "torch.compile": `--no-compile` leaves them out. Inputs are random, never zeros.
        check: largest accepted |theirs − ours|, relative to the largest |ours|, checked before timing; thunks return
            the same tensors in the same order (None: no comparison, e.g. of an in-place step). Beside a `Definition`:
            the largest accepted ‖result − definition‖/‖definition‖ of a tensor, ours and theirs; no tensors pass.
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
