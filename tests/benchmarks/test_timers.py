from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from benchmarks.bench import timers
from benchmarks.bench.timers import CpuTimer, CudaTimer
from benchmarks.case import graphed


class Clock:
    """In place of the time module, for the timer and what it calls: nothing else takes time."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns

    def perf_counter(self) -> float:
        return 1e-9 * self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(1e9 * seconds)


def test_cpu_times_are_medians_of_the_calls_alone_which_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "FLUSH_BYTES", 1 << 20)
    cpu_timer, clock = CpuTimer(measure_ms=1.0, copy_bytes=1 << 22), Clock()
    monkeypatch.setattr(timers, "time", clock)
    seconds = itertools.chain([0.002, 0.003, 0.5], itertools.repeat(0.004))
    assert cpu_timer.us(lambda: clock.sleep(next(seconds))) == pytest.approx(4000)
    order: list[str] = []

    def take(name: str, seconds: float) -> None:
        order.append(name)
        clock.sleep(seconds)

    calls = [lambda: take("fast", 0.001), lambda: take("slow", 0.004)]
    assert cpu_timer.us_each(calls) == pytest.approx([1000, 4000])
    assert order[:4] == ["fast", "slow", "fast", "slow"]
    assert cpu_timer.host_us_each(calls) == pytest.approx([1000, 4000])


@pytest.mark.gpu
def test_cuda_times() -> None:
    timer = CudaTimer(measure_ms=20.0)
    copy = timer.copy_gbps()
    assert 50 < copy < 20_000
    x = torch.randn(1 << 26, device="cuda")
    y = torch.empty_like(x)
    us = timer.us(lambda: y.copy_(x))
    # a copy of a quarter of a gigabyte runs at nearly the speed of a large one
    assert 0.5 * copy < 8 * x.numel() / us / 1e3 < 1.5 * copy
    assert 0.5 < timer.host_us(lambda: y.copy_(x)) < us


@pytest.mark.gpu
def test_cuda_caches_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = CudaTimer(measure_ms=20.0)
    x = torch.randn(1 << 22, device="cuda")
    cold = timer.us(x.sum)
    # in place of the flush: hides the host as long, and leaves the caches as they are
    monkeypatch.setattr(timer, "_flush", SimpleNamespace(zero_=lambda: torch.cuda._sleep(200_000)))
    assert cold > timer.us(x.sum)


def test_a_graph_keeps_what_its_call_alone_owns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed, its memory would be the next tensor's, and the graph would read that."""
    if device == "cpu":
        monkeypatch.setattr(torch, "cuda", MagicMock())  # its graphs replay nothing
    owned: list[weakref.ref[Tensor]] = []

    def prepare() -> Callable[[], Tensor]:
        x = torch.full((1 << 20,), 3.0, device=device)
        owned.append(weakref.ref(x))
        return lambda: x + 1

    replay = graphed(prepare).build()  # type: ignore[attr-defined]
    gc.collect()
    assert owned[0]() is not None
    assert torch.equal(replay(), torch.full_like(replay(), 4.0))
