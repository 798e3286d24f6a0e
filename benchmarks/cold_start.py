"""How long a process takes to its first training step on a GPU: kernel caches empty and filled, 1 and 8 processes.

    python -m benchmarks.cold_start --json benchmarks/results/h200/raw/cold_start.json

`imports_s` is importing torch and onepass, `first_s` building and taking the first step, `second_s` the next one. The
processes start together, on one GPU and with one cache, as the ranks of a host do; the slowest of them counts.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WHAT = ("norm", "block", "compiled block", "train")
PROCESSES = (1, 8)


def _steps(what: str) -> Any:
    """Return a function that takes one step."""
    import torch

    import onepass

    if what == "train":
        from benchmarks.main_job import training
        from onepass.train import data

        return training("masked", data.load([], binary=False, follow_links=False), "cuda", "gpu")._one_step
    x = torch.randn(2, 4096, 1024, device="cuda", requires_grad=True)
    layer = onepass.nn.RMSNorm(1024) if what == "norm" else onepass.nn.RoutedBlock(1024, 1 / 16, window=128)
    layer = layer.cuda()
    run = torch.compile(layer) if what.startswith("compiled") else layer

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        y.sum().backward()

    return step


def here(what: str) -> dict[str, float]:
    """Measure in this process."""
    began = time.perf_counter()
    import torch

    import onepass.nn  # noqa: F401

    marks = [time.perf_counter()]
    torch.cuda.init()
    step = _steps(what)
    for _ in range(2):
        step()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    times = [b - a for a, b in zip((began, *marks), marks, strict=False)]
    return {name: round(t, 2) for name, t in zip(("imports_s", "first_s", "second_s"), times, strict=True)}


def together(what: str, processes: int, cache: str) -> dict[str, float]:
    """Return the largest of each figure over processes that start at once."""
    command = [sys.executable, "-m", "benchmarks.cold_start", "--here", what]
    environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        found.append(json.loads(out.splitlines()[-1]))
    return {name: max(f[name] for f in found) for name in found[0]}


def main() -> int:
    """Measure every program with empty and with filled caches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records")
    parser.add_argument("--here", choices=WHAT, help=argparse.SUPPRESS)  # in this process, with its caches
    args = parser.parse_args()
    if args.here:
        print(json.dumps(here(args.here)))
        return 0
    from onepass.core import files

    records = []
    for what in WHAT:
        for processes in PROCESSES:
            with tempfile.TemporaryDirectory() as cache:
                for caches in ("empty", "filled"):
                    figures = together(what, processes, cache)
                    records.append({"program": what, "processes": processes, "caches": caches, **figures})
                    print(json.dumps(records[-1]), flush=True)
                    if args.json:
                        # what is measured survives a run that is cut short
                        files.write(args.json, json.dumps({"records": records}, indent=1) + "\n")
    if args.json:
        import torch

        from onepass.core.about import device_name, versions

        about = {"device": device_name(torch.device("cuda")), "cores": os.cpu_count(), "versions": versions()}
        files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
