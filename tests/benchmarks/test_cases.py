"""Every operator's declared cases are ones that the bench can run, tell apart and write down."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from bench_fakes import FakeTimer
from benchmarks import cases
from benchmarks.bench.runner import FAILED, MISSING, OK, OURS, STAGES, label, run_case
from benchmarks.bench.session import installed
from benchmarks.case import Case
from benchmarks.cases import all_cases

CASES = all_cases()


@pytest.mark.parametrize("folder", sorted({f for f, _ in CASES}))
def test_cases_are_well_formed(folder: str) -> None:
    for case in (c for f, c in CASES if f == folder):
        what = f"{case.op} {case.stage} {label(case.params)} {case.dtype}"
        assert case.stage in STAGES, what
        assert case.floor_bytes > 0, what
        assert case.device in ("cuda", "cpu"), what
        assert label(case.params), what
        assert json.loads(json.dumps(dict(case.params))) == dict(case.params), what


def test_no_case_is_declared_twice() -> None:
    seen = Counter((c.op, c.stage, label(c.params), c.dtype, c.device) for _, c in CASES)
    assert [what for what, n in seen.items() if n > 1] == []


def test_every_operator_with_cases_has_some_for_a_cpu() -> None:
    """`python -m benchmarks --device cpu`; modules have none."""
    assert {folder for folder, case in CASES if case.device == "cpu"} == {folder for folder, _ in CASES} - {"fused"}
    # small: some implementations keep several times the bytes that must move
    assert max(case.floor_bytes for _, case in CASES if case.device == "cpu") < 500e6


SMALLEST: dict[str, Case] = {}
for _, one in sorted(CASES, key=lambda pair: -pair[1].floor_bytes):
    if one.device == "cpu":
        SMALLEST[f"{one.op} {one.stage} {one.dtype}"] = one


@pytest.mark.parametrize("case", SMALLEST.values(), ids=list(SMALLEST))
def test_cases_for_a_cpu_run_there(case: Case) -> None:
    """The smallest of each operator, pass and dtype: nothing fails, and no rival that needs a GPU is asked for."""
    results = list(run_case("any", case, FakeTimer(), compile=False))
    assert (results[0].impl, results[0].status) == (OURS, OK)
    assert [(r.impl, r.note) for r in results if r.status == FAILED] == []
    assert not [r.impl for r in results if any(word in r.impl for word in ("liger", "quack", "triton", "graph"))]
    missing = {"lion-pytorch", "colt5-attention", "entmax", "torchsort"}
    assert {r.note for r in results if r.status == MISSING} <= missing


def test_rivals_are_declared_by_import_name() -> None:
    rivals = cases.rivals({folder for folder, _ in CASES})
    assert rivals["lion_pytorch"] == "lion-pytorch"
    assert set(installed(rivals)) <= set(rivals.values())
    assert "unknown version" not in installed(rivals).values()
