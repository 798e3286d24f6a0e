"""benchmarks/soak.py in short: one fault of each kind, and a resumed run that equals the undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_fault_once(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--resumes", "6", "--memory-steps", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(record)], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert len(found["faults"]) == 6
    assert set(found["faults"].values()) == {1}
    assert found["equal_bit_for_bit"]["tensors"] > 0
