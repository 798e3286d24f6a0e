"""The main job and layers of experts, on one process and on several.

    python -m benchmarks.scaling --json benchmarks/results/h100/raw/data_parallel.json

Each number of processes (default: 1 and all GPUs) is one torchrun. The main job keeps its batch per process, so that
tokens per second and process should stay: with graphs, without (`_eager`), and in FSDP2's shards. `experts` is forward
and backward of some layers by each process's own tokens, alone, under DDP and in FSDP2's shards; `host_ms` is the time
until the call returns, `kernels_ms` and `nccl_ms` are sums of the device's time.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import dataclasses
import functools
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from onepass.core.about import device_name, versions
from onepass.nn import Experts
from onepass.train import config as configs
from onepass.train import data, parallel
from onepass.train.commands import files
from onepass.train.loop import FLUSH, Training

# sizes: on a GPU as the questions are asked, on a CPU as small as shows that it runs
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"steps": 1500, "repeats": 20, "tokens": 16384, "width": 1024, "job": {}},
    "cpu": {"steps": 10, "repeats": 3, "tokens": 64, "width": 16, "job": {"dim": 16, "seq": 64, "batch": 2}},
}


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
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            wait(device)
        events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        sent = sum(e.device_time for e in events if "nccl" in e.name.lower())
        total = sum(e.device_time for e in events)
        found |= {"kernels_ms": round((total - sent) / 1e3, 3), "nccl_ms": round(sent / 1e3, 3)}
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
    steps = steps if job.gradients.graph else max(FLUSH, steps // 5)
    began = time.perf_counter()
    take(steps)
    spent = (time.perf_counter() - began) / steps
    return {
        "graph": job.gradients.graph is not None, "batch": config.batch, "seq": config.seq,
        "step_ms": round(1e3 * spent, 3),
        "peak_mib": torch.cuda.max_memory_allocated() >> 20 if job.device.type == "cuda" else None,
        "tokens_per_s_and_process": round(config.batch * config.seq / spent / world.size),
    }  # fmt: skip


def experts(world: parallel.World, size: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the time of forward and backward of four layers of experts, alone and with all processes' gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wide = {"hidden_dim": 2 * size["width"], "device": device, "dtype": dtype}
    model = nn.Sequential(*(Experts(size["width"], 16, **wide) for _ in range(4)))
    x = torch.randn(size["tokens"], size["width"], device=device, dtype=dtype)

    def step(net: nn.Module) -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    found: dict[str, Any] = {"tokens": len(x), "parameters": sum(p.numel() for p in model.parameters())}
    for how in ("alone", "ddp", "fsdp") if isinstance(world, parallel.Processes) else ("alone",):
        net = DistributedDataParallel(model) if how == "ddp" else model
        for part in (*model, model) if how == "fsdp" else ():
            fully_shard(part, mesh=world.mesh)
        found[how] = measured(functools.partial(step, net), size["repeats"], device, world.size > 1)
    return found


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the bars' table for the last record."""
    one, last = records[0], records[-1]
    rows = [f"{last['processes']} processes"]
    speed, alone = one["main_job"]["tokens_per_s_and_process"], one["experts"]["alone"]["ms"]
    for name in sorted(name for name in last if name.startswith("main_job")):
        own = last[name]["tokens_per_s_and_process"]
        rows.append(f"{name}: {own} tokens/s and process, {own / speed:.3f} of one process")
    times = [(how, found["ms"]) for how, found in last["experts"].items() if isinstance(found, dict)]
    rows += [f"experts, {how}: {ms} ms, {alone / ms:.3f} of one process" for how, ms in times]
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
        if kind == "cuda":
            record["main_job_eager"] = main_job(world, whole, corpus, size["steps"], "measured without")
        record["experts"] = experts(world, size, device)
        if world.size > 1:
            world.fsdp = True
            record["main_job_fsdp"] = main_job(world, whole, corpus, size["steps"], "")
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
