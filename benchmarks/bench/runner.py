"""Run cases: build the inputs, compare every implementation with ours, time it, free its memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.case import Case, Definition, Prepared
from onepass.core.about import one_line

from .compare import all_zero, disagreement, norm_error
from .limit import TookTooLongError, limit
from .timers import CpuTimer, Timer

OURS = "onepass"
SEED = 20
STAGES = ("forward", "backward", "forward+backward", "step")
# parameters that follow from the others: recorded, but not in a case's name
IMPLIED = ("tensors", "elements")
# no host time for calls slower than this: the device decides their time
SLOW_US = 50_000.0

# states of a result; only "ok" becomes a record
OK, DISAGREES, FAILED, MISSING, SKIPPED = "ok", "disagrees", "failed", "missing", "skipped"


@dataclass(frozen=True)
class Result:
    """One implementation at one case; times are None if it was not timed, and `note` holds the reason or the fault.

    Memory is in bytes above the inputs: `kept` stays between calls, `peak` is the most during a call, `kept` included.
    """

    folder: str
    case: Case
    impl: str
    status: str
    us: float | None = None
    host_us: float | None = None
    note: str = ""
    peak: int | None = None
    kept: int | None = None
    seconds: float = 0.0
    error: float | None = None  # against the case's definition


@dataclass(frozen=True)
class _Ready:
    """An implementation that ran, and its comparison with ours."""

    call: Callable[[], Any]
    result: Any  # of ours only, to compare the others with
    untimed: Result


class DeviceLostError(Exception):
    """An implementation broke the device (an illegal access); this process can't measure anything more."""


def label(params: Mapping[str, Any]) -> str:
    """Return a short name of a case: {"rows": 64, "cols": 1024, "k": 9} → "64x1024 k=9"."""
    sizes = [str(params[k]) for k in ("rows", "cols") if k in params]
    others = [v if isinstance(v, str) else f"{k}={v}" for k, v in params.items() if k not in ("rows", "cols", *IMPLIED)]
    return " ".join((["x".join(sizes)] if sizes else []) + others)


def is_rival(impl: str) -> bool:
    """Return whether an implementation is not ours and is called as ours is, without a CUDA graph."""
    return not impl.startswith(OURS) and "CUDA graph" not in impl


def compiles(impl: str) -> bool:
    """Return whether an implementation uses torch.compile, according to its name."""
    return "compile" in impl


def release() -> None:
    """Free the graphs, compiled code and cached device memory of the last case."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        # without a reset, Dynamo compiles a second shape as dynamic and stops compiling at the ninth
        dynamo.reset()
    gc.collect()
    gc.freeze()  # the rest belongs to modules: later collections skip it
    torch.cuda.empty_cache()


def _check_device(timer: Timer, after: str) -> None:
    try:
        timer.synchronize()
    except Exception as error:
        raise DeviceLostError(f"{after} broke the device: {one_line(error)}") from error


def _prepare(
    folder: str, case: Case, name: str, impl: Any, ours: Any, expected: Any, timer: Timer, limit_s: float
) -> _Ready:
    """Build an implementation, let it compile (rivals at most `limit_s`), measure its memory, compare its results."""
    began, before = time.perf_counter(), timer.held_bytes()
    with limit(0 if name == OURS else limit_s):
        call = impl.build() if isinstance(impl, Prepared) else impl
        call()
        timer.synchronize()
        kept = timer.held_bytes()
        peak, result = timer.peak_bytes(call)
        result = impl.seen(result) if isinstance(impl, Prepared) else result
        status, note, error = OK, "", None
        if expected is not None:
            error = norm_error(expected, result)
            if error is not None and case.check is not None and not error <= case.check:
                status, note = DISAGREES, f"off by {error:.2g} of the definition's norm, {case.check:.2g} accepted"
        elif case.check is not None:
            if name == OURS:
                wrong = "the result is zero everywhere: nothing to measure" if all_zero(result) else None
            else:
                wrong = disagreement(ours, result, case.check)
            if wrong:
                status, note = DISAGREES, wrong
    peak = None if peak is None or before is None else peak - before
    kept = None if kept is None or before is None else kept - before
    result = result if name == OURS and case.check is not None else None
    spent = time.perf_counter() - began
    return _Ready(call, result, Result(folder, case, name, status, None, None, note, peak, kept, spent, error))


def _timed(ready: _Ready, us: float, host_us: float | None, seconds: float) -> Result:
    return replace(ready.untimed, us=us, host_us=host_us, seconds=ready.untimed.seconds + seconds)


def _ready(folder: str, case: Case, timer: Timer, compile: bool, limit_s: float) -> Iterator[_Ready | Result]:
    """Yield each implementation of a case, ours first: ready to time, or a result that says why not."""
    torch.manual_seed(SEED)
    expected: Any = None
    try:
        impls = dict(case.make())
        for name in [n for n, impl in impls.items() if isinstance(impl, Definition)]:
            expected = impls.pop(name).call()  # type: ignore[union-attr]
    except Exception as error:
        _check_device(timer, f"{case.op} {label(case.params)}")
        yield Result(folder, case, OURS, FAILED, note=one_line(error))
        return
    ours: Any = None
    for name in sorted(impls, key=lambda n: n != OURS):
        impl = impls.pop(name)
        if compiles(name) and not compile:
            yield Result(folder, case, name, SKIPPED, note="--no-compile")
            continue
        began = time.perf_counter()
        try:
            ready = _prepare(folder, case, name, impl, ours, expected, timer, limit_s)
            ours = ready.result if name == OURS else ours
            del impl
            yield ready
            del ready
            continue
        except ImportError as error:
            status, note = FAILED if name == OURS else MISSING, error.name or one_line(error)
        except TookTooLongError as error:
            status, note = FAILED, str(error)
        except Exception as error:
            status, note = FAILED, one_line(error)
        yield Result(folder, case, name, status, note=note, seconds=time.perf_counter() - began)
        if status == FAILED:
            gc.collect()
            _check_device(timer, f"{name} at {case.op} {label(case.params)}")
            if name == OURS:
                # without our result, rivals can't be compared
                return


def run_case(folder: str, case: Case, timer: Timer, *, compile: bool = True, limit_s: float = 0.0) -> Iterator[Result]:
    """Measure every implementation of one case, ours first."""
    waiting: list[_Ready] = []
    for outcome in _ready(folder, case, timer, compile, limit_s):
        if isinstance(outcome, Result):
            yield outcome
        elif isinstance(timer, CpuTimer):
            waiting.append(outcome)
        else:
            began = time.perf_counter()
            try:
                us = timer.us(outcome.call)
                host_us = timer.host_us(outcome.call) if us < SLOW_US else None
                result = _timed(outcome, us, host_us, time.perf_counter() - began)
            except Exception as error:
                _check_device(timer, f"{outcome.untimed.impl} at {case.op} {label(case.params)}")
                result = Result(folder, case, outcome.untimed.impl, FAILED, note=one_line(error))
            yield result
        del outcome  # free its memory before the next one is built
    if isinstance(timer, CpuTimer) and waiting:
        calls = [ready.call for ready in waiting]
        began = time.perf_counter()
        times = list(zip(waiting, timer.us_each(calls), timer.host_us_each(calls), strict=True))
        # the calls took turns, so share the time equally
        share = (time.perf_counter() - began) / len(waiting)
        for ready, us, host_us in times:
            yield _timed(ready, us, host_us, share)


def run(
    cases: Sequence[tuple[str, Case]], timer: Timer, *, compile: bool = True, limit_s: float = 0.0
) -> Iterator[Result]:
    """Measure (folder, case) pairs one after another; raise DeviceLostError if an implementation breaks the device."""
    with _kept_graphs():
        for folder, case in cases:
            release()
            yield from run_case(folder, case, timer, compile=compile, limit_s=limit_s)
    release()


def _kept_graphs() -> contextlib.AbstractContextManager[Any]:
    """Turn off donated buffers: they allow one backward per graph, and the bench times many."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)  # type: ignore[no-any-return]
