"""Stop the main job in the worst ways and resume it, many times: it has to end as if it had never been stopped.

    python benchmarks/soak.py [--resumes 50] [--memory-steps 10000] [--seed 0] [--json FILE]

One run trains to its end undisturbed. A second one, with the same options, is stopped again and again: killed while it
starts, while it trains and while it writes a file, asked to end, left without disk space, and killed after its clock
was set back. After each stop its checkpoint and metrics have to be whole and no older than before. At the end both
runs' metrics (but for what depends on the clock), weights and momentum have to be equal, bit for bit.

A third run takes many steps, and its memory has to stay flat. `ALLOWED` says what that means.

The seed decides which fault comes when and how long each waits; the step that it meets depends on the machine. A
process forks for each round, so that torch is imported once. The disk is full by a limit on the size of files
(RLIMIT_FSIZE). Needs Linux. Exit code 0, or 1 with what went wrong.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

# imported here, so that children need not import it again
from onepass.__main__ import main as onepass_command
from onepass.core.about import cpu_name, versions
from onepass.train import checkpoint
from onepass.train.commands import files
from onepass.train.run import METRICS, Run

SIZE = ["--dim", "16", "--blocks", "2", "--seq", "32", "--batch", "2", "--device", "cpu"]
STEPS_PER_RESUME = 16
LEAST_STEPS = 800  # so that the last fault comes a second before the end, however few there are
EVERY = 5  # steps between checkpoints
FAULTS = ("kill -9 at the start", "kill -9", "kill -9 in a write", "SIGTERM", "disk full", "clock set back")
CLOCKED = {"seconds", "tokens_per_s", "digest"}  # a row's digest covers the other two
PATIENCE = 300.0  # seconds that a round may take
# bytes a step by which the memory may grow: one forgotten tensor of one number weighs more (`tensor_bytes` measures it)
ALLOWED = 256


class SoakError(Exception):
    """The main job broke a promise."""


def start(arguments: list[str], log: Path, before: Callable[[], None] = lambda: None) -> int:
    """Let a fork of this process run `onepass train`, its output in `log`; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        before()
        code = onepass_command(["train", *arguments])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """Return the exit code of a process, −n for signal n; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def wait(child: int, until: Callable[[], bool] = lambda: False) -> int | None:
    """Wait for a process's end, or for something else; return its exit code, None when it still runs."""
    deadline = time.monotonic() + PATIENCE
    code = None
    try:
        while (code := ended(child)) is None and not until():
            if time.monotonic() > deadline:
                raise SoakError(f"nothing happened for {PATIENCE:.0f} s")
            time.sleep(0.002)
    except BaseException:
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    return code


def clock_goes_back(seed: int) -> None:
    """Set every clock of this process back by up to two hours, at about one reading in twenty."""
    draws = random.Random(seed)
    behind = 0.0

    def turned(read: Callable[[], float]) -> Callable[[], float]:
        def now() -> float:
            nonlocal behind
            if draws.random() < 0.05:
                behind += draws.uniform(0, 7200)
            return read() - behind

        return now

    for name in ("time", "monotonic", "perf_counter"):
        setattr(time, name, turned(getattr(time, name)))


class Soak:
    """The run that is disturbed, round after round."""

    def __init__(self, root: Path, texts: Path, resumes: int, seed: int) -> None:
        self.out = root / "disturbed"
        self.log = texts.parent / "log"
        self.steps = max(STEPS_PER_RESUME * resumes, LEAST_STEPS)
        self.options = [str(texts), *SIZE, "--steps", str(self.steps), "--checkpoint-every", str(EVERY)]
        self.draws = random.Random(seed)
        self.faults = [FAULTS[i % len(FAULTS)] for i in range(resumes)]
        self.draws.shuffle(self.faults)
        self.run, self.saved = Run(self.out), self.out / checkpoint.NAME
        self.step = -1
        self.met: collections.Counter[str] = collections.Counter()
        self.unfinished = 0  # rounds that left a part of a file behind

    def begin(self, before: Callable[[], None] = lambda: None) -> int:
        """Start the run, or go on with it when it has begun."""
        resume = ["--resume"] if (self.out / "config.json").exists() else []
        return start([*self.options, *resume, "--out", str(self.out)], self.log, before)

    def stamp(self) -> int:
        return self.saved.stat().st_mtime_ns if self.saved.exists() else 0

    def round(self, fault: str, step: int) -> None:
        """Go on, meet a fault after `step` steps at the earliest, and see what is left."""
        stamp, draws = self.stamp(), self.draws
        seed, delay = draws.randrange(2**32), draws.random()
        limit = draws.randrange(1, 20_000)
        before: Callable[[], None] = lambda: None  # noqa: E731
        if fault == "clock set back":
            before = lambda: clock_goes_back(seed)  # noqa: E731
        elif fault == "disk full":
            before = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
        child = self.begin(before)
        if fault == "kill -9 at the start":
            code = self.stop(child, signal.SIGKILL, 0.5 * delay)
        elif fault == "disk full":
            code = wait(child)
        else:
            code = wait(child, lambda: self.stamp() != stamp and checkpoint.load(self.saved).step >= step)
            if code is not None:
                raise SoakError(f"it ended with code {code} before it was stopped")
            if fault == "kill -9 in a write":
                self.meet_a_write()
                code = self.stop(child, signal.SIGKILL, 0)
            else:
                sign = signal.SIGTERM if fault == "SIGTERM" or (fault == "clock set back" and seed % 2) else None
                code = self.stop(child, sign or signal.SIGKILL, 0.05 * delay)
        self.judge(fault, code)

    def meet_a_write(self) -> None:
        """Wait for a half-written file without a pause: it is there for less than a millisecond."""
        deadline = time.monotonic() + 10
        while not any(name.endswith(".partial") for name in os.listdir(self.out)) and time.monotonic() < deadline:
            pass

    def stop(self, child: int, sign: signal.Signals, delay: float) -> int | None:
        """Send a signal after a while; return the exit code."""
        time.sleep(delay)
        if (code := ended(child)) is not None:
            return code
        os.kill(child, sign)
        return wait(child)

    def judge(self, fault: str, code: int | None) -> None:
        """See that the process ended as it should have, and that what it left is whole."""
        output = self.log.read_text(errors="replace")
        expected = {"disk full": (2,), "SIGTERM": (143,), "clock set back": (143, -9)}.get(fault, (-9,))
        if code not in expected or "Traceback" in output:
            raise SoakError(f"exit code {code}, expected {' or '.join(map(str, expected))}")
        if fault == "disk full" and "file too large" not in output:
            raise SoakError("it did not say that the disk is full")
        self.met[fault] += 1
        self.unfinished += bool(list(self.out.glob("*.partial")))
        saved = self.run.checkpoint()
        if saved:
            self.run.verify(saved)
        now = saved.step if saved else -1
        if now < self.step:
            raise SoakError(f"the checkpoint went back from step {self.step} to {now}")
        self.step = now

    def play(self) -> None:
        """Meet every fault, then train to the end."""
        for number, fault in enumerate(self.faults, 1):
            try:
                # from the first steps to the last, over measurements and checkpoints
                self.round(fault, int(0.9 * self.steps * number / len(self.faults)))
            except Exception as error:
                output = self.log.read_text(errors="replace")[-2000:]
                raise SoakError(f"round {number}, {fault}: {error}\n{output}") from error
            print(f"{number:4}/{len(self.faults)}  {fault:22} step {self.step}", flush=True)
        finish(self.begin(), self.log)
        if left := list(self.out.glob("*.partial")):
            raise SoakError(f"{left[0].name} is left behind")


def finish(child: int, log: Path) -> None:
    """Let a run come to its end."""
    if code := wait(child):
        raise SoakError(f"exit code {code}\n{log.read_text(errors='replace')[-2000:]}")


def compare(one: Path, other: Path) -> dict[str, int]:
    """See that two runs came to the same; return how much was compared."""

    def rows(run: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
        return [{name: value for name, value in row.items() if name not in CLOCKED} for row in lines]

    if rows(one) != rows(other):
        different = [i for i, (a, b) in enumerate(zip(rows(one), rows(other), strict=False)) if a != b]
        raise SoakError(f"metrics differ from row {different[0] if different else 'after the last common one'} on")
    a, b = (checkpoint.load(run / checkpoint.NAME) for run in (one, other))
    if (a.step, a.tensors.keys()) != (b.step, b.tensors.keys()):
        raise SoakError("the checkpoints hold different things")
    for name, value in a.tensors.items():
        if not torch.equal(value.reshape(-1).view(torch.uint8), b.tensors[name].reshape(-1).view(torch.uint8)):
            raise SoakError(f"{name} differs")
    return {"rows": len(rows(one)), "tensors": len(a.tensors), "numbers": sum(t.numel() for t in a.tensors.values())}


def tensor_bytes() -> float:
    """Measure what keeping one more tensor of one number costs a process."""
    kept, before = [], resident(os.getpid())
    kept += [torch.zeros(1) for _ in range(100_000)]
    return (resident(os.getpid()) - before) / len(kept)


def resident(child: int) -> int:
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def memory(root: Path, texts: Path, steps: int) -> dict[str, Any]:
    """Train for many steps and compare the memory after a tenth of them with that at the end."""
    out, log = root / "long", texts.parent / "log"
    child = start([str(texts), *SIZE, "--steps", str(steps), "--checkpoint-every", "100", "--out", str(out)], log)
    sizes: list[tuple[int, int]] = []
    code = None
    while code is None:
        code = wait(child, (out / checkpoint.NAME).exists)
        if code is None:
            lines = (out / METRICS).read_bytes()[-400:].splitlines() if (out / METRICS).exists() else []
            with contextlib.suppress(ValueError, OSError, IndexError):
                sizes.append((int(json.loads(lines[-1])["step"]), resident(child)))
            time.sleep(0.1)
    if code:
        raise SoakError(f"exit code {code}\n{log.read_text(errors='replace')[-2000:]}")
    # the last row comes before the pictures, whose libraries are no part of a step
    warm = [size for step, size in sizes if 0.1 * steps <= step < 0.2 * steps]
    end = [size for step, size in sizes if 0.9 * steps <= step < steps]
    if not warm or not end:
        raise SoakError("too few readings of the memory")
    grown = statistics.median(end) - statistics.median(warm)
    each, tensor = grown / (0.8 * steps), tensor_bytes()
    if not each < ALLOWED < tensor:
        raise SoakError(f"{each:.0f} bytes a step; allowed are {ALLOWED}, and a tensor has {tensor:.0f}")
    return {
        "steps": steps, "readings": len(sizes), "mib_after_a_tenth": round(statistics.median(warm) / 2**20, 2),
        "mib_at_the_end": round(statistics.median(end) / 2**20, 2), "bytes_a_step": round(each, 1),
        "allowed_bytes_a_step": ALLOWED, "one_tensor_bytes": round(tensor),
    }  # fmt: skip


def write_texts(folder: Path) -> None:
    """Write a few files to learn from."""
    folder.mkdir()
    words = ["route", "token", "heavy", "light", "byte", "k", "norm", "=", "(x)", "é", "\n", "mask\n"]
    for number in range(24):
        chosen = [words[(number * 7 + place * place) % len(words)] for place in range(120)]
        (folder / f"{number}.txt").write_text(f"{number} " + " ".join(chosen))


def soak(root: Path, resumes: int, memory_steps: int, seed: int) -> dict[str, Any]:
    """Do all of it in a directory; return the record."""
    began, disk = time.monotonic(), root / "disk"
    disk.mkdir()
    write_texts(root / "texts")
    disturbed = Soak(disk, root / "texts", resumes, seed)
    finish(start([*disturbed.options, "--out", str(disk / "whole")], disturbed.log), disturbed.log)
    print(f"undisturbed run of {disturbed.steps:,} steps done", flush=True)
    disturbed.play()
    compared = compare(disk / "whole", disturbed.out)
    print(f"equal, bit for bit: {compared}", flush=True)
    flat = memory(disk, root / "texts", memory_steps) if memory_steps else None
    print(f"memory: {flat}", flush=True)
    return {
        **versions(), "cpu": cpu_name(), "date": datetime.now(timezone.utc).date().isoformat(), "seed": seed,
        "resumes": resumes, "steps": disturbed.steps, "checkpoint_every": EVERY, "options": SIZE,
        "faults": dict(sorted(disturbed.met.items())), "rounds_that_left_a_partial_file": disturbed.unfinished,
        "disk_full_by": "RLIMIT_FSIZE", "equal_bit_for_bit": compared, "memory": flat,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> int:
    """Read the command line, soak, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resumes", type=int, default=50, help="faults, each followed by a resumption (default 50)")
    parser.add_argument(
        "--memory-steps", type=int, default=10_000, help="steps of the long run (default 10000; 0: no such run)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments (default 0)")
    parser.add_argument("--json", type=Path, help="where to write the record")
    args = parser.parse_args()
    # a fork has only the thread that forked: torch must not have started others
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="onepass-soak-"))
    try:
        record = soak(root, args.resumes, args.memory_steps, args.seed)
    except SoakError as error:
        print(f"FAILED with --seed {args.seed} (what is left is in {root}): {error}")
        return 1
    shutil.rmtree(root)
    if args.json:
        files.write(args.json, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
