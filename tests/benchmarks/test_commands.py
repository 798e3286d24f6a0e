"""Scripts of benchmarks/ as commands, in short and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow
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


def run(*command: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@slow
def test_ab_tells_of_a_change(tmp_path: Path) -> None:
    """Versions in processes of their own, in turns, their results compared."""
    (tmp_path / "cases.py").write_text(CASES)
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "src").symlink_to(ROOT / "src")
    said = run("benchmarks/ab.py", ROOT, changed, "--cases", tmp_path / "cases.py", "--rounds", 1, code=1).stdout
    assert "elsewhere" not in said  # a CPU's timer would be wrong there
    same, other, broken = said.split(" forward float32 ")[1:]
    assert "same bits" in same
    assert "off by 2.5e-01" in other
    assert f"{changed}: ValueError: not here" in broken


@slow
def test_every_fault_of_the_soak_once(tmp_path: Path) -> None:
    """A resumed run equals the undisturbed one."""
    record = tmp_path / "soak.json"
    run("benchmarks/soak.py", "--resumes", 6, "--memory-steps", 0, "--json", record)
    found = json.loads(record.read_text())
    assert len(found["faults"]) == 6
    assert set(found["faults"].values()) == {1}
    assert found["equal_bit_for_bit"]["tensors"] > 0


@slow
def test_mistakes_of_ab_are_one_line() -> None:
    for args, told in (
        ([ROOT, "no-such-thing"], "neither a copy of the repository nor a git revision"),
        ([ROOT, ROOT, "--", "no_such_op"], "unknown operator"),
    ):
        said = run("benchmarks/ab.py", *args, code=1).stderr
        assert told in said
        assert "Traceback" not in said
