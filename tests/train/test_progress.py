"""What a run shows while it goes, and how many threads it takes on a machine with other work."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from onepass.train import machine
from onepass.train.progress import LINES, Display, clock, say
from train.tiny import Terminal

IDLE = machine.idle_cores  # other tests replace it


def play(total: int) -> None:
    display = Display(total, 0)
    for step in range(10, total + 1, 10):
        display.update(step, 2.0, 2.885, 12345.0)
    display.note("validation after 5 steps: 2.9 bits per byte")
    display.close()


def test_plain_lines_into_a_pipe(capsys: pytest.CaptureFixture[str]):
    play(1000)
    lines = capsys.readouterr().out.splitlines()
    assert LINES <= len(lines) <= LINES + 3
    assert lines[0].startswith("step   10/1000  loss 2.000  2.88 bits/byte  12,345 tokens/s  ")
    assert lines[-2].startswith("step 1000/1000")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, kind: str):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setenv("COLUMNS", "120")
    play(50)
    shown = terminal.getvalue()
    assert ("\x1b[" in shown) == (kind == "xterm")
    for part in ("50/50", "loss 2.000", "2.88 bits/byte", "12,345 tokens/s", "left", "validation after 5 steps"):
        assert part in shown


def test_a_terminal_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("16 × 256 bytes of caf\udce9")
    assert raw.getvalue() == b"16 \\xd7 256 bytes of caf\\udce9\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3599.9, "1:00:00"), (-1, "0:00")])
def test_clock(seconds: float, text: str):
    assert clock(seconds) == text


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
    idle = IDLE()
    assert idle is None or 0.0 <= idle <= machine.cores() + 0.01
    ticks = iter([[(100, 100), (50, 100)], [(110, 110), (52, 110)]])
    monkeypatch.setattr(machine, "_ticks", lambda: next(ticks))
    assert IDLE() == pytest.approx(1.2)


def test_without_counters_the_load_average_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_ticks", list)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert IDLE() == 2.5
    monkeypatch.setattr(os, "getloadavg", mock.Mock(side_effect=OSError))
    assert IDLE() is None
    # strange counters count as none
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_text", lambda self: "cpu 1 2 3\ncpu0 nonsense\n")
    assert machine._ticks() == []
