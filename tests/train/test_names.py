"""File names, options and texts that hold orders to a terminal: they are shown as escapes, on one line."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.__main__ import main
from onepass.train.html import _safe
from onepass.train.pictures import _printable
from onepass.train.progress import Display, say

ORDERS = "a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"
SHOWN = r"a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plain(text: str, lines: int) -> str:
    assert text.count("\n") == lines
    assert all(line.isprintable() for line in text.splitlines())
    return text


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that has to end with code 2 and one harmless line; return the line."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    return plain(capsys.readouterr().err, 1)


def test_errors(capsys: pytest.CaptureFixture[str]):
    assert SHOWN in said(capsys, "train", ORDERS)
    Path(ORDERS).write_bytes(b"\0binary")
    assert f"{SHOWN} is no text" in said(capsys, "train", ORDERS)
    assert SHOWN in said(capsys, "train", "--out", ORDERS, "--resume")
    assert SHOWN in said(capsys, "train", "--out", ORDERS)
    assert SHOWN in said(capsys, "show", ORDERS, ORDERS)
    Path("folder").mkdir()
    Path("folder", ORDERS).touch()
    assert "holds other things than a run" in said(capsys, "train", __file__, "--out", "folder")


def test_what_argparse_says(capsys: pytest.CaptureFixture[str]):
    assert SHOWN in said(capsys, "train", f"--{ORDERS}")
    assert r"\x1b" in said(capsys, "train", "--steps", ORDERS)
    assert r"\x1b" in said(capsys, "train", "--preset", ORDERS)
    # argparse names the command itself when it knows none of that name
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([ORDERS])
    plain(capsys.readouterr().err, 1)


def test_what_the_system_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    # permissions don't stop root, whom tests may run as
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert f"can't use {SHOWN}: permission denied" in said(capsys, "train", "--resume", "--out", ORDERS)


@pytest.mark.slow
def test_train_and_show(train: Callable[..., int], texts: Path, capsys: pytest.CaptureFixture[str]):
    out = ORDERS.replace("/", "")
    for path in sorted(texts.rglob("*.txt")):
        path.rename(path.with_name(f"{out}{path.name}"))
    assert train("--out", out) == 0
    printed = capsys.readouterr().out
    # the run's directory twice, and the drawn file
    assert printed.count(SHOWN) == 3
    plain(printed, printed.count("\n"))
    letter = next(texts.glob("*.txt"))
    assert main(["show", out, str(letter)]) == 0
    assert SHOWN in plain(capsys.readouterr().out, 2)
    for page in Path(out).glob("*.html"):
        text = page.read_text()
        assert SHOWN in text
        plain(text, text.count("\n"))
    assert json.loads(Path(out, "data.json").read_text())


def test_lines_and_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    say(ORDERS)
    Display(10, 0).note(ORDERS)
    assert capsys.readouterr().out == f"{SHOWN}\n" * 2

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    display = Display(10, 0)
    display.note(ORDERS)
    display.close()
    # the bar's own orders are there; ours came as text, and [red] is no colour
    assert SHOWN in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()


def test_pages_and_pictures():
    assert _safe(f"<b>{ORDERS}") == f"&lt;b&gt;{SHOWN}"
    assert _safe("\ud800") == r"\ud800"
    assert _printable(f"{ORDERS}$") == rf"{SHOWN}\$"
