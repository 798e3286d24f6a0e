"""What a run shows while it goes."""

from __future__ import annotations

import io
import sys

import pytest

from onepass.train.progress import LINES, Display, clock, say
from train.tiny import Terminal


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
