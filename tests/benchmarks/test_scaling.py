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
