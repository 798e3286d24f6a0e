"""topk beside torch.topk on a CPU, in turns: normal scores, a plateau at 0, bf16; best first and by index.

    python -m benchmarks.topk_cpu --threads 2 1 --json benchmarks/results/cpu/raw/topk.json

The bar is torch.topk's time + 5 % + 10 µs; torch.topk decides ties arbitrarily. Medians in µs. A cell meets
the bar if the median of the differences between neighbouring calls does: both calls of a pair see the same load.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

import onepass
from onepass.core import files
from onepass.core.about import device_name, versions

CELLS = (
    (1, 8, 3), (4096, 8, 2), (4096, 64, 8), (64, 1024, 64), (1, 32768, 2048), (64, 32768, 2048), (4096, 1024, 64),
    (1, 1 << 20, 2048),
)  # fmt: skip
KINDS = ("normal", "plateau", "bf16")
SECONDS = 1.5  # of each cell


def scores(rows: int, cols: int, kind: str) -> torch.Tensor:
    """Return the same scores in every run."""
    torch.manual_seed(0)
    s = torch.randn(rows, cols)
    if kind == "plateau":
        s = torch.where(torch.rand_like(s) < 1 / 3, 0.0, -s.abs())
    return s.bfloat16() if kind == "bf16" else s


def measure(s: torch.Tensor, k: int, best_first: bool) -> dict[str, float | bool]:
    """Return the medians of both, of their ratio, and whether the bar is met; who goes first changes every turn."""
    calls = [
        lambda: onepass.topk(s, k, sorted=best_first),
        lambda: torch.topk(s, k, sorted=best_first),
    ]
    times: list[list[float]] = [[], []]
    deadline = time.perf_counter() + SECONDS
    while len(times[0]) < 9 or time.perf_counter() < deadline:
        for i in (0, 1) if len(times[0]) % 2 else (1, 0):
            began = time.perf_counter()
            calls[i]()
            times[i].append(1e6 * (time.perf_counter() - began))
    ours, theirs = times
    return {
        "onepass": round(statistics.median(ours), 1),
        "torch": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
        "met": statistics.median(a - 1.05 * b for a, b in zip(ours, theirs, strict=True)) <= 10,
    }


def main() -> int:
    """Measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records")
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    args = parser.parse_args()
    records = []
    about = {
        "device": device_name(torch.device("cpu")), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    for threads in args.threads:
        torch.set_num_threads(threads)
        for rows, cols, k in CELLS:
            for kind in KINDS:
                for best_first in (True, False):
                    s = scores(rows, cols, kind)
                    cell = {
                        "threads": threads,
                        "rows": rows,
                        "cols": cols,
                        "k": k,
                        "scores": kind,
                        "sorted": best_first,
                    }
                    # runnable processes of the last minute: other programs disturb the measurement
                    load = {"load": round(os.getloadavg()[0], 1)}
                    records.append({**cell, **measure(s, k, best_first), **load})
                    print(json.dumps(records[-1]), flush=True)
    if args.json:
        files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
