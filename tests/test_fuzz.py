"""The attacks themselves: every property runs; a planted fault is found, written down, and found again by replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fuzz.__main__ import replay  # noqa: E402
from fuzz.engine import Property, Tally, attempt, explore, write_finding  # noqa: E402
from fuzz.work import here, properties  # noqa: E402

CHEAP = [p for p in properties() if "cpu" in p.devices and p.name != "torch.compile"]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _explore(prop: Property, seed: int, seconds: float = 60.0) -> Tally:
    tally = Tally()
    explore(prop, "cpu", seed, tally, time.monotonic() + seconds)
    return tally


@pytest.mark.parametrize("prop", [pytest.param(p, id=p.name) for p in CHEAP])
def test_each_property_runs(prop: Property) -> None:
    if why := prop.lacks():
        pytest.skip(why)
    few = Property(**{**vars(prop), "burst": 3})
    tally = _explore(few, seed=3)
    assert tally.tried[prop.name] > tally.skipped[prop.name]
    # to find faults is what `make fuzz` is for; here, what is found must be found again
    for signature, finding in tally.findings.items():
        again = attempt(prop, finding["case"], "cpu")
        assert again is not None
        assert again["signature"] == signature


def _wrong_sum(op: Callable[..., Any]) -> Callable[..., Any]:
    """Off by one part in a thousand where a row is wider than seven."""
    return lambda x, w, **options: op(x, w, **options) * (1.001 if x.shape[-1] > 7 else 1.0)


def test_a_planted_fault_is_found_and_replayed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = onepass.weighted_sum
    prop = next(p for p in properties() if p.name == "weighted sum")
    monkeypatch.setattr(onepass, "weighted_sum", _wrong_sum(right))
    tally = _explore(prop, seed=4)
    assert tally.findings
    finding = next(f for f in tally.findings.values() if f["signature"].startswith("weighted sum: weighted_sum y"))
    # the smallest case that shows it
    assert finding["case"]["x"]["shape"][-1] == 8
    path = write_finding(finding, tmp_path / "found")
    assert json.loads(path.read_text())["case"] == finding["case"]
    assert replay(path) == 1
    monkeypatch.setattr(onepass, "weighted_sum", right)
    assert replay(path) == 0
    assert "the promise holds" in capsys.readouterr().out


def test_a_fault_that_raises_and_one_that_hangs_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    prop = next(p for p in properties() if p.name == "weighted sum")
    case = {
        "op": "weighted_sum", "out": None, "up": "normal", "seed": 1,
        "x": {"shape": [2, 3], "dtype": "float32", "fill": "normal", "layout": "contiguous", "seed": 1},
        "weight": {"shape": [3], "dtype": "float32", "fill": "normal", "layout": "contiguous", "seed": 2},
    }  # fmt: skip
    assert attempt(prop, case, "cpu") is None
    monkeypatch.setattr("fuzz.engine.CASE_SECONDS", 1)
    monkeypatch.setattr(onepass, "weighted_sum", lambda *_, **__: 1 / 0)
    raised = attempt(prop, case, "cpu")
    assert raised is not None
    assert "ZeroDivisionError" in raised["signature"]
    monkeypatch.setattr(onepass, "weighted_sum", lambda *_, **__: time.sleep(30))
    hung = attempt(prop, case, "cpu")
    assert hung is not None
    assert "SlowCaseError" in hung["signature"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen, left_out = here("cpu", None)
    assert left_out["Lion and lion-pytorch"] == "lion-pytorch is not installed"
    assert "Lion and lion-pytorch" not in [p.name for p in chosen]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fuzz", "--minutes", "0.01", "--jobs", "2", "--only", "rotary", "--seed", "3"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    options = ["--out", str(tmp_path / "fuzz.json"), "--findings", str(tmp_path / "found")]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "fuzz.json").read_text())
    assert report["cases"] == report["counts"]["rotary"]["cases"] > 0
    assert report["findings"] == []
    assert report["jobs"] == 2
