"""An operator that exists only here, with rivals of every kind, and a timer that knows what to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import cases
from benchmarks.case import Case, Impl, Prepared, rival


class FakeTimer:
    """Says what the thunk carries: `us` and `host_us` attributes."""

    def __init__(self, copy: float = 1000.0) -> None:
        self.copy = copy
        self.lost = False

    def us(self, call: Callable[[], Any]) -> float:
        call()
        return float(getattr(call, "us", 10.0))

    def host_us(self, call: Callable[[], Any]) -> float:
        return float(getattr(call, "host_us", 3.0))

    def copy_gbps(self) -> float:
        return self.copy

    def held_bytes(self) -> int:
        return 1 << 20

    def peak_bytes(self, call: Callable[[], Any]) -> tuple[int, Any]:
        return 3 << 20, call()

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def thunk(result: Any, us: float = 10.0) -> Callable[[], Any]:
    def call() -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    call.us = us  # type: ignore[attr-defined]
    return call


def case(impls: Callable[[], Mapping[str, Impl]], **changes: Any) -> Case:
    given: dict[str, Any] = {
        "op": "fake", "stage": "forward", "params": {"rows": 4, "cols": 8}, "dtype": torch.float32,
        "floor_bytes": 100_000, "make": impls, "check": 1e-3, "device": "cpu",
    }  # fmt: skip
    return Case(**given | changes)


def everything() -> dict[str, Impl]:
    """Ours, a rival that agrees, and every way in which a rival may not."""
    right = torch.randn(4, 8)

    def not_importable() -> Callable[[], Any]:
        raise ModuleNotFoundError("No module named 'far_away'", name="far_away")

    return {
        "agrees": thunk(right + 1e-5, us=20.0), "onepass": thunk(right, us=10.0), "wrong": thunk(right + 1, us=1.0),
        "raises": thunk(RuntimeError("kaput\nsecond line")), "absent": rival("absent_package.inner", thunk),
        "late": Prepared(not_importable), "torch.compile of it": thunk(right, us=15.0),
    }  # fmt: skip


@pytest.fixture
def fake_operator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make the fake operator the only one; tests may change its CASES and RIVALS."""
    module = SimpleNamespace(
        CASES=[case(everything), case(everything, stage="backward", params={"rows": 16, "cols": 8})],
        RIVALS={"torch": "torch", "surely_not_installed": "surely-not-installed"},
    )
    monkeypatch.setattr(cases, "files", lambda: ["fakes"])
    monkeypatch.setattr(cases, "load", lambda folder: module)
    return module
