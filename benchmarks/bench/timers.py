"""Timers: the time of a call on the device with cold caches, and its host time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from onepass.core.garbage import no_collection

Thunk = Callable[[], Any]

# written before every repetition, as in triton.testing.do_bench; larger than any L2
FLUSH_BYTES = 256 << 20
COPY_BYTES = 2 << 30


class Timer(Protocol):
    """The interface that the runner needs of a device."""

    def us(self, call: Thunk) -> float:
        """Return the median time of one call with cold caches, in microseconds."""

    def host_us(self, call: Thunk) -> float:
        """Return the median host time of one call, in microseconds."""

    def copy_gbps(self) -> float:
        """Return the bandwidth of a large copy, bytes read plus bytes written."""

    def synchronize(self) -> None:
        """Wait for the device; raise if an earlier call broke it."""

    def held_bytes(self) -> int | None:
        """Return the memory that tensors take now; None if it is not counted."""

    def peak_bytes(self, call: Thunk) -> tuple[int | None, Any]:
        """Return the most memory that tensors took during a call, and the call's result."""


def _repetitions(cost_ms: float, budget_ms: float, least: int, most: int) -> int:
    return max(least, min(most, int(budget_ms / max(cost_ms, 1e-3))))


class CudaTimer:
    """Time with CUDA events around each call on the current device and stream; overwrite the L2 in between."""

    def __init__(self, measure_ms: float = 60.0, warmup_ms: float = 10.0) -> None:
        self.measure_ms = measure_ms
        self.warmup_ms = warmup_ms
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        # allocate the workspaces of the first matrix products of both threads now (65 MiB on an H200), so that they
        # don't count as memory of the first implementation
        x = torch.ones(16, 16, device="cuda", requires_grad=True)
        torch.mm(x, x).sum().backward()  # type: ignore[no-untyped-call]

    def _device_times(self, call: Thunk, repetitions: int) -> list[float]:
        event: Any = torch.cuda.Event
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repetitions)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def us(self, call: Thunk) -> float:
        began = time.perf_counter()
        first = self._device_times(call, 2)
        cost_ms = 500 * (time.perf_counter() - began)
        if cost_ms > self.measure_ms:
            # a slow rival: three calls are enough
            return statistics.median(first + self._device_times(call, 1))
        self._device_times(call, _repetitions(cost_ms, self.warmup_ms, 1, 25))
        return statistics.median(self._device_times(call, _repetitions(cost_ms, self.measure_ms, 5, 200)))

    def host_us(self, call: Thunk) -> float:
        times: list[float] = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        cost_ms = 1e3 * (time.perf_counter() - began)
        # ten short calls between two waits, as in a training step; the launch queue holds about a thousand kernels
        batch = 10 if cost_ms < 1.0 else 1
        deadline = began + 0.5e-3 * self.measure_ms
        with no_collection():
            while len(times) < 3 or (len(times) < 300 and time.perf_counter() < deadline):
                for _ in range(batch):
                    start = time.perf_counter_ns()
                    call()
                    times.append(1e-3 * (time.perf_counter_ns() - start))
                torch.cuda.synchronize()
        return statistics.median(times)

    def copy_gbps(self) -> float:
        free, _ = torch.cuda.mem_get_info()
        words = min(COPY_BYTES, free // 4) // 4
        # random bits: a copy of zeros may be faster than a copy of data
        source = torch.empty(words, dtype=torch.int32, device="cuda").random_()
        target = torch.empty_like(source)
        for _ in range(100):
            # warm up: an idle GPU needs time to raise its clocks
            target.copy_(source)
        us = self.us(lambda: target.copy_(source))
        return 2 * 4 * words / us / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self, call: Thunk) -> tuple[int, Any]:
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), result


class CpuTimer:
    """Wall time, with a buffer larger than most last-level caches written in between.

    The speed of a shared CPU drifts, so compared implementations take turns: `us_each`, `host_us_each`.
    """

    def __init__(self, measure_ms: float = 60.0, copy_bytes: int = FLUSH_BYTES) -> None:
        self.measure_ms = measure_ms
        self.copy_bytes = copy_bytes
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32)

    def _rounds(self, calls: Sequence[Thunk], budget_ms: float, flush: bool) -> list[float]:
        times: list[list[float]] = [[] for _ in calls]
        deadline = time.perf_counter() + 1e-3 * budget_ms * len(calls)
        with no_collection():
            while len(times[0]) < 5 or (len(times[0]) < 300 and time.perf_counter() < deadline):
                for call, samples in zip(calls, times, strict=True):
                    if flush:
                        self._flush.zero_()
                    else:
                        call()  # warm the caches after the other calls
                    start = time.perf_counter_ns()
                    call()
                    samples.append(1e-3 * (time.perf_counter_ns() - start))
        return [statistics.median(t) for t in times]

    def us_each(self, calls: Sequence[Thunk]) -> list[float]:
        """Return the median time of one call of each with cold caches, in microseconds."""
        # the flush takes longer than most calls, hence the larger budget
        return self._rounds(calls, 10 * self.measure_ms, flush=True)

    def host_us_each(self, calls: Sequence[Thunk]) -> list[float]:
        """Return the median time of one call of each with warm caches, in microseconds."""
        return self._rounds(calls, self.measure_ms, flush=False)

    def us(self, call: Thunk) -> float:
        return self.us_each([call])[0]

    def host_us(self, call: Thunk) -> float:
        return self.host_us_each([call])[0]

    def copy_gbps(self) -> float:
        source = torch.empty(self.copy_bytes // 4, dtype=torch.int32).random_()
        target = torch.empty_like(source)
        return 2 * self.copy_bytes / self.us(lambda: target.copy_(source)) / 1e3

    def synchronize(self) -> None:
        """Do nothing: calls on the CPU have ended when they return."""

    def held_bytes(self) -> None:
        """Return None: the CPU's memory is not counted."""

    def peak_bytes(self, call: Thunk) -> tuple[None, Any]:
        return None, call()
