"""Run cases in several processes of one group: one start for many cases, and the error of each."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

Case = Callable[[], None]
SECONDS = 600


def run(script: str, world: int, backend: str = "gloo", room: str = "") -> None:
    """Run the cases, or a room's, of a script beside this file in `world` processes; fail with all errors."""
    path = Path(__file__).with_name(script)
    with tempfile.TemporaryDirectory() as folder:
        modules = os.pathsep.join(part for part in (str(path.parents[1]), *sys.path) if part)
        first = subprocess.Popen(
            [sys.executable, str(path), folder, backend, room, str(world)], text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said = first.communicate(timeout=SECONDS)[0]
        except BaseException:
            os.killpg(first.pid, signal.SIGKILL)
            raise
        errors = []
        for rank in range(world):
            results = Path(folder, f"{rank}.json")
            assert results.exists(), f"rank {rank} ended early:\n{said[-4000:]}"
            for name, error in json.loads(results.read_text(encoding="utf-8")).items():
                errors += [f"{name}, rank {rank}: {error}"] if error else []
        assert not errors, "\n".join(errors)


def device_type() -> str:
    """Return the device of the group's tensors."""
    import torch.distributed as dist

    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"


def main(cases: dict[str, Case]) -> None:
    """Run in the process that `run` started and in its forks: all cases, in order, whether or not one fails."""
    import torch
    import torch.distributed as dist

    folder, backend, room, world = *sys.argv[1:4], int(sys.argv[4])
    # forks have imported what they need; a GPU begins in each alone
    rank = next((rank for rank in range(1, world) if not os.fork()), 0)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    results = {}
    for name, case in cases.items():
        if not name.startswith(room):
            continue
        torch.manual_seed(0)
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc(limit=-8)
    Path(folder, f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()
