"""Norms on the CPU against F.layer_norm and F.rms_norm: a table, and with --json the record that is kept.

python benchmarks/cpu_norm.py [--threads 2] [--rounds 41] [--json benchmarks/results/cpu/raw/norm.json]

A round runs torch, us and torch again, each for a few milliseconds; a time is the median over the rounds, and the ratio
is the median of (us over the mean of the two beside it), so that a busy machine disturbs both alike.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass.core import files
from onepass.core.about import cpu_name, dtype_name

SIZES = ((1, 64), (16, 128), (64, 1024), (512, 768), (2048, 1024), (2048, 4096))
DTYPES = (torch.float32, torch.bfloat16)
# the promise: not slower than torch by more than this
SHARE, MICROSECONDS = 1.05, 5.0
BLOCK_SECONDS = 4e-3


def pairs(
    x: Tensor, w: Tensor, b: Tensor
) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Tensor], tuple[Tensor, ...]]]:
    """(operator, torch's, ours, what gradients are asked for)."""
    n = x.shape[-1]
    yield "layer_norm", lambda: F.layer_norm(x, (n,), w, b), lambda: onepass.layer_norm(x, w, b), (x, w, b)
    yield "rms_norm", lambda: F.rms_norm(x, (n,), w, 1e-6), lambda: onepass.rms_norm(x, w), (x, w)


def stages(
    forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(stage, what is timed)."""

    def no_grad() -> Tensor:
        with torch.no_grad():
            return forward()

    yield "forward, no gradients", no_grad
    yield "forward", forward
    yield "forward + backward", lambda: torch.autograd.grad(forward(), inputs, dy)


def block(run: Callable[[], Any], calls: int) -> float:
    """Microseconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def compare(theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> tuple[float, float, float]:
    """(their median µs, our median µs, median of the ratios round by round)."""
    for run in (theirs, ours):
        block(run, 3)
    calls = max(1, int(BLOCK_SECONDS * 1e6 / min(block(theirs, 2), block(ours, 2))))
    theirs_us, ours_us, ratios = [], [], []
    for _ in range(rounds):
        before, own, after = block(theirs, calls), block(ours, calls), block(theirs, calls)
        theirs_us += [before, after]
        ours_us.append(own)
        ratios.append(2 * own / (before + after))
    return statistics.median(theirs_us), statistics.median(ours_us), statistics.median(ratios)


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """One record per operator, size, dtype and stage."""
    for rows, cols in SIZES:
        for dtype in DTYPES:
            torch.manual_seed(0)
            x, dy = torch.randn(rows, cols, dtype=dtype, requires_grad=True), torch.randn(rows, cols, dtype=dtype)
            w, b = (torch.randn(cols, dtype=dtype, requires_grad=True) for _ in range(2))
            for op, theirs, ours, inputs in pairs(x, w, b):
                both = zip(stages(theirs, inputs, dy), stages(ours, inputs, dy), strict=True)
                for (stage, run_theirs), (_, run_ours) in both:
                    torch_us, us, ratio = compare(run_theirs, run_ours, rounds)
                    yield {
                        "op": op, "stage": stage, "rows": rows, "cols": cols, "dtype": dtype_name(dtype),
                        "torch_us": round(torch_us, 2), "us": round(us, 2), "ratio": round(ratio, 3),
                        "kept": ratio * torch_us <= SHARE * torch_us + MICROSECONDS,
                    }  # fmt: skip


def main() -> None:
    """Print the table; store it where --json says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    header = {"cpu": cpu_name(), "threads": args.threads, "torch": torch.__version__, "rounds": args.rounds}
    records: list[dict[str, Any]] = []
    for r in measure(args.rounds):
        records.append(r)
        size = f"{r['rows']}×{r['cols']}"
        print(
            f"{r['op']:10} {r['stage']:22} {size:>10} {r['dtype']:8} torch {r['torch_us']:10.1f} µs"
            f"  onepass {r['us']:10.1f} µs  {r['ratio']:5.2f}×{'' if r['kept'] else '  slower'}",
            flush=True,
        )
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            files.write(args.json, json.dumps([header, *records], indent=1) + "\n")
    print(f"{sum(r['kept'] for r in records)} of {len(records)} within {SHARE:.2f}× + {MICROSECONDS:.0f} µs")


if __name__ == "__main__":
    main()
