"""Start `onepass train` with torchrun, as its user does but for few measurements and pictures that are not encoded."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

from onepass.__main__ import main
from onepass.train import config, parallel
from train.tiny import TINY, printed, quick

ROOT = Path(__file__).parents[2]
SECONDS = 200
BF16 = "ONEPASS_TEST_BF16"  # the variable that asks for weights of 16 bits, which a CPU's runs don't have


def start(processes: int, *options: object, restarts: int = 0) -> subprocess.Popen[str]:
    """Start `onepass train OPTIONS` in this many processes."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={processes} --max-restarts={restarts}".split()
    command = [sys.executable, *launcher, __file__, "train", *map(str, options)]
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    # a process that crashes tells where
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(running: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a run printed and its standard error; stop one that takes too long."""
    try:
        return running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        running.terminate()
        raise


def train(processes: int, texts: Path, out: Path, *options: object) -> str:
    """Train a tiny model to the end, on one process here; return what was printed."""
    given = [texts, "--out", out, *TINY, "--threads", 1, *options]
    if processes == 1:
        with quick():
            return printed("train", *given)
    with start(processes, *given) as running:
        said, faults = ended(running)
    assert running.returncode == 0, faults  # torchrun's own report is the end of it, and its longest part
    return said


def own_lines(faults: str) -> list[str]:
    """Return the lines of onepass in what torchrun and its processes wrote to standard error."""
    return [line for line in faults.splitlines() if line.startswith("onepass train: ")]


if __name__ == "__main__":
    if seconds := os.environ.get("ONEPASS_TEST_COLLECTIVE"):
        parallel.COLLECTIVE = datetime.timedelta(seconds=float(seconds))
    if os.environ.get(BF16):
        build = config.build
        config.build = lambda preset, **values: build(preset, **{**values, "precision": "bf16"})
    with quick():
        sys.exit(main())
