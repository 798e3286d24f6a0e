"""What is said about files that were left out."""

from __future__ import annotations

from pathlib import Path

from train.tiny import TINY, printed


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
