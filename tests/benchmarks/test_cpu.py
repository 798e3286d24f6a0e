"""`python -m benchmarks --device cpu` with its own timer: what it shows, and what it keeps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench_fakes import case, fake_operator
from benchmarks.__main__ import main
from benchmarks.bench import select, timers
from benchmarks.bench.records import read
from benchmarks.bench.runner import run_case
from benchmarks.bench.timers import CpuTimer

__all__ = ["fake_operator"]  # pytest finds the fixture under its name


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> CpuTimer:
    monkeypatch.setattr(timers, "FLUSH_BYTES", 1 << 20)
    return CpuTimer(measure_ms=2.0, copy_bytes=1 << 20)


def test_the_command(
    fake_operator: SimpleNamespace, timer: CpuTimer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(select, "timer", lambda device, quick: timer)
    x = torch.randn(64, 128)
    impls = {"onepass": lambda: x.sum(-1), "einsum": lambda: torch.einsum("nd->n", x)}
    fake_operator.CASES = [case(lambda: impls), case(lambda: impls, device="cuda")]
    path = tmp_path / "sums.json"
    assert main(["--device", "cpu", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "warm µs" in said
    assert "host µs" not in said
    header, records = read(path)
    assert (header["device"], header["complete"], bool(header["gpu"])) == ("cpu", True, True)
    assert [r["impl"] for r in records] == ["onepass", "einsum"]
    assert all(r["us"] > 0 and r["host_us"] > 0 and r["peak_mib"] is None for r in records)


def test_seconds_are_spent_once(timer: CpuTimer) -> None:
    """Implementations take turns: what one of them took is no part of what another one took."""
    x = torch.randn(256, 256)
    began = time.perf_counter()
    results = list(run_case("any", case(lambda: {name: lambda: x @ x for name in ("onepass", "a", "b")}), timer))
    assert 0 < sum(r.seconds for r in results) <= time.perf_counter() - began
