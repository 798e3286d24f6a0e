"""benchmarks/host.py without a GPU: every operator has its line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host.py"


@pytest.mark.slow
def test_every_call_is_timed() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), "--calls", "20"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = re.findall(r"^(\w+) +no gradients +([\d.]+).* forward .* backward .*", done.stdout, re.MULTILINE)
    shapes = done.stdout.count("-- ")
    assert [name for name, _ in lines] == shapes * ["layer_norm", "rms_norm", "weighted_sum", "nothing"]
