"""Every kernel on tiny odd shapes, for NVIDIA's compute-sanitizer: forward, backward, and against the definition.

    python -m benchmarks.sanitize                        all operators under memcheck, racecheck and initcheck
    python -m benchmarks.sanitize --op norm --tool memcheck --json out.json
    compute-sanitizer --tool memcheck python -m benchmarks.sanitize --op norm --bare

Without --bare this starts itself: every operator as it is, to fill Triton's cache (compiling under the tool takes
minutes) and to see which call launches which kernels; then every operator under every tool, all at the same time, on
all GPUs in turn, calls first that launch what none before them does. "planted" is an operator with an error for each
tool: its count says that the tool sees our kernels. Results of calls are compared on the CPU.

racecheck looks at shared memory, and at writes of differing values only. What programs say to each other through global
memory (teams) it does not see: tests compare those bit for bit over many runs.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.sanitize_calls import OPERATORS, PLANTED, calls
from onepass.core.launch import compiled
from onepass.train.commands import files

TOOLS = ("memcheck", "racecheck", "initcheck")


def kernels(op: str) -> set[str]:
    """Names of all kernels of an operator."""
    from triton.runtime import KernelInterface

    package = importlib.import_module(f"onepass.{op}" if op == "fused" else f"onepass.ops.{op}")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    kernels_of_op = [v for m in modules for name, v in vars(m).items() if name.endswith("_kernel")]
    return {_where(k) for k in kernels_of_op if isinstance(k, KernelInterface)}


def _where(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('onepass.').removeprefix('ops.')}.{kernel.fn.__name__}"


def reaching_more(reached: Mapping[str, list[str]]) -> list[str]:
    """Names of calls that together reach all kernels: each adds kernels that those before it lack, the most first."""
    order: list[str] = []
    covered: set[str] = set()
    while len(covered) < len({kernel for kernels in reached.values() for kernel in kernels}):
        # max takes the first of equals
        order.append(max(reached, key=lambda name: len({*reached[name]} - covered)))
        covered |= {*reached[order[-1]]}
    return order


def bare(op: str, seconds: float, part: int = 1, parts: int = 1, order: list[str] | None = None) -> int:
    """Run an operator's calls in this process; 1 when a result is wrong.

    New calls start for `seconds` only, and after twice that the process ends, be it within a call. How far it came is
    printed after every call.
    """
    # exit, not a kill, so that the tool prints its summary
    end = threading.Timer(2 * seconds, os._exit, (1,))
    end.daemon = True
    end.start()
    launched = _watch() if op != PLANTED else Counter()
    place = {name: i for i, name in enumerate(order or ())}
    sorted_calls = sorted(calls(op), key=lambda call: place.get(call[0], len(place)))
    todo = list(itertools.islice(sorted_calls, part - 1, None, parts))
    done, wrong, reached, began = 0, 0, {}, time.perf_counter()
    for name, call in todo:
        start = time.perf_counter()
        if start - began > seconds:
            break
        before = Counter(launched)
        try:
            call()
            done += 1
        except Exception as error:
            wrong += 1
            print(f"WRONG {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        reached[name] = sorted(launched - before)
        print(f"{time.perf_counter() - start:6.1f} s {name}", flush=True)
        report = {"calls": done, "wrong": wrong, "not reached in time": len(todo) - done - wrong}
        print("RESULT " + json.dumps({**report, "launches": dict(launched), "reached": reached}), flush=True)
        if wrong and not _usable():
            break
    end.cancel()
    return int(wrong > 0)


def _usable() -> bool:
    """Whether the GPU still answers: after an illegal access it does not, and every further call would be wrong."""
    try:
        torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu").item()
    except RuntimeError:
        return False
    return True


def _watch() -> Counter[str]:
    """Count the launches of each of our kernels from now on."""
    from triton.runtime.jit import JITFunction

    launched: Counter[str] = Counter()
    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[_where(self)] += 1
        return run(self, *args, **kwargs)

    JITFunction.run = noted  # type: ignore[method-assign]
    # remembered launches, and replays, do not go through `run`: remember none
    compiled._remember = lambda *_: None  # type: ignore[assignment]
    return launched


# memcheck: space between allocations, so that a step beyond a tensor does not land in the next one
OPTIONS = {"memcheck": ("--padding", "64")}


def _command(op: str, seconds: float, tool: str | None, part: str, order: Path) -> list[str]:
    run = [sys.executable, "-m", "benchmarks.sanitize", "--op", op, "--bare", "--seconds", str(seconds), "--part", part]
    if tool is None:
        return run
    return [
        *("compute-sanitizer", "--tool", tool, "--print-limit", "50", *OPTIONS.get(tool, ())),
        *(*run, "--order", str(order)),
    ]


def _gpus() -> list[str]:
    """Values for CUDA_VISIBLE_DEVICES, one for each GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())] or [""]


def _start(command: list[str], log: Path, gpu: str) -> tuple[Any, Path, float]:
    # freed blocks go back to the driver, so that a tool knows where every tensor ends
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": gpu}
    with os.fdopen(files.open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    return process, log, time.perf_counter()


def read_log(text: str) -> dict[str, Any]:
    """Errors that the tool counted (None: it did not come to an end) and what our own run says of itself."""
    # a second line counts those that were not printed, once more
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were)", text)
    result = re.findall(r"^RESULT (.*)$", text, re.MULTILINE)
    return {"errors": sum(map(int, counts)) if counts else None, **(json.loads(result[-1]) if result else {})}


def _finish(process: Any, log: Path, began: float, limit: float) -> dict[str, Any]:
    try:
        code = process.wait(timeout=max(1.0, began + limit - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    outcome = {"seconds": round(time.perf_counter() - began, 1), "exit": code}
    return outcome | read_log(log.read_text(errors="replace"))


def merged(op: str, tool: str | None, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for the processes of an operator under a tool: sums, None where one of them did not tell."""

    def total(key: str) -> int | None:
        values = [part.get(key) for part in parts]
        return None if None in values else sum(values)

    launches: Counter[str] = Counter()
    for part in parts:
        launches.update(part.get("launches", {}))
    row = {"op": op, "tool": tool or "none", "seconds": max(p["seconds"] for p in parts)}
    row |= {"exits": [p["exit"] for p in parts]} | {k: total(k) for k in ("errors", "calls", "wrong")}
    row |= {"not reached in time": total("not reached in time"), "launches": dict(sorted(launches.items()))}
    return row | {"kernels not launched": [] if op == PLANTED else sorted(kernels(op) - {*launches})}


def drive(ops: list[str], tools: list[str], seconds: float, logs: Path, parts: int) -> list[dict[str, Any]]:
    """All operators at once without a tool, then all operators under all tools at once; each in parts."""
    table, gpus = [], itertools.cycle(_gpus())
    for group in ([None], tools):
        started: dict[tuple[str, str | None], list[Any]] = {}
        for op, tool, i in itertools.product(ops, group, range(1, parts + 1)):
            if i == 1 or op != PLANTED:
                command = _command(op, seconds, tool, f"{i}/{parts}", logs / f"{op}.order")
                log = logs / f"{op}.{tool or 'plain'}.{i}.log"
                started.setdefault((op, tool), []).append(_start(command, log, next(gpus)))
        for (op, tool), running in started.items():
            outcomes = [_finish(*process, 2 * seconds + 30) for process in running]
            if tool is None:
                reached = {name: names for part in outcomes for name, names in part.get("reached", {}).items()}
                files.write(logs / f"{op}.order", json.dumps(reaching_more(reached)))
            table.append(merged(op, tool, outcomes))
            print(json.dumps(table[-1]), flush=True)
    return table


def main() -> int:
    """Run the command; 1 when a tool found an error, did not end, or a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accepted = [*OPERATORS, PLANTED]
    parser.add_argument("--op", action="append", choices=accepted, help="operator folder (default: all)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="start no new call after this time, end after twice it (default 45)"
    )
    parser.add_argument("--json", type=Path, help="write a table of what was found")
    parser.add_argument("--logs", type=Path, help="keep the tools' output in this directory")
    parser.add_argument("--processes", type=int, default=2, help="per operator and tool (default 2)")
    parser.add_argument("--part", default="1/1", help="with --bare: I/N, every N-th call from the I-th on")
    parser.add_argument("--order", type=Path, help="with --bare: names of calls to begin with, a list in JSON")
    parser.add_argument("--bare", action="store_true", help="run the calls in this process, without a tool")
    args = parser.parse_args()
    ops = args.op or accepted
    if args.bare:
        part, parts = map(int, args.part.split("/"))
        order = json.loads(args.order.read_text()) if args.order else None
        return max(bare(op, args.seconds, part, parts, order) for op in ops)
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        table = drive(ops, args.tool or list(TOOLS), args.seconds, logs, args.processes)
    if args.json:
        files.write(args.json, json.dumps(table, indent=1) + "\n")
    under = [row for row in table if row["tool"] != "none"]
    clean = all(row["errors"] == 0 and row.get("wrong") == 0 for row in under if row["op"] != PLANTED)
    tools_see = all(row["errors"] for row in under if row["op"] == PLANTED)
    return 0 if clean and tools_see else 1


if __name__ == "__main__":
    sys.exit(main())
