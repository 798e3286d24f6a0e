"""Host time of an operator's registration: `torch.library.custom_op` against `onepass.core.register`.

    python benchmarks/registration.py --json benchmarks/results/cpu/raw/registration.json

One function, y = 2x on a CPU tensor of one element, is registered both ways, each with a fake and a gradient. A chain
of eight calls is timed, forward and with its backward pass, in eager and compiled; both take turns, and the fastest of
all rounds counts. The function's own time is part of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.core import files
from onepass.core.register import register, register_fake

CALLS = 8
ROUNDS = 40
REPEATS = 100


def double(x: Tensor) -> Tensor:
    """Return 2x."""
    return x + x


def by_custom_op() -> Any:
    """Register `double` by `torch.library.custom_op`."""
    op = torch.library.custom_op("onepass_timing::custom", double, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: op(g))
    return op


def by_library() -> Any:
    """Register `double` as this project's operators are."""
    op = register("timing_only", double)
    register_fake(op)(torch.empty_like)
    torch.library.register_autograd(op, lambda ctx, g: op(g))
    return op


def chain(op: Any) -> Callable[[Tensor], Tensor]:
    """Return a function of `CALLS` calls in a row."""

    def run(x: Tensor) -> Tensor:
        for _ in range(CALLS):
            x = op(x)
        return x

    return run


def cases(op: Any) -> dict[str, Callable[[], Any]]:
    """What is timed of one registration."""
    eager, compiled = chain(op), torch.compile(chain(op), fullgraph=True)
    x, wanted = torch.ones(1), torch.ones(1, requires_grad=True)

    def both(run: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(wanted), wanted)

    return {
        "eager, forward": lambda: eager(x),
        "compiled, forward": lambda: compiled(x),
        "eager, forward and backward": both(eager),
        "compiled, forward and backward": both(compiled),
    }


def microseconds(run: Callable[[], Any]) -> float:
    """Time one call of the operator, forward or with its backward call."""
    began = time.perf_counter()
    for _ in range(REPEATS):
        run()
    return (time.perf_counter() - began) / (REPEATS * CALLS) * 1e6


def main() -> int:
    """Time both, print and write the fastest rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"custom_op": cases(by_custom_op()), "register": cases(by_library())}
    best: dict[str, dict[str, float]] = {name: dict.fromkeys(ways, float("inf")) for name in ways["register"]}
    for _ in range(ROUNDS):
        for name, times in best.items():
            for way, runs in ways.items():
                times[way] = min(times[way], microseconds(runs[name]))
    record = {
        "torch": torch.__version__,
        "us_per_call": {name: {way: round(us, 2) for way, us in times.items()} for name, times in best.items()},
    }
    text = json.dumps(record, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        files.write(args.json, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
