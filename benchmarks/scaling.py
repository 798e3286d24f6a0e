"""Weak scaling of the main job, Lion on shards, and routing over a spread sequence against the bytes it must send.

    python -m benchmarks.scaling --json benchmarks/results/h200/raw/scaling.json

Each number of processes (default: 1 and all GPUs) is one torchrun. The main job keeps its batch per process, so that
tokens per second and process should stay; one process runs with and without its CUDA graph, as FSDP2 has none. `lion`
is one step over as many parameters in all, whole on one process. `routing` is a routed block forward and backward over
one row whose tokens are spread; `predicted_ms` is the time of one process over N, plus the bytes of docs/scale.md at
the rate at which an all-reduce of the same run sends its keys and values. `balance` is a routed feed-forward, its
heavy work balanced and not, for choices that fall anywhere and for choices on the first process alone; `predicted_ms`
is the time of the former, plus four trips of the tokens that the latter move.
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
from torch import Tensor, nn

from onepass.core import files
from onepass.core.about import device_name, versions
from onepass.nn import RoutedBlock, RoutedFeedForward
from onepass.nn.balance import shares
from onepass.nn.halo import fetch
from onepass.optim import Lion
from onepass.train import config as configs
from onepass.train import data, parallel
from onepass.train.loop import FLUSH, Training

# sizes: on a GPU as the questions are asked, on a CPU as small as shows that it runs
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "steps": 40, "job": {}, "width": 4096, "layers": 8, "repeats": 20,
        "n": 262144, "block": {"dim": 1024, "heads": 8, "dim_head": 64, "window": 128}, "dtype": torch.bfloat16,
    },
    "cpu": {
        "steps": 10, "job": {"dim": 16, "seq": 64, "batch": 2, "blocks": 1}, "width": 64, "layers": 2, "repeats": 3,
        "n": 512, "block": {"dim": 16, "heads": 2, "dim_head": 8, "window": 16}, "dtype": torch.float32,
    },
}  # fmt: skip
K, K_KV = 1 / 16, 1 / 8


def wait(device: torch.device) -> None:
    """Wait for what a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median wall time of a call that all processes make, each time from a common start."""
    found = []
    for _ in range(repeats + 3):
        wait(device)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(()))
        began = time.perf_counter()
        call()
        wait(device)
        found.append(1e3 * (time.perf_counter() - began))
    # the slowest process decides; the first three calls compile and allocate
    median = torch.tensor(statistics.median(found[3:]), device=device)
    if dist.is_initialized():
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return round(float(median), 4)


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
    """Return the time of one step of Lion, on shards if there are several processes."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(size["width"], size["width"], bias=False) for _ in range(size["layers"])))
    model = model.to(device)
    if isinstance(world, parallel.Processes):
        for layer in model:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
    count = sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    took = milliseconds(Lion(model.parameters()).step, size["repeats"], device)
    # parameter and momentum are read and written, the gradient is read, all of them fp32
    return {"parameters": count, "ms": took, "gb_per_s_and_process": round(20 * count / world.size / took / 1e6, 2)}


def one_row(size: dict[str, Any], device: torch.device) -> Tensor:
    """Return tokens (1, n, dim), the same in every process."""
    x = torch.randn(1, size["n"], size["block"]["dim"], generator=torch.Generator().manual_seed(0))
    return x.to(device, size["dtype"])


def both_passes(world: parallel.World, layer: nn.Module, x: Tensor, repeats: int, device: torch.device) -> float:
    """Return the time of forward and backward, with the tokens of x over the processes if there are several."""
    up = torch.ones_like(x)
    if isinstance(world, parallel.Processes):
        from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

        layer = distribute_module(layer, world.mesh)
        x, up = (distribute_tensor(t, world.mesh, [Shard(1)]) for t in (x, up))
    x.requires_grad_()

    def call() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(up)

    return milliseconds(call, repeats, device)


def balance(world: parallel.World, size: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the time of a routed feed-forward over a spread row, and the most tokens that a heavy branch gets."""
    n, repeats = size["n"], size["repeats"]
    chosen, found = round(n * K), {}
    for choices in ("anywhere", "first"):
        for balanced in (False, True):
            torch.manual_seed(0)
            layer: Any = RoutedFeedForward(size["block"]["dim"], K, balance=balanced).to(device, size["dtype"])
            x = one_row(size, device)
            if choices == "first":
                x[:, :chosen] += 10 * layer.router.weight.detach()
            rows: list[int] = []
            layer.heavy.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].shape[1]))
            took = both_passes(world, layer, x, repeats, device)
            most = torch.tensor(rows[-1], device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            found[f"{choices}, balanced" if balanced else choices] = {"ms": took, "most_tokens": int(most)}
    plan = shares([chosen, *[0] * (world.size - 1)])
    begin, end = plan.given[dist.get_rank()]
    travelling = torch.zeros(1, end - begin, size["block"]["dim"], dtype=size["dtype"], device=device)
    trip = milliseconds(lambda: fetch(travelling, plan.given, plan.taken, None), repeats, device)
    predicted_ms = round(found["anywhere"]["ms"] + 4 * trip, 3)
    return {"n": n, **found, "tokens_moved": plan.travelling, "trip_ms": trip, "predicted_ms": predicted_ms}


def routing(world: parallel.World, size: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the time of a routed block over one row, what it sends, and how fast an all-reduce sends as much."""
    torch.manual_seed(0)
    n, options, dtype = size["n"], size["block"], size["dtype"]
    block: Any = RoutedBlock(options["dim"], K, k_kv=K_KV, **{k: v for k, v in options.items() if k != "dim"})
    block = block.to(device, dtype)
    took = both_passes(world, block, one_row(size, device), size["repeats"], device)
    found: dict[str, Any] = {"n": n, **options, "dtype": str(dtype), "ms": took}
    if world.size > 1:
        inner, item = options["heads"] * options["dim_head"], dtype.itemsize
        memories = torch.zeros(round(n * K_KV), 2 * inner, dtype=dtype, device=device)
        found["bytes"] = {
            "scores": 3 * 4 * n, "windows": 4 * options["window"] * options["dim"] * item,
            "keys_and_values": memories.numel() * item,
            "weights": sum(p.numel() for p in block.parameters()) * item,
        }  # fmt: skip
        # both passes sum keys and values; backward also sums the weights' gradients
        found["all_reduce_ms"] = milliseconds(lambda: dist.all_reduce(memories), size["repeats"], device)
    return found


def predicted(one: dict[str, Any], many: dict[str, Any], processes: int) -> float:
    """Return one process's time over N, plus all bytes at the rate of the measured all-reduce."""
    sent = many["bytes"]
    total = 2 * (sent["keys_and_values"] + sent["windows"]) + sent["scores"] + sent["weights"]
    return round(one["ms"] / processes + many["all_reduce_ms"] * total / sent["keys_and_values"], 3)


def work(folder: Path, kind: str) -> None:
    """Measure as one of the processes that torchrun started."""
    size = SIZES[kind]
    with parallel.joined() as world:
        corpus = data.load([])
        preset = "gpu" if kind == "cuda" else "cpu"
        values = {
            "task": "masked",
            "route": "learned",
            "device": kind,
            "precision": "bf16" if kind == "cuda" else "fp32",
        }
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
        if world.size > 1:
            # the same rows, their tokens over the processes
            world.sequence_parallel = True
            record["main_job_sequence_parallel"] = main_job(world, whole, corpus, size["steps"], "")
        record["lion"] = lion(world, size, device)
        record["routing"] = routing(world, size, device)
        if world.size > 1:
            record["balance"] = balance(world, size, device)
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
        record = launched(processes, args.device)
        if processes > 1:
            record["routing"]["predicted_ms"] = predicted(records[0]["routing"], record["routing"], processes)
        records.append(record)
        print(json.dumps(record, indent=1))
    result = {
        "device": device_name(torch.device(args.device)), "versions": versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "records": records,
    }  # fmt: skip
    if args.json:
        files.write(args.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
