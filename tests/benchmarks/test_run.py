"""`python -m benchmarks`: parts, compiling ahead; the operator that it measures exists only here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_fakes import FakeTimer, case, fake_operator, thunk
from benchmarks import warm
from benchmarks.__main__ import main
from benchmarks.bench import timers
from benchmarks.bench.records import read

__all__ = ["fake_operator"]  # pytest finds the fixture under its name

pytestmark = pytest.mark.usefixtures("fake_operator")


@pytest.fixture(autouse=True)
def _fakes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "CpuTimer", lambda **options: FakeTimer())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_parts_are_disjoint_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    listed = []
    for part in ("1/2", "2/2"):
        assert main(["--list", "--part", part]) == 0
        listed += capsys.readouterr().out.splitlines()
    assert len(listed) == len(set(listed)) == 2


def test_compile_only_measures_nothing(fake_operator: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    fake_operator.CASES = [case(lambda: {"onepass": lambda: calls.append(1) or torch.ones(1)})]
    assert main(["--compile-only"]) == 0
    assert 1 <= len(calls) <= 2
    assert capsys.readouterr().out == ""


def test_warm_starts_this_command_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Done:
        def wait(self) -> None:
            pass

    monkeypatch.setattr(warm, "_start", lambda command: started.append(command[1:]) or Done())
    assert main(["fake", "--part", "1/2", "--case", "4x", "--warm", "3", "--limit", "5"]) == 0
    same = ["-m", "benchmarks", "fake", "--limit", "5.0", "--case", "4x", "--compile-only", "--part"]
    assert started == [[*same, part] for part in ("1/6", "3/6", "5/6")]


def test_warm_and_compile_only_leave_all_compiling_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(warm, "_start", lambda command: started.append(command) or SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(warm, "compile_only", lambda *_, **__: pytest.fail("compiled in this process"))
    assert main(["--compile-only", "--warm", "2"]) == 0
    assert len(started) == 2


def test_parts_count_the_cases_of_the_device(fake_operator: SimpleNamespace, tmp_path: Path) -> None:
    """A part is a share of what is measured, whatever is declared for the other device."""
    ones = {"onepass": thunk(torch.ones(2))}
    devices = ("cuda", "cpu", "cuda", "cpu")
    fake_operator.CASES = [case(lambda: ones, params={"i": i}, device=d) for i, d in enumerate(devices)]
    for part in ("1/2", "2/2"):
        path = tmp_path / f"{part[0]}.json"
        assert main(["--part", part, "--json", str(path)]) == 0
        assert len(read(path)[1]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--part", "3/2"], "--part '3/2': I/N with 1 ≤ I ≤ N"),
        (["--part", "2"], "--part '2': I/N"),
        (["--part", "3/3"], "--part 3/3: there are fewer cases than parts"),
        (["--report", "nowhere"], "nowhere: no such directory"),
        (["--warm", "-3"], "argument --warm: must be from 0"),
        (["--warm", "2.5"], "argument --warm: must be a whole number"),
        (["nothing"], "unknown operator 'nothing'"),
    ],
)
def test_mistakes_cost_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("python -m benchmarks: ")
    assert err.count("\n") == 1
