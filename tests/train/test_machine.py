"""The number of threads follows the idle cores; a loaded machine is told in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onepass.train import machine

idle_cores = machine.idle_cores  # the tests of other files replace it


@pytest.mark.parametrize(
    ("idle", "wanted", "most", "count", "said"),
    [
        (4.0, None, 4, 4, None),
        (3.6, None, 4, 4, None),
        (2.3, None, 4, 2, "1.7 of 4 CPU cores busy: this run takes 2 threads; --threads N takes N"),
        (0.1, None, 4, 1, "3.9 of 4 CPU cores busy: this run takes 1 thread; --threads N takes N"),
        (0.1, 4, 4, 4, "3.9 of 4 CPU cores busy: 4 threads may be slow, and fewer --threads faster"),
        (0.1, 1, 4, 1, "3.9 of 4 CPU cores busy: 1 thread may be slow"),
        (2.0, 1, 4, 1, None),
        # more threads than cores is a choice, and no load
        (4.0, 8, 4, 8, None),
        # the system does not tell
        (None, None, 4, 4, None),
        (None, 2, 4, 2, None),
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch, idle: float | None, wanted: int | None, most: int, count: int, said: str | None
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "idle_cores", lambda: idle)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert machine.threads(wanted, most) == (count, said and f"other processes keep {said}")


def test_the_environment_is_a_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(machine, "idle_cores", lambda: 0.0)
    count, note = machine.threads(None, 3)
    assert count == 3
    assert note
    assert "3 threads may be slow" in note


def test_what_the_system_tells(monkeypatch: pytest.MonkeyPatch):
    idle = idle_cores()
    assert idle is None or 0.0 <= idle <= machine.cores() + 0.01
    ticks = iter([[(100, 100), (50, 100)], [(110, 110), (52, 110)]])
    monkeypatch.setattr(machine, "_ticks", lambda: next(ticks))
    assert idle_cores() == pytest.approx(1.2)


def test_without_counters_the_load_average_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_ticks", list)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert idle_cores() == 2.5

    def refuse() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert idle_cores() is None


def test_strange_counters_count_as_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", lambda self: "cpu 1 2 3\ncpu0 nonsense\n")
    assert machine._ticks() == []
