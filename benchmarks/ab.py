"""Is a change faster? The same cases of `python -m benchmarks` in two or more versions of the source, in turns.

    python benchmarks/ab.py HEAD . -- norm --case 4096 --stage forward
    python benchmarks/ab.py HEAD . /somewhere/else -- norm weighted_sum --dtype bf16
    python benchmarks/ab.py HEAD . -- soft_topk --device cpu
    python benchmarks/ab.py HEAD . --cases my_cases.py

A version is a folder with a copy of the repository, or a git revision. Cases and timers are those of this copy. Behind
`--` stands what `python -m benchmarks` takes to select cases (of which only ours is timed); --cases takes them from a
Python file's `cases()` instead. Each version has a process of its own; they take turns, so that a clock that drifts or
a busy host is no difference between them. A ratio is the first version's time over another's: above 1 the other is
faster, and where the range holds 1 nothing is gained. Results are compared with the first version's.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MEASURE_MS = 15.0
ROOT = Path(__file__).resolve().parents[1]


def _cases(file: str, selection: Sequence[str]) -> dict[str, Any]:
    """Return the cases to time: {name: Case}."""
    import torch

    from benchmarks.bench.runner import label
    from benchmarks.bench.select import add_options, select
    from benchmarks.cases import all_cases
    from onepass.core.about import dtype_name

    parser = argparse.ArgumentParser(prog="ab.py")
    add_options(parser)
    args = parser.parse_args(selection)
    declared = [(Path(file).stem, case) for case in runpy.run_path(file)["cases"]()] if file else all_cases()
    selected = [c for _, c in select(declared, args)]
    # one device at a time, because each device has a timer of its own
    device = "cuda" if torch.cuda.is_available() and any(c.device == "cuda" for c in selected) else "cpu"
    of_device = [c for c in selected if c.device == device]
    return {f"{c.op} {c.stage} {dtype_name(c.dtype)} {label(c.params)}": c for c in of_device}


def worker(file: str, selection: Sequence[str]) -> None:
    """Do what the parent asks for, line by line: [name, argument] → a JSON value or {"error": …}."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers may print: send that to standard error, away from the answers

    import torch

    from benchmarks.bench.compare import error, tensors
    from benchmarks.bench.runner import OURS, SEED
    from benchmarks.bench.timers import CpuTimer, CudaTimer
    from benchmarks.case import Prepared
    from onepass.core.about import one_line

    try:
        cases = _cases(file, selection)
        timer = CudaTimer(MEASURE_MS) if {c.device for c in cases.values()} == {"cuda"} else CpuTimer(MEASURE_MS)
    except (Exception, SystemExit) as failure:
        print(json.dumps({"error": one_line(failure)}), file=answers, flush=True)
        return
    call: Callable[[], Any] | None = None

    def prepare(name: str) -> None:
        nonlocal call
        call = None
        gc.collect()
        torch.manual_seed(SEED)
        ours = cases[name].make()[OURS]
        call = ours.build() if isinstance(ours, Prepared) else ours
        call()
        timer.synchronize()

    def result() -> list[torch.Tensor]:
        assert call is not None
        return [t.detach().cpu() for t in tensors(call()) if t is not None]

    def differs(path: str) -> float:
        theirs = torch.load(path, weights_only=True)
        ours = result()
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} results, the first version has {len(theirs)}")
        return max((error(a, b) for a, b in zip(theirs, ours, strict=True)), default=0.0)

    commands: dict[str, Callable[[str], Any]] = {
        "cases": lambda _: list(cases),
        "prepare": prepare,
        "time": lambda _: (timer.us(call), timer.host_us(call)),  # type: ignore[arg-type]
        "save": lambda path: torch.save(result(), path),
        "differs": differs,
    }
    for line in sys.stdin:
        name, argument = json.loads(line)
        try:
            answer = commands[name](argument)
        except Exception as failure:
            answer = {"error": one_line(failure)}
        print(json.dumps(answer), file=answers, flush=True)


class FailedError(Exception):
    """A version could not do what it was asked for."""


class Version:
    """A process that imports one version of the source."""

    def __init__(self, name: str, folder: Path, file: str, selection: Sequence[str]) -> None:
        self.name = name
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder / "src"), str(ROOT)))}
        command = [sys.executable, str(Path(__file__)), "--worker", file, *selection]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def send(self, name: str, argument: str = "") -> None:
        """Send a command to the process."""
        assert self._process.stdin is not None
        # `answer` reports a process that has ended
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([name, argument]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Wait for the answer to a command."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._process.wait() or 1)
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise FailedError(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, name: str, argument: str = "") -> Any:
        """Send a command, and wait for the answer."""
        self.send(name, argument)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def folder_of(version: str) -> Iterator[Path]:
    """The folder of a version: itself, or a worktree of the revision for as long as it is needed."""
    if (Path(version) / "src" / "onepass").is_dir():
        yield Path(version).resolve()
        return
    git = ["git", "-C", str(Path(__file__).parent)]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "tree")
        added = subprocess.run(
            [*git, "worktree", "add", "--detach", folder, version], check=False, capture_output=True, text=True
        )
        if added.returncode:
            raise SystemExit(
                f"{version!r} is neither a copy of the repository nor a git revision: {added.stderr.strip()}"
            )
        try:
            yield folder
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", folder], check=True)


def compare(versions: Sequence[Version], case: str, rounds: int) -> list[list[tuple[float, float]]]:
    """(µs, host µs) of every version in every round; SystemExit where they can't be compared."""
    for version in versions:  # all at once: they compile
        version.send("prepare", case)
    failures = []
    for version in versions:
        try:
            version.answer()
        except FailedError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
    times: list[list[tuple[float, float]]] = [[] for _ in versions]
    for turn in range(rounds):
        order = range(len(versions))
        for i in order if turn % 2 == 0 else reversed(order):
            times[i].append(tuple(versions[i].ask("time")))
    return times


def _differences(versions: Sequence[Version]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "result.pt"))
        versions[0].ask("save", path)
        errors = [version.ask("differs", path) for version in versions[1:]]
    return ["", *("same bits" if off == 0 else f"off by {off:.1e}" for off in errors)]


def _lines(versions: Sequence[Version], times: list[list[tuple[float, float]]], notes: list[str]) -> Iterator[str]:
    for version, samples, note in zip(versions, times, notes, strict=True):
        us, host = (statistics.median(t[i] for t in samples) for i in (0, 1))
        line = f"    {version.name:24} {us:9.1f} µs   host {host:7.1f}"
        if version is not versions[0]:
            ratios = [a[0] / b[0] for a, b in zip(times[0], samples, strict=True)]
            line += f"   {statistics.median(ratios):.3f}× ({min(ratios):.3f}–{max(ratios):.3f})   {note}"
        yield line.rstrip()


def main(argv: Sequence[str]) -> int:
    """Print a table; 1 when a case could not be measured."""
    argv, selection = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--cases FILE] [--rounds N] VERSION VERSION [VERSION ...] [-- SELECTION]",
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="a folder or a git revision")
    parser.add_argument("--cases", default="", metavar="FILE", help="a Python file whose cases() says what is timed")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each version at each case (default 5)")
    args = parser.parse_args(argv)
    if len(args.versions) < 2 or args.rounds < 1:
        parser.error("two versions or more, and one round or more, are needed")
    failed = 0
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(folder_of(version)) for version in args.versions]
        versions = [Version(n, f, args.cases, selection) for n, f in zip(args.versions, folders, strict=True)]
        for version in versions:
            stack.callback(version.end)
            version.send("cases")
        try:
            offered = [version.answer() for version in versions]
        except FailedError as failure:
            raise SystemExit(str(failure)) from failure
        common = [case for case in offered[0] if all(case in other for other in offered[1:])]
        if not common:
            raise SystemExit("the versions have no such case in common on this device")
        for case in common:
            print(case, flush=True)
            try:
                times = compare(versions, case, args.rounds)
                for line in _lines(versions, times, _differences(versions)):
                    print(line, flush=True)
            except FailedError as failure:
                failed = 1
                print(f"    {failure}", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
