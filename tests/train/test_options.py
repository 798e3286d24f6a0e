"""TensorBoard, and what is said about files that were left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from train.tiny import TINY, printed, refused, rows

Train = Callable[..., int]


def test_no_tensorboard(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = refused("train", texts, "--out", tmp_path / "run", "--tensorboard")
    assert said == "onepass train: --tensorboard needs tensorboard: pip install tensorboard\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tensorboard_shows_what_the_metrics_hold(train: Train, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert train("--out", out, "--tensorboard", "--steps", 6, "--model", "routed") == 0
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


def test_what_was_left_out_is_named(texts: Path, tmp_path: Path):
    for number in range(5):
        (texts / f"{number}.png").write_bytes(b"\x89PNG\0" + bytes([number]))
    (texts / "empty.txt").touch()
    (texts / "copy\x1b[2J.txt").write_bytes((texts / "1.txt").read_bytes())
    said = printed("train", texts, *TINY, "--steps", 1, "--out", tmp_path / "run")
    assert "left out, binary: 0.png, 1.png, 2.png and 2 more (all in left_out.txt); --binary reads it\n" in said
    assert "left out, empty: empty.txt\n" in said
    assert r"left out, a copy of another file: copy\x1b[2J.txt" in said
    listed = (tmp_path / "run/left_out.txt").read_text().splitlines()
    assert "4.png: it is binary: byte 4 is NUL" in listed
    assert r"copy\x1b[2J.txt: its text is that of 1.txt" in listed
    assert len(listed) == 7
    # the choice is kept: a resumed run reads the same files
    assert not printed("train", texts, *TINY, "--steps", 1, "--out", tmp_path / "binary", "--binary").count(
        "left out, b"
    )
    printed("train", "--out", tmp_path / "binary", "--resume")
