"""`python -m benchmarks`: tables, records, parts, mistakes; the operator that it measures exists only here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_fakes import FakeTimer, case, fake_operator
from benchmarks import warm
from benchmarks.__main__ import main
from benchmarks.bench import timers
from benchmarks.bench.records import FIELDS, MEMORY, read

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
    assert header["missing"] == ["absent-package", "far_away"]
    assert [(p["impl"], p["pass"]) for p in header["failed"]] == [("raises", "forward"), ("raises", "backward")]
    assert {p["impl"] for p in header["disagreeing"]} == {"wrong"}
    assert all(tuple(r) == FIELDS + MEMORY for r in records)
    assert {r["impl"] for r in records} == {"onepass", "agrees", "torch.compile of it"}
    assert records[0] == {
        "op": "fake", "pass": "forward", "case": {"rows": 4, "cols": 8}, "dtype": "float32", "impl": "onepass",
        "us": 10.0, "gbps": 10.0, "copy_pct": 1.0, "host_us": 3.0, "peak_mib": 2.0, "kept_mib": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "unknown operator 'nothing': accepted are fake, fakes"),
        (["--dtype", "int8"], "--dtype 'int8': accepted are fp32"),
        (["--device", "tpu"], "--device 'tpu': accepted are cuda, cpu"),
        (["--device", "cuda"], "no case matches"),
        (["--json", "/dev/null/x.json"], "can't write /dev/null/x.json"),
        (["--part", "3/2"], "--part '3/2': I/N with 1 ≤ I ≤ N"),
        (["--part", "3/3"], "--part 3/3: there are fewer cases than parts"),
        (["--report", "nowhere"], "nowhere: no such directory"),
        (["--warm", "-3"], "argument --warm: must be from 0"),
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


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("launch failed"), 1)])
def test_an_interruption_and_a_lost_device_keep_what_was_measured(
    fake_operator: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
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
