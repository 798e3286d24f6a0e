"""`python -m benchmarks`: tables, records, parts, mistakes; the operator that it measures exists only here."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_fakes import FakeTimer, case, everything, fake_operator, thunk
from benchmarks import warm
from benchmarks.__main__ import main
from benchmarks.bench import runner, timers
from benchmarks.bench.compare import disagreement
from benchmarks.bench.records import FIELDS, MEMORY, read, record
from benchmarks.bench.runner import DISAGREES, FAILED, OK
from benchmarks.case import Definition, Prepared

__all__ = ["fake_operator"]  # pytest finds the fixture under its name

pytestmark = pytest.mark.usefixtures("fake_operator")


@pytest.fixture(autouse=True)
def _fake_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "CpuTimer", lambda **options: FakeTimer())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    assert main(["--json", str(path)]) == 0
    header, *records = json.loads(path.read_text())
    assert header["header"] is True
    assert header["complete"] is True
    assert header["copy_gbps"] == 1000.0
    for key in ("onepass", "python", "torch", "triton", "cuda", "driver", "os", "gpu", "date", "settings"):
        assert key in header
    assert header["torch"] == torch.__version__
    assert list(header["rivals"]) == ["torch"]
    assert header["missing"] == ["absent_package", "far_away"]
    assert [(p["impl"], p["pass"]) for p in header["failed"]] == [("raises", "forward"), ("raises", "backward")]
    assert {p["impl"] for p in header["disagreeing"]} == {"wrong"}
    assert all(tuple(r) == FIELDS + MEMORY for r in records)
    assert {r["impl"] for r in records} == {"onepass", "agrees", "torch.compile of it"}
    assert records[0] == {
        "op": "fake", "pass": "forward", "case": {"rows": 4, "cols": 8}, "dtype": "float32", "impl": "onepass",
        "us": 10.0, "gbps": 10.0, "copy_pct": 1.0, "host_us": 3.0, "peak_mib": 2.0, "kept_mib": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing"], "unknown operator 'nothing': accepted are fake, fakes"),
    (["--dtype", "int8"], "--dtype 'int8': accepted are fp32"),
    (["--device", "tpu"], "--device 'tpu': accepted are cuda, cpu"),
    (["--device", "cuda"], "no case matches"),
    (["--json", "/dev/null/x.json"], "can't write /dev/null/x.json"),
    (["--part", "3/2"], "--part '3/2': I/N with 1 ≤ I ≤ N"),
    (["--part", "²/3"], "--part '²/3': I/N with 1 ≤ I ≤ N"),
    (["--part", "3/3"], "--part 3/3: there are fewer cases than parts"),
    (["--report", "nowhere"], "nowhere: no such directory"),
    (["--warm", "-3"], "argument --warm: must be from 0"),
])  # fmt: skip
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


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("launch failed"), 1)])
def test_an_interruption_and_a_lost_device_keep_what_was_measured(
    fake_operator: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int,
) -> None:  # fmt: skip
    timer = FakeTimer()
    monkeypatch.setattr(timers, "CpuTimer", lambda **options: timer)

    def breaks() -> Any:
        timer.lost = code == 1
        raise error

    fake_operator.CASES.append(case(lambda: {"onepass": breaks}, op="later"))
    path = tmp_path / "r.json"
    assert main(["--json", str(path)]) == code
    assert ("stopped: onepass at later 4x8 broke the device" in capsys.readouterr().out) == timer.lost
    header, records = read(path)
    assert header["complete"] is False
    assert len(records) == 6


def test_warm_starts_this_command_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With compile-only all compiling is the processes'."""
    started = []
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(warm, "_start", lambda command: started.append(command[1:]) or done)
    assert main(["fake", "--part", "1/2", "--case", "4x", "--warm", "3", "--limit", "5"]) == 0
    same = ["-m", "benchmarks", "fake", "--limit", "5.0", "--case", "4x", "--compile-only", "--part"]
    assert started == [[*same, part] for part in ("1/6", "3/6", "5/6")]
    started.clear()
    monkeypatch.setattr(warm, "compile_only", lambda *_, **__: pytest.fail("compiled in this process"))
    assert main(["--compile-only", "--warm", "2"]) == 0
    assert len(started) == 2


def results(*cases: Any, timer: FakeTimer | None = None, **options: Any) -> dict[str, runner.Result]:
    found = runner.run([("fakes", c) for c in cases], timer or FakeTimer(), **options)
    return {r.impl: r for r in found}


def test_a_failing_own_implementation_ends_the_case_but_not_the_run() -> None:
    broken = case(lambda: {"onepass": thunk(ValueError("ours")), "agrees": thunk(torch.ones(2))})
    found = list(runner.run([("fakes", broken), ("fakes", case(everything))], FakeTimer()))
    assert [(r.impl, r.status) for r in found[:2]] == [("onepass", FAILED), ("onepass", OK)]


def test_inputs_that_cannot_be_built_and_zeros_are_not_measured() -> None:
    for make, status, note in (
        (thunk(torch.OutOfMemoryError("too large")), FAILED, "too large"),
        (lambda: {"onepass": thunk(torch.zeros(3))}, DISAGREES, "zero"),
    ):
        found = results(case(make))["onepass"]
        assert found.status == status
        assert note in found.note


def test_a_definition_judges_ours_too() -> None:
    right = torch.ones(4)
    in_part = Prepared(lambda: thunk((right, "more")), lambda result: result[0])
    impls = {"onepass": thunk(right + 1e-5), "rival": thunk(right + 1), "nothing": thunk(()), "in part": in_part}
    found = results(case(lambda: {"definition": Definition(right.double), **impls}))
    assert {impl: r.status for impl, r in found.items()} == dict.fromkeys(impls, OK) | {"rival": DISAGREES}
    assert record(found["onepass"], 1.0)["error"] == pytest.approx(1e-5, rel=0.01)
    strict = results(case(lambda: {"definition": Definition(right.double), **impls}, check=1e-6))
    assert (strict["onepass"].status, strict["nothing"].error) == (DISAGREES, None)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
def test_only_rivals_are_given_up() -> None:
    def slow() -> torch.Tensor:
        time.sleep(0.03)
        return torch.ones(2)

    found = results(case(lambda: {"onepass": slow, "rival": slow}), limit_s=0.02)
    assert (found["onepass"].status, found["rival"].status) == (OK, FAILED)


class TestComparison:
    def test_one_wrong_entry_among_many_shows(self) -> None:
        ours = torch.randn(1000, 100)
        theirs = ours.clone()
        theirs[500, 50] += 1
        assert disagreement(ours, theirs, 2e-2)
        assert disagreement(ours, ours + 1e-3, 2e-2) is None

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_numbers_against_no_numbers(self, bad: float) -> None:
        assert disagreement(torch.ones(2), torch.tensor([1.0, bad]), 0.5)
        assert disagreement(torch.tensor([1.0, bad]), torch.ones(2), 0.5)
        assert disagreement(torch.tensor([1.0, bad]), torch.tensor([1.0, bad]), 0.5) is None
