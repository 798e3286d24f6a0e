"""Every kernel on tiny odd shapes, for NVIDIA's compute-sanitizer: forward, backward, and against the definition.

    python benchmarks/sanitize.py                        all operators under memcheck, racecheck and initcheck
    python benchmarks/sanitize.py --op norm --tool memcheck --json out.json
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py --op norm --bare

Without --bare this starts itself: every operator as it is, to fill Triton's cache (compiling under the tool takes
minutes), then every operator under every tool, all at the same time. "planted" is an operator with an error for each
tool: its count says that the tool sees our kernels. Results of calls are compared on the CPU.

racecheck looks at shared memory, and at writes of differing values only. What programs say to each other through global
memory (teams) it does not see: tests compare those bit for bit over many runs.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sanitize_calls import PLANTED, calls

from onepass.core import spec

TOOLS = ("memcheck", "racecheck", "initcheck")


def bare(op: str, seconds: float, part: int = 1, parts: int = 1) -> int:
    """Run an operator's calls in this process; 1 when a result is wrong. New calls start for `seconds` only."""
    launched = _watch() if op != PLANTED else set()
    began, done, wrong, left = time.perf_counter(), 0, 0, 0
    for name, call in itertools.islice(calls(op), part - 1, None, parts):
        start = time.perf_counter()
        if start - began > seconds:
            left += 1
            continue
        try:
            call()
            done += 1
        except Exception as error:
            wrong += 1
            print(f"WRONG {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            if "CUDA" in str(error):
                break
        print(f"{time.perf_counter() - start:6.1f} s {name}", flush=True)
    missing = {_where(k.fn()) for k in getattr(spec.load(op), "KERNELS", ())} - launched if op != PLANTED else set()
    report = {"calls": done, "wrong": wrong, "not reached in time": left, "kernels": len(launched)}
    print("RESULT " + json.dumps({**report, "kernels not launched": sorted(missing)}), flush=True)
    return int(wrong > 0)


def _where(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('onepass.ops.')}.{kernel.fn.__name__}"


def _watch() -> set[str]:
    """Names of our kernels, filled as they are launched for the first time in a specialisation."""
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()
    run = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(_where(self))
        return run(self, *args, **kwargs)

    JITFunction.run = noted  # type: ignore[method-assign]
    return launched


# memcheck: space between allocations, so that one step beyond a tensor is no step into the next
OPTIONS = {"memcheck": ("--padding", "64")}


def _command(op: str, seconds: float, tool: str | None, part: str) -> list[str]:
    own = [sys.executable, __file__, "--op", op, "--bare", "--seconds", str(seconds), "--part", part]
    return (
        own
        if tool is None
        else ["compute-sanitizer", "--tool", tool, "--print-limit", "50", *OPTIONS.get(tool, ()), *own]
    )


def _start(command: list[str], log: Path) -> tuple[Any, Path, float]:
    # freed blocks go back to the driver, so that a tool knows where every tensor ends
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    return process, log, time.perf_counter()


def read_log(text: str) -> dict[str, Any]:
    """Errors that the tool counted (None: it did not come to an end) and what our own run says of itself."""
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    result = re.findall(r"^RESULT (.*)$", text, re.MULTILINE)
    return {"errors": sum(map(int, counts)) if counts else None, **(json.loads(result[-1]) if result else {})}


def _finish(process: Any, log: Path, began: float, limit: float) -> dict[str, Any]:
    try:
        code = process.wait(timeout=max(1.0, began + limit - time.perf_counter()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    found = {"seconds": round(time.perf_counter() - began, 1), "exit": code}
    return found | read_log(log.read_text(errors="replace"))


def drive(ops: list[str], tools: list[str], seconds: float, logs: Path, parts: int) -> list[dict[str, Any]]:
    """All operators at once without a tool, then all operators under all tools at once; each in parts."""
    table = []
    for group, limit in (([None], seconds + 20), (tools, 2 * seconds + 15)):
        started = {}
        for op, tool, i in itertools.product(ops, group, range(1, parts + 1)):
            if i == 1 or op != PLANTED:
                command = _command(op, seconds, tool, f"{i}/{parts}")
                started[op, tool, i] = _start(command, logs / f"{op}.{tool or 'plain'}.{i}.log")
        for (op, tool, i), running in started.items():
            table.append({"op": op, "tool": tool or "none", "part": f"{i}/{parts}", **_finish(*running, limit)})
            print(json.dumps(table[-1]), flush=True)
    return table


def main() -> int:
    """Run the command; 1 when a tool found an error, did not end, or a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    accepted = [*spec.folders(), PLANTED]
    parser.add_argument("--op", action="append", choices=accepted, help="operator folder (default: all)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all three")
    parser.add_argument("--seconds", type=float, default=45.0, help="start no new call after this time (default 45)")
    parser.add_argument("--json", type=Path, help="write a table of what was found")
    parser.add_argument("--logs", type=Path, help="keep the tools' output in this directory")
    parser.add_argument("--processes", type=int, default=2, help="per operator and tool (default 2)")
    parser.add_argument("--part", default="1/1", help="with --bare: I/N, every N-th call from the I-th on")
    parser.add_argument("--bare", action="store_true", help="run the calls in this process, without a tool")
    args = parser.parse_args()
    ops = args.op or accepted
    if args.bare:
        part, parts = map(int, args.part.split("/"))
        return max(bare(op, args.seconds, part, parts) for op in ops)
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        table = drive(ops, args.tool or list(TOOLS), args.seconds, logs, args.processes)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    under = [row for row in table if row["tool"] != "none"]
    clean = all(row["errors"] == 0 and row.get("wrong") == 0 for row in under if row["op"] != PLANTED)
    seen = all(row["errors"] for row in under if row["op"] == PLANTED)
    return 0 if clean and seen else 1


if __name__ == "__main__":
    sys.exit(main())
