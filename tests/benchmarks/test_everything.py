"""benchmarks/everything.py without a GPU: its jobs exist, share the GPUs, and end in time."""

from __future__ import annotations

import importlib.util
import itertools
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "everything.py"


@pytest.fixture(scope="module")
def everything() -> ModuleType:
    found = importlib.util.spec_from_file_location("everything", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    # the annotations of its tuples are looked up there
    sys.modules["everything"] = module
    found.loader.exec_module(module)
    return module


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_every_operator_is_measured(everything: ModuleType, tmp_path: Path) -> None:
    from benchmarks.cases import all_cases

    assert {folder for folder, _ in all_cases()} == set(everything.MINUTES)
    scripts = [Path(a) for job in everything.jobs(tmp_path) for a in job.command if a.endswith(".py")]
    assert scripts
    assert all(script.exists() for script in scripts)


def test_each_gpu_has_one_job_at_a_time(everything: ModuleType, tmp_path: Path) -> None:
    note = (
        "import os, time; t = time.time(); time.sleep(0.3); print(os.environ['CUDA_VISIBLE_DEVICES'], t, time.time())"
    )
    todo = [everything.Job("measure", f"j{i}", 0.1, _python(note)) for i in range(5)]
    done = everything.drive(todo, 2, tmp_path, 1, say=lambda line: None)
    assert [d.code for d in done] == [0] * 5
    spans: dict[str, list[tuple[float, float]]] = {}
    for log in (tmp_path / "logs").iterdir():
        gpu, start, end = log.read_text().split()
        spans.setdefault(gpu, []).append((float(start), float(end)))
    assert set(spans) == {"0", "1"}
    for found in spans.values():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))


def test_checks_share_a_gpu(everything: ModuleType, tmp_path: Path) -> None:
    wait_for_all = (
        "import sys, time, pathlib; here = pathlib.Path(sys.argv[1]); (here / sys.argv[2]).touch(); i = 0\n"
        "while len(list(here.iterdir())) < 4: i += 1; time.sleep(0.01); i < 3000 or sys.exit(3)"
    )
    met = tmp_path / "met"
    met.mkdir()
    todo = [everything.Job("check", f"j{i}", 0.5, [*_python(wait_for_all), str(met), str(i)]) for i in range(4)]
    assert [d.code for d in everything.drive(todo, 1, tmp_path, 3, say=lambda line: None)] == [0] * 4


def test_phases_follow_each_other_and_failures_are_told(everything: ModuleType, tmp_path: Path) -> None:
    said: list[str] = []
    todo = [
        everything.Job("train", "last", 0.1, _python("pass")),
        everything.Job("compile", "first", 0.1, _python("import sys; sys.exit(3)")),
        everything.Job("measure", "long", 60, _python("pass")),
    ]
    done = everything.drive(todo, 1, tmp_path, 1, say=said.append)
    assert [(d.job.name, d.code) for d in done] == [("first", 3), ("long", "no time left"), ("last", 0)]
    assert "first: exit code 3" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True], ids=["", "background"])
def test_a_job_that_hangs_is_interrupted_and_may_write(everything: ModuleType, tmp_path: Path, deaf: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    code = (
        "import time\n"
        "try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    print('kept', flush=True); time.sleep(0.2)"
    )
    try:
        (done,) = everything.drive([everything.Job("check", "hangs", 0.05, _python(code))], 1, tmp_path, 1, say=str)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.code == "interrupted"
    assert (tmp_path / "logs" / "hangs.log").read_text().split() == ["kept"]
