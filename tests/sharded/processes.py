"""Run cases in several processes of one group: one start for many cases, and the error of each."""

from __future__ import annotations

import datetime
import json
import os
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
        paths = [str(path.parents[1]), *sys.path]
        base = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(path), folder, backend, room],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        errors = []
        for rank in range(world):
            results = Path(folder, f"{rank}.json")
            assert results.exists(), f"rank {rank} ended early:\n{said[rank][-4000:]}"
            for name, error in json.loads(results.read_text(encoding="utf-8")).items():
                errors += [f"{name}, rank {rank}: {error}"] if error else []
        assert not errors, "\n".join(errors)


def device_type() -> str:
    """Return the device of the group's tensors."""
    import torch.distributed as dist

    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"


def main(cases: dict[str, Case]) -> None:
    """Run in a process that `run` started: all cases, in order, whether or not one fails."""
    import torch
    import torch.distributed as dist

    folder, backend, room = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
