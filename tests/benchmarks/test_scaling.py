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
    # 512 tokens: three rows of fp32 scores, and an eighth of them as two heads of 8 keys and 8 values
    assert two["routing"]["bytes"]["scores"] == 3 * 4 * 512
    assert two["routing"]["bytes"]["keys_and_values"] == 64 * 2 * 16 * 4
    assert two["routing"]["predicted_ms"] > one["routing"]["ms"] / 2
    # a sixteenth of the tokens, all on the first process: half of them move
    assert two["balance"]["first"]["most_tokens"] == 32
    assert two["balance"]["first, balanced"]["most_tokens"] == two["balance"]["tokens_moved"] == 16
    assert two["balance"]["anywhere, balanced"]["most_tokens"] == 16 < two["balance"]["anywhere"]["most_tokens"] < 32
    assert two["balance"]["predicted_ms"] > two["balance"]["anywhere"]["ms"]


def test_the_prediction() -> None:
    from benchmarks import scaling

    one = {"ms": 10.0}
    two = {"bytes": {"keys_and_values": 100, "windows": 10, "scores": 30, "weights": 50}, "all_reduce_ms": 2.0}
    # half of the time, and 300 bytes at 50 bytes a millisecond
    assert scaling.predicted(one, two, 2) == 5.0 + 300 / 50


def test_the_tables_of_the_docs() -> None:
    from benchmarks import spread_model

    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
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
