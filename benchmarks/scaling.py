"""The main job and Lion on shards, on one process and on several.

    python -m benchmarks.scaling --json benchmarks/results/h100/raw/scaling.json

Each number of processes (default: 1 and all GPUs) is one torchrun. The main job keeps its batch per process, so that
tokens per second and process should stay; one process runs with and without its CUDA graph, as FSDP2 has none. `lion`
is one step on parameters in FSDP2's shards, and on plain tensors of the shards' sizes; `host_ms` is the time until the
call returns, `kernels_ms` and `nccl_ms` are sums of the device's time.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onepass.core.about import device_name, versions
from onepass.optim import Lion
from onepass.train import config as configs
from onepass.train import data, parallel
from onepass.train.commands import files
from onepass.train.loop import FLUSH, Training

# sizes: on a GPU as the questions are asked, on a CPU as small as shows that it runs
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"steps": 40, "job": {}, "width": 4096, "layers": 8, "repeats": 12},
    "cpu": {
        "steps": 10, "job": {"dim": 16, "seq": 64, "batch": 2, "blocks": 1}, "width": 64, "layers": 2, "repeats": 3,
    },
}  # fmt: skip


def wait(device: torch.device) -> None:
    """Wait for what a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(call: Callable[[], object], repeats: int, device: torch.device, together: bool) -> dict[str, Any]:
    """Return medians of a call's time and the host's part of it, and on a GPU where the device's time went.

    With `together` all processes begin at the same time, and the slowest decides.
    """
    took, host = [], []
    for _ in range(repeats + 3):
        wait(device)
        if together:
            dist.all_reduce(torch.zeros(()))
        began = time.perf_counter()
        call()
        host.append(1e3 * (time.perf_counter() - began))
        wait(device)
        took.append(1e3 * (time.perf_counter() - began))
    # the first three calls compile and allocate
    medians = torch.tensor([statistics.median(took[3:]), statistics.median(host[3:])])
    if together:
        dist.all_reduce(medians, dist.ReduceOp.MAX)
    found: dict[str, Any] = dict(zip(("ms", "host_ms"), (round(float(m), 4) for m in medians), strict=True))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            wait(device)
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        nccl = [e for e in events if "nccl" in e.name.lower()]
        total = sum(e.device_time for e in events)
        sent = sum(e.device_time for e in nccl)
        found |= {
            "kernels_ms": round((total - sent) / 1e3, 3), "nccl_ms": round(sent / 1e3, 3),
            "launches": len(events), "collectives": len(nccl),
            "peak_mib": (torch.cuda.max_memory_allocated() - before) >> 20,
        }  # fmt: skip
    return found


def main_job(
    world: parallel.World, config: configs.Config, corpus: data.Corpus, steps: int, why: str
) -> dict[str, Any]:
    """Return speed and memory of the main job; `why`, if not empty, keeps one process from its CUDA graph."""
    job = Training(config, corpus, parallel.Onlooker(Path()), 10**9, world)
    job.gradients.why_eager = job.gradients.why_eager or why
    job.model.train()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def take(count: int) -> None:
        for _ in range(count // FLUSH):
            losses = []
            for _ in range(FLUSH):
                losses.append(job._one_step())
                job.step += 1
            world.mean(torch.stack(losses)).tolist()

    take(FLUSH)
    began = time.perf_counter()
    take(steps)
    spent = (time.perf_counter() - began) / steps
    peak = torch.cuda.max_memory_allocated() >> 20 if job.device.type == "cuda" else None
    return {
        "graph": job.gradients.graph is not None, "batch": config.batch, "seq": config.seq,
        "step_ms": round(1e3 * spent, 3), "peak_mib": peak,
        "tokens_per_s_and_process": round(config.batch * config.seq / spent / world.size),
    }  # fmt: skip


def lion(world: parallel.World, size: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the time of one step of Lion, on shards if there are several processes, and on plain tensors of theirs."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(size["width"], size["width"], bias=False) for _ in range(size["layers"])))
    model = model.to(device)
    count = sum(p.numel() for p in model.parameters())
    if isinstance(world, parallel.Processes):
        for layer in model:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
    found: dict[str, Any] = {"parameters": count}
    plain = [nn.Parameter(getattr(p, "to_local", lambda p=p: p)().detach().clone()) for p in model.parameters()]
    for name, params in (("shards", list(model.parameters())), ("plain", plain)):
        for p in params:
            p.grad = torch.randn_like(p)
        found[name] = measured(Lion(params).step, 3 * size["repeats"], device, world.size > 1)
    return found


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the bars' table for the last record."""
    one, last = records[0], records[-1]
    rows = [f"{last['processes']} processes"]
    rows += [f"Lion on {name}: {last['lion'][name]}" for name in ("shards", "plain")]
    speed = one["main_job"]["tokens_per_s_and_process"]
    for job in ("main_job", "main_job_eager"):
        if job in last:
            own = last[job]["tokens_per_s_and_process"]
            rows.append(f"{job}: {own} tokens/s and process, {own / speed:.2f} of one process")
    return rows


def work(folder: Path, kind: str) -> None:
    """Measure as one of the processes that torchrun started."""
    size = SIZES[kind]
    with parallel.joined() as world:
        corpus = data.load([])
        preset = "gpu" if kind == "cuda" else "cpu"
        values = {"task": "masked", "device": kind, "precision": "bf16" if kind == "cuda" else "fp32"}
        config = configs.build(preset, **{**values, "threads": 1, "seed": 0, "data": "", "paths": (), **size["job"]})
        whole = dataclasses.replace(config, batch=config.batch * world.size)
        world.start(folder, whole)
        device = world.device(kind)
        record: dict[str, Any] = {
            "processes": world.size,
            "main_job": main_job(world, whole, corpus, size["steps"], ""),
        }
        if world.size == 1 and kind == "cuda":
            record["main_job_eager"] = main_job(world, whole, corpus, size["steps"], "measured without")
        record["lion"] = lion(world, size, device)
        if world.first:
            files.write(folder / "record.json", json.dumps(record))
        world.leave(0)


def launched(processes: int, kind: str) -> dict[str, Any]:
    """Return the record of one number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
            "-m", "benchmarks.scaling", "--worker", folder, "--device", kind,
        ]  # fmt: skip
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        return json.loads(Path(folder, "record.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    """Measure each number of processes in its own torchrun; print the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    gpus = torch.cuda.device_count()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument("--processes", type=int, nargs="+", metavar="N", help="1 comes first (default: 1 and all GPUs)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.device)
        return
    counts = args.processes or [1, max(2, gpus)]
    if counts[0] != 1:
        parser.error(f"argument --processes: the first must be 1, got {counts[0]}")
    records = []
    for processes in counts:
        records.append(launched(processes, args.device))
        print("\n".join(table(records)))
    result = {
        "device": device_name(torch.device(args.device)), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "records": records,
    }  # fmt: skip
    if args.json:
        files.write(args.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
