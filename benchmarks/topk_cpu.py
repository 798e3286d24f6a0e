"""topk beside torch.topk on a CPU, in turns: normal scores, a plateau at 0, bf16; best first and by index.

    OMP_NUM_THREADS=2 python -m benchmarks.topk_cpu --json benchmarks/results/cpu/raw/topk.json

The bar is torch.topk's time + 5 % + 10 µs; torch.topk decides ties arbitrarily. Medians in µs.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

import onepass
from onepass.core import files
from onepass.core.about import device_name, versions

CELLS = ((1, 8, 3), (64, 1024, 64), (1, 32768, 2048), (64, 32768, 2048), (4096, 1024, 64), (1, 1 << 20, 2048))
KINDS = ("normal", "plateau", "bf16")
SECONDS = 1.5  # of each cell


def scores(rows: int, cols: int, kind: str) -> torch.Tensor:
    """Return the same scores in every run."""
    torch.manual_seed(0)
    s = torch.randn(rows, cols)
    if kind == "plateau":
        s = torch.where(torch.rand_like(s) < 1 / 3, 0.0, -s.abs())
    return s.bfloat16() if kind == "bf16" else s


def measure(s: torch.Tensor, k: int, best_first: bool) -> dict[str, float]:
    """Return the medians of both, measured in turns."""
    calls = {
        "onepass": lambda: onepass.topk(s, k, sorted=best_first),
        "torch": lambda: torch.topk(s, k, sorted=best_first),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + SECONDS
    while len(times["torch"]) < 5 or time.perf_counter() < deadline:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - began))
    return {name: round(statistics.median(t), 1) for name, t in times.items()}


def main() -> int:
    """Measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records")
    args = parser.parse_args()
    records = []
    for rows, cols, k in CELLS:
        for kind in KINDS:
            for best_first in (True, False):
                s = scores(rows, cols, kind)
                found = measure(s, k, best_first)
                met = found["onepass"] <= 1.05 * found["torch"] + 10
                records.append(
                    {"rows": rows, "cols": cols, "k": k, "scores": kind, "sorted": best_first, **found, "met": met}
                )
                print(json.dumps(records[-1]), flush=True)
    about = {
        "device": device_name(torch.device("cpu")), "threads": torch.get_num_threads(), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    if args.json:
        files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
