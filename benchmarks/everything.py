"""Every number and every check that needs a GPU, in one command, on as many GPUs as there are.

    python benchmarks/everything.py --out runs/h200              all of it
    python benchmarks/everything.py --out runs/h200 --minutes 25 --only measure
    python benchmarks/everything.py --list                       the jobs, how long they take, and stop

Phases, one after another: compile (fills the compilers' caches, all cores), measure (one process per GPU and nothing
beside it, as host times count), check (the tests marked gpu, compute-sanitizer; several on a GPU, which they leave idle
most of the time), train (routing and optimizers on real text; step times count). A job's output is in
OUT/logs/<job>.log; measurements are in OUT, with tables and pictures, as in benchmarks/results/<gpu>.
A job that would not end within --minutes is not begun; one that takes three times as long as planned is interrupted,
and keeps what it has written.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from onepass.core import files

BENCHMARKS = Path(__file__).resolve().parent
# research and benchmarks are found from here
ROOT = BENCHMARKS.parent
PHASES = ("compile", "measure", "check", "train")
CHECKS_PER_GPU = 4
# minutes that each operator folder's cases take on an H200 with every rival installed
MINUTES = {
    "norm": 5.5,
    "qk_norm_rope": 0.5,
    "soft_topk": 4,
    "coor_descent": 4,
    "weighted_sum": 3,
    "topk": 1,
    "lion": 1,
    "routing": 0.5,
    "fused": 0.5,
}


class Job(NamedTuple):
    """A command that has a GPU to itself, or in the check phase shares it."""

    phase: str
    name: str
    minutes: float
    command: list[str]


class Done(NamedTuple):
    """How a job ended: its exit code, or why it has none."""

    job: Job
    code: int | str
    seconds: float


def jobs(out: Path) -> list[Job]:
    """Everything there is to do, in order; the longest of a phase first."""
    bench, script = [sys.executable, "-m", "benchmarks", "--device", "cuda"], [sys.executable, "-u"]

    def run(name: str, *args: str) -> list[str]:
        return [*script, str(BENCHMARKS / f"{name}.py"), *args]

    workers = str(max(2, (os.cpu_count() or 2) - 2))
    found = [Job("compile", "compile", 2, [*bench, "--compile-only", "--warm", workers])]
    for folder, minutes in MINUTES.items():
        found.append(Job("measure", folder, minutes, [*bench, folder, "--json", str(out / f"{folder}.json")]))
    found += [
        Job("check", "sanitize", 4, run("sanitize", "--json", str(out / "raw/sanitize.json"))),
        Job(
            "check", "tests", 10, [*script, str(ROOT / "tests" / "gpu.py"), "--record", str(out / "raw/gpu_tests.json")]
        ),
    ]
    for task, option, other, minutes in (("planted", "--start", "adverse", 8), ("text", "--task", "causal", 16)):
        command = [sys.executable, "-m", "research.ablate", task, "--out", str(out / f"ablate_{task}")]
        found.append(Job("train", f"ablate_{task}", minutes, command))
        found.append(Job("train", f"ablate_{task}_{other}", minutes, [*command, option, other]))
    return sorted(found, key=lambda job: (PHASES.index(job.phase), -job.minutes))


def _run(job: Job, gpu: int, out: Path, deadline: float) -> Done:
    """Run a job on one GPU; past three times its minutes, or past the deadline, interrupt it."""
    began = time.monotonic()
    limit = min(began + 180 * job.minutes, deadline)
    if began + 60 * job.minutes > deadline:
        return Done(job, "no time left", 0)
    log_file = files.open_regular(out / "logs" / f"{job.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(log_file, "w") as log:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        process = subprocess.Popen(
            job.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        code: int | str
        try:
            code = process.wait(timeout=limit - began)
        except subprocess.TimeoutExpired:
            code = "interrupted"
            # first as a person would, so that what there is gets written
            for sign, patience in ((signal.SIGINT, 20), (signal.SIGKILL, None)):
                os.killpg(process.pid, sign)
                try:
                    process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
    return Done(job, code, time.monotonic() - began)


def drive(todo: list[Job], gpus: int, out: Path, minutes: float, say: Callable[[str], None] = print) -> list[Done]:
    """Phase after phase, each GPU takes the next job as it becomes free."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # a shell's background: the jobs would inherit deaf ears, and lose what they had not written
        signal.signal(signal.SIGINT, signal.default_int_handler)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "raw").mkdir(exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    done: list[Done] = []
    for phase in PHASES:
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in todo:
            if job.phase == phase:
                waiting.put(job)

        def work(gpu: int, waiting: queue.SimpleQueue[Job] = waiting) -> None:
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                done.append(_run(job, gpu, out, deadline))
                say(f"{done[-1].seconds:6.0f} s  GPU {gpu}  {job.name}: {_outcome(done[-1].code)}")

        at_once = CHECKS_PER_GPU if phase == "check" else 1
        threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(gpus) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


def _outcome(code: int | str) -> str:
    return code if isinstance(code, str) else "done" if code == 0 else f"exit code {code}"


def main() -> int:
    """Run the command; 1 when a job failed or was not begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/everything"), help="directory (default runs/everything)")
    parser.add_argument("--gpus", type=int, help="how many (default: all there are)")
    parser.add_argument("--minutes", type=float, default=120.0, help="end within this time (default 120)")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="phases or jobs with TEXT in the name; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    args = parser.parse_args()
    args.out = args.out.resolve()
    todo = [j for j in jobs(args.out) if not args.only or any(t in f"{j.phase} {j.name}" for t in args.only)]
    if not todo:
        parser.error(f"--only {' '.join(args.only)}: no such job; --list shows them")
    if args.list:
        for job in todo:
            print(f"{job.phase:8}{job.minutes:5.1f} min  {job.name}")
        return 0
    import torch

    there = torch.cuda.device_count()
    gpus = args.gpus if args.gpus is not None else there
    if not 1 <= gpus <= there:
        parser.error(f"--gpus {gpus}: between 1 and the {there} of this machine" if there else "torch sees no GPU here")
    done = drive(todo, gpus, args.out, args.minutes)
    if any(d.job.phase == "measure" for d in done):
        command = [sys.executable, "-m", "benchmarks", "--report", str(args.out)]
        subprocess.run(command, check=False, cwd=ROOT)
    failed = [d for d in done if d.code != 0]
    for d in failed:
        print(f"{d.job.name}: {_outcome(d.code)}, see {args.out / 'logs' / d.job.name}.log")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
