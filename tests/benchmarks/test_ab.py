"""benchmarks/ab.py: versions in processes of their own, in turns, their results compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = """
import onepass, torch
from benchmarks.case import Case

def cases():
    changed = "changed" in onepass.__path__[0]
    x = torch.linspace(1.0, 2.0, 1000)
    def make(name):
        if changed and name == "broken":
            raise ValueError("not here")
        return {"onepass": lambda: x + 0.5 * (changed and name == "other"), "rival": lambda: 1 / 0}
    for name in ("same", "other", "broken"):
        yield Case(name, "forward", {"cols": 1000}, torch.float32, 8000, lambda name=name: make(name), device="cpu")
    yield Case("elsewhere", "forward", {"cols": 1000}, torch.float32, 8000, lambda: make("same"), device="cuda")
"""


def _ab(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "ab.py"), *args]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


@pytest.mark.slow
def test_a_change_is_told(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "src").symlink_to(ROOT / "src")
    done = _ab(str(ROOT), str(changed), "--cases", str(tmp_path / "cases.py"), "--rounds", "1")
    assert done.returncode == 1, done.stderr
    assert "elsewhere" not in done.stdout  # a CPU's timer would be wrong there
    same, other, broken = done.stdout.split(" forward float32 ")[1:]
    assert "same bits" in same
    assert "off by 2.5e-01" in other
    assert f"{changed}: ValueError: not here" in broken


@pytest.mark.slow
def test_mistakes_are_one_line() -> None:
    for args, told in (
        ([str(ROOT), "no-such-thing"], "neither a copy of the repository nor a git revision"),
        ([str(ROOT), str(ROOT), "--", "no_such_op"], "unknown operator"),
    ):
        done = _ab(*args)
        assert done.returncode == 1
        assert told in done.stderr
        assert "Traceback" not in done.stderr
