"""Every operator's declared cases are ones that the bench can run, tell apart and write down."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from onepass.bench.cases import all_cases
from onepass.bench.rivals import availability, known
from onepass.bench.runner import STAGES, label
from onepass.core import spec

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


def test_rivals_are_declared_by_import_name() -> None:
    rivals = known(spec.folders())
    installed, missing = availability(rivals)
    assert len(installed) + len(missing) == len(rivals)
    assert "unknown version" not in installed.values()


def test_a_spec_speaks_for_its_own_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lion_pytorch" in known(["lion"])
    monkeypatch.setattr(spec, "load", lambda folder: SimpleNamespace(RIVALS={"b": "b-kernels", "a": "a"}))
    assert known(["lion"]) == {"a": "a", "b": "b-kernels"}
