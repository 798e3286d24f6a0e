"""A configuration file, TensorBoard, and what is said about files that were left out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.__main__ import main
from onepass.train import machine
from train.tiny import rows

Train = Callable[..., int]
FILE = """
dim = 16
blocks = 2
seq = 32
batch = 4
steps = 12
device = "cpu"
checkpoint-every = 3
"""


def test_a_configuration_file(train: Train, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(FILE + 'paths = ["texts"]\nout = "from_file"\nlr = 0.002\nbinary = true\n')
    assert main(["train", "--config", "run.toml", "--lr", "0.001"]) == 0
    values = json.loads(Path("from_file/config.json").read_text())
    # the command line wins
    assert (values["dim"], values["lr"], values["binary"]) == (16, 0.001, True)
    assert train("--out", "by_hand") == 0
    assert rows(Path("from_file")) == rows(Path("by_hand"))
    assert main(["train", "--config", "run.toml", "--lr", "0.001", "--resume"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 0", "run.toml: steps must be from 1 to 1,000,000,000, got 0"),
        ("steps = 1.5", "run.toml: steps must be a whole number, got '1.5'"),
        ("steps = true", "run.toml: steps must be a number, got True"),
        ('route = "best"', "run.toml: route must be one of learned, random, none, got 'best'"),
        ("binary = 1", "run.toml: binary must be true or false, got 1"),
        ('paths = "notes"', "run.toml: paths must be a list of texts, got 'notes'"),
        ("out = 1", "run.toml: out must be a text, got 1"),
        ("layers = 2", "run.toml: layers is unknown; the file may set batch, binary, blocks,"),
        ("steps =", "run.toml is no TOML (Invalid value"),
        (b"\xff", "run.toml is no TOML (not UTF-8)"),
    ],
)
def test_faults_of_a_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | bytes, message: str
):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["train", "--config", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"onepass train: {message}")
    assert said.count("\n") == 1
    assert not Path("runs").exists()


def test_no_tensorboard(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert train("--out", tmp_path / "run", "--tensorboard") == 2
    assert capsys.readouterr().err == "onepass train: --tensorboard needs tensorboard: pip install tensorboard\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tensorboard_shows_what_the_metrics_hold(train: Train, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert train("--out", out, "--tensorboard", "--steps", 6) == 0
    assert train("--out", out, "--tensorboard", "--resume", "--steps", 12) == 0
    board = EventAccumulator(str(out)).Reload()
    told = {event.step: event.value for event in board.Scalars("loss")}
    assert told == pytest.approx({row["step"]: row["loss"] for row in rows(out) if "loss" in row}, rel=1e-6)
    # the last measurement of the shorter run stays visible here
    name = "validation_bits_per_byte"
    told = {event.step: event.value for event in board.Scalars(name)}
    assert {row["step"]: pytest.approx(row[name], rel=1e-6) for row in rows(out) if name in row}.items() <= told.items()
    name = "routing/blocks.1.feed_forward.router/overlap"
    shown = {event.step: event.value for event in board.Scalars(name)}
    assert shown[12] == pytest.approx(next(row[name] for row in rows(out)[::-1] if name in row), rel=1e-6)
    # the files belong to the run
    assert train("--out", out, "--force") == 0
    assert not list(out.glob("events.out.tfevents.*"))


def test_what_was_left_out_is_named(train: Train, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number in range(5):
        (texts / f"{number}.png").write_bytes(b"\x89PNG\0" + bytes([number]))
    (texts / "empty.txt").touch()
    (texts / "copy\x1b[2J.txt").write_bytes((texts / "1.txt").read_bytes())
    assert train("--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "left out, binary: 0.png, 1.png, 2.png and 2 more (all in left_out.txt); --binary reads it\n" in said
    assert "left out, empty: empty.txt\n" in said
    assert r"left out, a copy of another file: copy\x1b[2J.txt" in said
    listed = (tmp_path / "run/left_out.txt").read_text().splitlines()
    assert "4.png: it is binary: byte 4 is NUL" in listed
    assert r"copy\x1b[2J.txt: its text is that of 1.txt" in listed
    assert len(listed) == 7
    # the choice is kept: a resumed run reads the same files
    assert train("--out", tmp_path / "binary", "--binary") == 0
    assert train("--out", tmp_path / "binary", "--resume") == 0
    assert train("--out", tmp_path / "run", "--resume", "--binary") == 2
    assert "binary is True here and False in the run" in capsys.readouterr().err


def test_a_loaded_machine_is_told(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(machine, "idle_cores", lambda: 0.0)
    assert train("--out", tmp_path / "run", "--steps", 1) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"note        other processes keep [\d.]+ of \d+ CPU cores busy: 1 thread may be slow", first)


def test_page_and_terminal_agree(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train("--out", tmp_path / "run") == 0
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    page = (tmp_path / "run/routing.html").read_text()
    bits = said["validation"].split(" bits")[0]
    assert re.fullmatch(r"\d\.\d{3}", bits)
    assert f"{bits} bits per byte" in page
    assert said["drawn"].partition(": ")[2] in page


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("doctor", "train", "show", "bench"))
