"""File names, options and texts that hold orders to a terminal: they are shown as escapes, on one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from onepass.train.progress import say
from train.tiny import refused

ORDERS = "a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"
SHOWN = r"a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_errors():
    assert SHOWN in refused("train", ORDERS)
    Path(ORDERS).write_bytes(b"\0binary")
    assert f"{SHOWN} is no text" in refused("train", ORDERS)
    assert SHOWN in refused("train", "--out", ORDERS, "--resume")
    assert SHOWN in refused("train", "--out", ORDERS)
    assert SHOWN in refused("show", ORDERS, ORDERS)
    Path("folder").mkdir()
    Path("folder", ORDERS).touch()
    assert "holds other things than a run" in refused("train", __file__, "--out", "folder")


def test_lines(capsys: pytest.CaptureFixture[str]):
    say(ORDERS)
    assert capsys.readouterr().out == f"{SHOWN}\n"


def test_a_terminal_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("16 × 256 bytes of caf\udce9")
    assert raw.getvalue() == b"16 \\xd7 256 bytes of caf\\udce9\n"
