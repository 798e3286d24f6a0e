"""The main job's step on a GPU, from a CUDA graph and launched kernel by kernel: wall time against its kernels.

    python -m benchmarks.main_job --json benchmarks/results/h200/raw/main_job.json

Both train on Python's own standard library with the gpu preset and the same seed. The losses of the causal task must
agree bit for bit; in the masked one, flash attention's own backward pass adds in another order from run to run.
`kernels_ms` is the sum of all kernels, copies and fills of a step by the profiler.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from onepass.core import files
from onepass.core.about import device_name, versions
from onepass.train import config as configs
from onepass.train import data
from onepass.train.loop import FLUSH, Training
from onepass.train.run import Run

STEPS, PROFILED = 40, 5


def training(task: str, corpus: data.Corpus, device: str, preset: str) -> Training:
    """Return the main job at its first step."""
    precision = "bf16" if device == "cuda" else "fp32"
    config = configs.build(
        preset, task=task, route="learned", device=device, precision=precision, threads=torch.get_num_threads(), seed=0,
        data=corpus.digest, paths=(),
    )  # fmt: skip
    return Training(config, corpus, Run(Path(tempfile.mkdtemp()) / "run"), 10**9)


def take(job: Training, steps: int) -> list[float]:
    """Take steps as the job's loop does, which reads the losses every FLUSH steps; return the losses."""
    losses, pending = [], []
    for _ in range(steps):
        pending.append(job._one_step())
        job.step += 1
        if len(pending) == FLUSH:
            losses += torch.stack(pending).tolist()
            pending.clear()
    return losses


def measure(job: Training) -> dict[str, Any]:
    """Return a record of one way to run the step."""
    cuda = job.device.type == "cuda"
    began = time.perf_counter()
    losses = take(job, FLUSH)
    first = time.perf_counter() - began
    began = time.perf_counter()
    losses += take(job, STEPS)
    wall = 1e3 * (time.perf_counter() - began) / STEPS
    record = {
        "graph": job.gradients.graph is not None, "why_eager": job.gradients.why_eager,
        "first_steps_s": round(first, 2),
        "wall_ms": round(wall, 3), "tokens_per_s": round(job.config.batch * job.config.seq / wall * 1e3),
        "losses": losses,
    }  # fmt: skip
    if cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(PROFILED):
                job._one_step()
            torch.cuda.synchronize()
        found = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        record["kernels"] = len(found) / PROFILED
        record["kernels_ms"] = round(sum(e.device_time for e in found) / PROFILED / 1e3, 3)
        record["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return record


def main() -> int:
    """Measure both tasks, captured and eager."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the records")
    parser.add_argument("--preset", choices=list(configs.PRESETS), default="gpu")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = data.load([], binary=False, follow_links=False)
    records = []
    for task in configs.TASKS:
        both = []
        for eager in (True, False):
            job = training(task, corpus, device, args.preset)
            if eager:
                job.gradients.why_eager = "asked for"
            both.append({"task": task, **measure(job)})
            del job
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        same = both[0].pop("losses") == both[1].pop("losses")
        for record in both:
            if task == "causal":
                record["same_losses"] = same
            print(json.dumps(record))
        records += both
    about = {
        "device": device_name(torch.device(device)), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "preset": args.preset,
    }  # fmt: skip
    if args.json:
        files.write(args.json, json.dumps({**about, "records": records}, indent=1) + "\n")
    return 0 if all(record.get("same_losses", True) for record in records) else 1


if __name__ == "__main__":
    raise SystemExit(main())
