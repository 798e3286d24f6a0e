from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch

from bench_fakes import FakeTimer, case, everything, thunk
from benchmarks.bench import runner
from benchmarks.bench.compare import disagreement
from benchmarks.bench.records import record
from benchmarks.bench.runner import DISAGREES, FAILED, OK
from benchmarks.case import Definition, Prepared


def results(*cases: Any, timer: FakeTimer | None = None, **options: Any) -> dict[str, runner.Result]:
    found = runner.run([("fakes", c) for c in cases], timer or FakeTimer(), **options)
    return {r.impl: r for r in found}


def test_a_failing_own_implementation_ends_the_case_but_not_the_run() -> None:
    broken = case(lambda: {"onepass": thunk(ValueError("ours")), "agrees": thunk(torch.ones(2))})
    found = list(runner.run([("fakes", broken), ("fakes", case(everything))], FakeTimer()))
    assert [(r.impl, r.status) for r in found[:2]] == [("onepass", FAILED), ("onepass", OK)]


def test_inputs_that_cannot_be_built_and_zeros_are_not_measured() -> None:
    for make, status, note in (
        (thunk(torch.OutOfMemoryError("too large")), FAILED, "too large"),
        (lambda: {"onepass": thunk(torch.zeros(3))}, DISAGREES, "zero"),
    ):
        found = results(case(make))["onepass"]
        assert found.status == status
        assert note in found.note


def test_a_definition_judges_ours_too() -> None:
    right = torch.ones(4)
    in_part = Prepared(lambda: thunk((right, "more")), lambda result: result[0])
    impls = {"onepass": thunk(right + 1e-5), "rival": thunk(right + 1), "nothing": thunk(()), "in part": in_part}
    found = results(case(lambda: {"definition": Definition(right.double), **impls}))
    assert {impl: r.status for impl, r in found.items()} == {
        "onepass": OK,
        "rival": DISAGREES,
        "nothing": OK,
        "in part": OK,
    }
    assert record(found["onepass"], 1.0)["error"] == pytest.approx(1e-5, rel=0.01)
    strict = results(case(lambda: {"definition": Definition(right.double), **impls}, check=1e-6))
    assert (strict["onepass"].status, strict["nothing"].error) == (DISAGREES, None)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
def test_only_rivals_are_given_up() -> None:
    def slow() -> torch.Tensor:
        time.sleep(0.03)
        return torch.ones(2)

    found = results(case(lambda: {"onepass": slow, "rival": slow}), limit_s=0.02)
    assert (found["onepass"].status, found["rival"].status) == (OK, FAILED)


class TestComparison:
    def test_one_wrong_entry_among_many_shows(self) -> None:
        ours = torch.randn(1000, 100)
        theirs = ours.clone()
        theirs[500, 50] += 1
        assert disagreement(ours, theirs, 2e-2)
        assert disagreement(ours, ours + 1e-3, 2e-2) is None

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_numbers_against_no_numbers(self, bad: float) -> None:
        assert disagreement(torch.ones(2), torch.tensor([1.0, bad]), 0.5)
        assert disagreement(torch.tensor([1.0, bad]), torch.ones(2), 0.5)
        assert disagreement(torch.tensor([1.0, bad]), torch.tensor([1.0, bad]), 0.5) is None
