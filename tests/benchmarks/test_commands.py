"""Declared cases, scripts of benchmarks/ as commands, committed tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench_fakes import FakeTimer
from benchmarks import decoding
from benchmarks.bench.records import read
from benchmarks.bench.runner import FAILED, MISSING, OK, OURS, STAGES, label, run_case
from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.report import page

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


DECLARED = all_cases()


@pytest.mark.parametrize("folder", sorted({f for f, _ in DECLARED}))
def test_cases_are_well_formed(folder: str) -> None:
    for case in (c for f, c in DECLARED if f == folder):
        what = f"{case.op} {case.stage} {label(case.params)} {case.dtype}"
        assert case.stage in STAGES, what
        assert case.floor_bytes > 0, what
        assert case.device in ("cuda", "cpu"), what
        assert label(case.params), what
        assert json.loads(json.dumps(dict(case.params))) == dict(case.params), what


def test_no_case_is_declared_twice() -> None:
    seen = Counter((c.op, c.stage, label(c.params), c.dtype, c.device) for _, c in DECLARED)
    assert [what for what, n in seen.items() if n > 1] == []


def test_every_operator_with_cases_has_some_for_a_cpu() -> None:
    """`python -m benchmarks --device cpu`; modules have none."""
    assert {folder for folder, case in DECLARED if case.device == "cpu"} == {folder for folder, _ in DECLARED} - {
        "fused"
    }
    # small: some implementations keep several times the bytes that must move
    assert max(case.floor_bytes for _, case in DECLARED if case.device == "cpu") < 500e6


SMALLEST: dict[str, Case] = {}
for _, one in sorted(DECLARED, key=lambda pair: -pair[1].floor_bytes):
    if one.device == "cpu":
        SMALLEST[f"{one.op} {one.stage} {one.dtype}"] = one


@pytest.mark.parametrize("case", SMALLEST.values(), ids=list(SMALLEST))
def test_cases_for_a_cpu_run_there(case: Case) -> None:
    """The smallest of each operator, pass and dtype: nothing fails, and no rival that needs a GPU is asked for."""
    results = list(run_case("any", case, FakeTimer(), compile=False))
    assert (results[0].impl, results[0].status) == (OURS, OK)
    assert [(r.impl, r.note) for r in results if r.status == FAILED] == []
    assert not [r.impl for r in results if any(word in r.impl for word in ("liger", "quack", "triton", "graph"))]
    missing = {"lion_pytorch", "colt5_attention", "entmax", "torchsort"}
    assert {r.note for r in results if r.status == MISSING} <= missing


def test_prompts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--prefill --device cpu --tokens 40 --batch 2 --dim 64 --blocks 1"
    assert decoding.main(small.split()) == 0
    assert re.search(r"'prefill ms': [\d.]+.*'new prefill ms': [\d.]+", capsys.readouterr().out)


COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json"))


@pytest.mark.parametrize("source", COMMITTED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_committed_tables_are_those_of_the_committed_records(source: Path) -> None:
    """Only `*.json` with records of the bench stands beside tables: `--report` reads all of them."""
    header, records = read(source)
    text = source.with_suffix(".md")
    assert not text.exists() or page(header, records) == text.read_text()
