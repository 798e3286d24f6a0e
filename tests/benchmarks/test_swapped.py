"""benchmarks/swapped.py: its checks and measurements on small models, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "swapped.json"
    script = str(ROOT / "benchmarks" / "swapped.py")
    command = [sys.executable, script, "--device", "cpu", "--calls", "1", "--mode", "eager", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert "LayerNorm -> onepass.nn.LayerNorm" in done.stdout
    header, *records = json.loads(out.read_text())
    assert header["header"]
    checks = [r for r in records if r.get("check")]
    assert len(checks) == 6
    assert len(records) == 12
    for r in checks:
        assert r["finite"]
        # the bits of the losses; gradients as far from fp32 as those of the model as it is, within a half
        assert r["loss"] == r["loss_as_it_is"]
        base = next(c for c in checks if c["model"] == r["model"] and c["way"] == "as it is")
        assert r["gradients_from_fp32"] <= 1.5 * base["gradients_from_fp32"]
    assert all(r["wall_us"] > 0 for r in records if "wall_us" in r)
