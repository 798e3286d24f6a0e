from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bars import BARS, Bar, asked, judge, number, rows
from benchmarks.bench.runner import STAGES, label
from benchmarks.cases import all_cases


def record(impl: str, us: float, cols: int = 128, **more: Any) -> dict[str, Any]:
    return {
        "op": "layer_norm", "pass": "forward", "case": {"rows": 8, "cols": cols}, "dtype": "float32", "impl": impl,
        "us": us, "gbps": 1.0, "copy_pct": 1000 / us, "host_us": 20.0,
    } | more  # fmt: skip


def words(bar: str, wanted: str, records: list[dict[str, Any]]) -> str:
    """What is found of the first bar of a measured operator whose name holds these words."""
    found = rows(records)
    ops = {row.op for row in found}
    one = next(b for b in BARS if b.op in ops and bar in f"{b.op} {b.stage}, {b.words}")
    assert asked(one) == wanted
    verdict = judge(one, found)
    if verdict is None:
        return "not measured"
    worst, row, met, cells = verdict
    return f"{number(worst)}, {label(row.case)} {row.dtype}, {met} of {cells}"


def test_the_worst_cell_speaks() -> None:
    found = [record("onepass", 10.0), record("onepass", 12.5, 768), record("onepass", 1.0, 4096)]
    assert words("forward, 128 to 1024", "≥ 85 % of copy", found) == "80, 8x768 float32, 1 of 2"


def test_a_rival_is_compared_in_its_own_case() -> None:
    found = [
        record("onepass", 10.0), record("liger", 15.0), record("onepass, CUDA graph", 1.0),
        record("onepass", 30.0, 768), record("quack", 27.0, 768), record("onepass", 1.0, 4096),
    ]  # fmt: skip
    assert words("layer_norm forward, fastest rival", "≥ 1×", found) == "0.9, 8x768 float32, 1 of 2"


def test_host_time_of_both_passes_is_their_sum() -> None:
    found = [record("onepass", 10.0, host_us=30.0), {**record("onepass", 10.0, host_us=51.0), "pass": "backward"}]
    assert words("layer_norm backward, host time, forward + backward", "≤ 80 µs", found) == "81, 8x128 float32, 0 of 1"
    assert words("host time, forward + backward", "≤ 80 µs", [found[1]]) == "not measured"


def test_several_vectors_are_compared_with_one() -> None:
    def sums(us: float, **case: Any) -> dict[str, Any]:
        return record("onepass", us, op="weighted_sum", case={"rows": 8, "cols": 512, **case})

    found = [sums(10.0), sums(12.0, vectors=4), sums(90.0, vectors=16)]
    assert words("4 vectors, one", "≤ 1.15×", found) == "1.2, 8x512 vectors=4 float32, 0 of 1"
    assert words("4 vectors, one", "≤ 1.15×", found[1:]) == "not measured"


def test_not_measured_is_said() -> None:
    found = [record("onepass", 10.0)]
    assert words("layer_norm backward, fastest rival", "≥ 1×", found) == "not measured"
    assert words("layer_norm forward, above 32768", "≥ 75 % of copy", found) == "not measured"


DECLARED = rows(
    {
        "op": c.op, "pass": c.stage, "case": c.params, "dtype": str(c.dtype).removeprefix("torch."), "impl": "onepass",
        "us": 1.0, "copy_pct": 1.0, "host_us": 1.0,
    } for _, c in all_cases() if c.device == "cuda"
)  # fmt: skip


@pytest.mark.parametrize("bar", BARS, ids=lambda b: f"{b.op} {b.stage} {b.words}")
def test_every_bar_has_a_declared_case(bar: Bar) -> None:
    assert bar.stage in STAGES
    assert [row for row in DECLARED if (row.op, row.stage) == (bar.op, bar.stage) and bar.where(row)]


def module(impl: str, us: float, peak: float, **case: Any) -> dict[str, Any]:
    found = record(impl, us, op="routed_block", dtype="bfloat16", peak_mib=peak, kept_mib=0.0)
    return {**found, "pass": "forward+backward", "case": {"batch": 2, "n": 32768, "dim": 1024, "causal": False} | case}


def test_memory_is_compared_with_the_smallest_rival() -> None:
    found = [module("onepass", 1.0, 30.0), module("dense", 6.0, 60.0), module("dense flash", 7.0, 40.0)]
    assert words("memory of dense", "≤ 0.6×", found) == "0.75, batch=2 n=32768 dim=1024 causal=False bfloat16, 0 of 1"
    assert words("routed_block forward+backward, d=1024, 2×32768, dense flash", "≥ 5×", found).startswith("6, ")
