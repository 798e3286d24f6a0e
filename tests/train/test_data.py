from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.train import data, sources
from train.tiny import TINY, printed


def test_the_place_of_a_file_depends_on_its_name_alone_and_never_changes():
    # written down once: a changed hash would silently move files between the parts of old and new runs
    assert data.position("json/decoder.py") == pytest.approx(0.2311742724, abs=1e-9)
    assert data.position("a.txt") == pytest.approx(0.0965544604, abs=1e-9)


def test_whole_files_go_to_one_part(texts: Path):
    corpus = data.load([texts])
    parts = [b"".join(s.content for s in corpus.sources if s.validation is part) for part in (False, True)]
    assert [corpus.training.tobytes(), corpus.validation.tobytes()] == parts
    assert all(parts)
    assert all(s.validation == (data.position(s.name) < data.VALIDATION) for s in corpus.sources)


def test_new_files_and_another_place_leave_the_others_where_they_are(texts: Path, tmp_path: Path):
    old = data.load([texts])
    before = {s.name: s.validation for s in old.sources}
    moved = texts.rename(tmp_path / "elsewhere")
    assert data.load([str(moved)]).digest == old.digest
    for number in range(40):
        (moved / f"new{number}.md").write_text(f"another text, number {number}")
    after = {s.name: s.validation for s in data.load([str(moved)]).sources}
    assert len(after) == len(before) + 40
    assert {name: after[name] for name in before} == before


def test_a_few_files_fill_both_parts_and_a_single_one_is_cut(tmp_path: Path):
    for count in range(1, 6):
        (tmp_path / f"{count}.txt").write_text(f"text {count}")
        if count > 1:
            corpus = data.load([tmp_path])
            assert min(len(corpus.training), len(corpus.validation)) > 0
    (tmp_path / "one.txt").write_bytes(b"0123456789" * 100)
    corpus = data.load([tmp_path / "one.txt"])
    assert (len(corpus.training), len(corpus.validation)) == (900, 100)


def test_what_is_left_out_of_a_directory(texts: Path, tmp_path: Path):
    first = (texts / "1.txt").rename(texts / "1\udcff.txt")
    count = len(data.load([str(texts), str(first)]).sources)  # the same file twice is read once
    (texts / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "copy\x1b[2J.txt").write_bytes(first.read_bytes())
    (texts / ".hidden").write_text("hidden")
    (texts / ".git").mkdir()
    (texts / ".git" / "config").write_text("hidden too")
    (texts / "dangling").symlink_to(texts / "nowhere")
    os.mkfifo(texts / "pipe")
    assert len(data.load([texts]).sources) == count
    said = printed("train", texts, *TINY, "--steps", 1, "--out", tmp_path / "run")
    assert "left out: 3 files, left_out.txt says why\n" in said
    assert sorted((tmp_path / "run/left_out.txt").read_text().splitlines()) == [
        r"copy\x1b[2J.txt: its text is that of 1\udcff.txt",
        "empty.txt: it is empty",
        "picture.png: it is binary: byte 8 is NUL",
    ]


def test_links_out_of_a_directory(texts: Path, tmp_path: Path):
    count = len(data.load([texts]).sources)
    (tmp_path / "secret").write_text("a key that no model may learn")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.txt").write_text("another text")
    (texts / "out.txt").symlink_to(tmp_path / "secret")
    (texts / "within.txt").symlink_to(texts / ".hidden")
    (texts / ".hidden").write_text("hidden, and yet inside")
    (texts / "folder").symlink_to(tmp_path / "folder")
    corpus = data.load([texts])
    assert len(corpus.sources) == count + 1
    assert dict(corpus.left_out) == {
        "out.txt": "it is a link out of the directory; give the link itself",
        "folder": "it is a link to a directory",
    }
    # a link that is named itself is read
    assert data.load([str(texts / "out.txt")]).sources[0].content.startswith(b"a key")
    # and so is a directory behind a link: what lies in it lies inside
    assert [s.name for s in data.load([str(texts / "folder")]).sources] == ["other.txt"]


def test_text_of_any_encoding_but_utf_16():
    for text, encoding in (("日本語とé", "utf-8"), ("Grüße, s'il vous plaît", "latin-1"), ("日本語の文", "shift_jis")):
        assert sources.why_no_text(text.encode(encoding)) is None
    assert sources.why_no_text(bytes(range(128, 256)) * 10) is None
    assert sources.why_no_text("UTF-16".encode("utf-16")) == "it is binary: byte 3 is NUL"


def test_the_digest_sees_every_change(texts: Path):
    """Another byte, name, file more and file less; the list of files has the digests."""
    seen = {(old := data.load([texts])).digest}
    listed = {name: digest for name, _, digest, _ in json.loads(old.manifest())}
    assert listed["2.txt"] == hashlib.sha256((texts / "2.txt").read_bytes()).hexdigest()
    for change in (
        lambda: (texts / "2.txt").write_text("2 other bytes"),
        lambda: (texts / "2.txt").rename(texts / "2.new"),
        (texts / "2.new").unlink,
        lambda: (texts / "3.new").write_text("come"),
    ):
        change()
        seen.add(data.load([texts]).digest)
    assert len(seen) == 5


@given(n=st.integers(8, 300), share=st.floats(0.01, 0.9), seed=st.integers(0, 2**63 - 1))
def test_hiding(n: int, share: float, seed: int):
    windows = np.random.default_rng(0).integers(0, 256, (3, n))
    batch = data.hide(windows, share, data.generator(seed, data.TRAINING, 5))
    count = max(1, round(share * n))
    assert batch.hidden.shape == batch.bytes.shape == (3, count)
    for row in range(3):
        assert len(set(batch.hidden[row])) == count
        assert (batch.tokens[row, batch.hidden[row]] == data.MASK).all()
        assert (windows[row, batch.hidden[row]] == batch.bytes[row]).all()
        assert (np.delete(batch.tokens[row], batch.hidden[row]) == np.delete(windows[row], batch.hidden[row])).all()


def test_a_step_is_a_function_of_seed_and_number():
    text = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8)

    def step(seed: int, number: int) -> bytes:
        return data.training_batch(text, 4, 32, 0.15, seed, number).tokens.tobytes()

    assert len({step(0, 7), step(0, 7), step(0, 8), step(1, 7)}) == 3


@given(length=st.integers(32, 5000), count=st.integers(1, 200))
def test_validation_sequences_do_not_overlap(length: int, count: int):
    starts = data.validation_starts(np.zeros(length, dtype=np.uint8), 32, count)
    assert len(starts) == min(count, length // 32)
    assert 0 <= starts[0] <= starts[-1] <= length - 32
    assert (np.diff(starts) >= 32).all()


def test_what_is_measured_does_not_depend_on_the_batch_size():
    text = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8)
    one, four = (
        np.concatenate([batch.tokens for batch in data.validation_batches(text, size, 32, 0.15, 50)]) for size in (1, 4)
    )
    assert (one == four).all()
