"""Measuring on the CPU from a script: the bench's own records, which the report renders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.fakes import case
from onepass.bench import timers
from onepass.bench.cpu import measure
from onepass.bench.records import read
from onepass.bench.report import build


def test_a_script_gets_the_records_of_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "FLUSH_BYTES", 1 << 20)
    x = torch.randn(64, 128)
    sums = case(lambda: {"onepass": lambda: x.sum(-1), "einsum": lambda: torch.einsum("nd->n", x)})
    path = tmp_path / "norm.json"
    assert measure("norm", [sums], path, measure_ms=2.0) == 0
    header, records = read(path)
    assert header["complete"] is True
    assert header["gpu"]
    assert {r["impl"] for r in records} == {"onepass", "einsum"}
    assert all(r["us"] > 0 and r["host_us"] > 0 and r["peak_mib"] is None for r in records)
    assert path.with_suffix(".md") in build(tmp_path)
    text = path.with_suffix(".md").read_text()
    assert "with warm caches" in text
    assert "## Bars" not in text


def test_own_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "FLUSH_BYTES", 1 << 20)

    def fails() -> torch.Tensor:
        raise ValueError("no")

    assert measure("norm", [case(lambda: {"onepass": fails})], tmp_path / "x.json", measure_ms=1.0) == 1
