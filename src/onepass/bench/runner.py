"""Run cases: build the inputs, compare every implementation with ours, time it, let its memory go."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onepass.core.about import one_line
from onepass.core.spec import Case, Missing, Prepared

from .compare import all_zero, disagreement
from .timers import Timer

OURS = "onepass"
SEED = 20
STAGES = ("forward", "backward", "step")

# what a result can be; only "ok" becomes a record
OK, DISAGREES, FAILED, MISSING, SKIPPED = "ok", "disagrees", "failed", "missing", "skipped"


@dataclass(frozen=True)
class Result:
    """One implementation at one case; times are None when it was not timed, `note` says why or what is wrong."""

    folder: str
    case: Case
    impl: str
    status: str
    us: float | None = None
    host_us: float | None = None
    note: str = ""


class DeviceLostError(Exception):
    """An implementation broke the device (an illegal access): nothing after it can be measured in this process."""


def label(params: Mapping[str, Any]) -> str:
    """Name a case in a few characters: {"rows": 64, "cols": 1024, "k": 9} → "64x1024 k=9"."""
    sizes = [str(params[k]) for k in ("rows", "cols") if k in params]
    others = [f"{k}={v}" if not isinstance(v, str) else v for k, v in params.items() if k not in ("rows", "cols")]
    return " ".join((["x".join(sizes)] if sizes else []) + others)


def compiles(impl: str) -> bool:
    """Tell whether an implementation's name says that torch.compile is in it."""
    return "compile" in impl


def release() -> None:
    """Free what the last case left: graphs, compiled code, cached device memory."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        # a second shape would otherwise be compiled as a dynamic one, and the ninth not at all
        dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _check_device(timer: Timer, after: str) -> None:
    try:
        timer.synchronize()
    except Exception as error:
        raise DeviceLostError(f"{after} broke the device: {one_line(error)}") from error


def _measure(
    folder: str, case: Case, name: str, impl: Prepared | Callable[[], Any], ours: Any, timer: Timer
) -> tuple[Result, Any]:
    """Time one implementation; also return its result (for ours, which the others are compared with)."""
    thunk = impl.build() if isinstance(impl, Prepared) else impl
    result = thunk()
    timer.synchronize()
    status, note = OK, ""
    if case.check is not None:
        if name == OURS:
            wrong = "the result is zero everywhere: nothing to measure" if all_zero(result) else None
        else:
            wrong = disagreement(ours, result, case.check)
        if wrong:
            status, note = DISAGREES, wrong
    kept = result if name == OURS and case.check is not None else None
    del result
    return Result(folder, case, name, status, timer.us(thunk), timer.host_us(thunk), note), kept


def run_case(
    folder: str, case: Case, timer: Timer, *, compile: bool = True, started: Callable[[str], None] = lambda impl: None
) -> Iterator[Result]:
    """Measure every implementation of one case, ours first."""
    torch.manual_seed(SEED)
    try:
        impls = dict(case.make())
    except Exception as error:
        _check_device(timer, f"{case.op} {label(case.params)}")
        yield Result(folder, case, OURS, FAILED, note=one_line(error))
        return
    ours: Any = None
    for name in sorted(impls, key=lambda n: n != OURS):
        impl = impls.pop(name)
        if isinstance(impl, Missing):
            yield Result(folder, case, name, MISSING, note=impl.needs)
            continue
        if compiles(name) and not compile:
            yield Result(folder, case, name, SKIPPED, note="--no-compile")
            continue
        started(name)
        try:
            result, kept = _measure(folder, case, name, impl, ours, timer)
            ours = kept if name == OURS else ours
        except ImportError as error:
            status = FAILED if name == OURS else MISSING
            result = Result(folder, case, name, status, note=error.name or one_line(error))
        except Exception as error:
            result = Result(folder, case, name, FAILED, note=one_line(error))
        yield result
        del impl
        if result.status == FAILED:
            gc.collect()
            _check_device(timer, f"{name} at {case.op} {label(case.params)}")
            if name == OURS:
                # nothing to compare the rivals with
                return


def run(
    cases: Sequence[tuple[str, Case]],
    timer: Timer,
    *,
    compile: bool = True,
    started: Callable[[Case, str], None] = lambda case, impl: None,
) -> Iterator[Result]:
    """Measure (folder, case) pairs one after another; raises DeviceLostError when the device no longer answers."""
    import torch._functorch.config as functorch_config

    # compiled backwards are timed again and again over one graph, which donated buffers forbid
    with functorch_config.patch(donated_buffer=False):
        for folder, case in cases:
            release()
            yield from run_case(folder, case, timer, compile=compile, started=functools.partial(started, case))
    release()
