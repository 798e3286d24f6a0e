"""benchmarks/scaling.py on small sizes, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.scaling", "--device", "cpu", "--processes", "1", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, check=False, timeout=300, env=environment,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = json.loads(out.read_text())["records"]
    assert (one["processes"], two["processes"]) == (1, 2)
    # weak scaling: as many sequences per process; strong scaling of the others
    assert two["main_job"]["batch"] == 2 * one["main_job"]["batch"]
    assert two["main_job_sequence_parallel"]["tokens_per_s_and_process"] > 0
    assert two["lion"]["parameters"] == one["lion"]["parameters"]
    assert two["lion"]["shards"]["host_ms"] > 0
    assert set(two["layers"]) == {"block, 512", "causal block, 512", "feed-forward, 512"}
    for ways in two["layers"].values():
        assert {*ways} == {"part_alone", "whole_alone", "plain", "placed"}
        assert all(found["ms"] > 0 for found in ways.values())
    assert len(two["balance"]) == 4
    assert "block, 512, placed: " in done.stdout


def test_the_tables_of_the_docs() -> None:
    from benchmarks import spread_model

    text = (ROOT / "docs" / "lab" / "scale.md").read_text(encoding="utf-8")
    assert [row for row in spread_model.tables() if row not in text] == []
    for link in (spread_model.INSIDE, spread_model.BETWEEN):
        assert f"h = {spread_model.least_width(link):.0f}" in text


def test_a_trip_of_a_token_takes_its_heavy_time_at_the_least_width(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import spread_model

    link = spread_model.BETWEEN._replace(latency=0.0)
    monkeypatch.setattr(spread_model, "RATES", {64: link})
    monkeypatch.setattr(spread_model, "HIDDEN", spread_model.least_width(link))
    found = spread_model.balance(64, 3.0)
    assert found.tokens == 2 * spread_model.CHOSEN // 64
    assert found.cost == pytest.approx(found.saved, rel=1e-12)
