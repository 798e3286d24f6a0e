"""Damaged files of a run: one line, exit code 2, and nothing is lost by it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepass.train import data, metrics
from onepass.train.commands.errors import UserError
from onepass.train.metrics import Mark
from onepass.train.run import Run
from train.tiny import TINY, contents, printed, refused, rows

WHERE = Path("metrics.jsonl")
ROWS = [{"step": step, "loss": 1 / step, "bits_per_byte": 1.5 / step, "lr": 1e-3} for step in range(1, 8)]
LINES, END = metrics.written(ROWS, Mark())
FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def parsed(content: bytes) -> tuple[list[metrics.Row], Mark]:
    found = list(metrics.parsed(content.splitlines(keepends=True), WHERE))
    return [row for row, _ in found], found[-1][1] if found else Mark()


def unreadable(content: bytes) -> str:
    with pytest.raises(UserError) as caught:
        parsed(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_come_back():
    assert parsed(LINES) == (ROWS, END)
    assert END.length == len(LINES)
    assert parsed(b"") == ([], Mark())
    first, mark = metrics.written(ROWS[:3], Mark())
    rest, end = metrics.written(ROWS[3:], mark)
    assert (first + rest, end) == (LINES, END)
    assert metrics.written([], mark) == (b"", mark)


def test_the_digest_is_what_the_module_says():
    import hashlib

    digest = ""
    for line, row in zip(LINES.decode().splitlines(), ROWS, strict=True):
        digest = hashlib.sha256(f"{digest}\n{json.dumps(row)}".encode()).hexdigest()[:16]
        assert json.loads(line) == {**row, "digest": digest}


@FUZZ
@given(st.data())
def test_any_changed_byte_shows(data: st.DataObject):
    content = bytearray(LINES)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda value: value != LINES[place]))
    assert "is damaged, or a line before it is lost or moved" in unreadable(bytes(content))


@FUZZ
@given(st.permutations(range(len(ROWS))), st.integers(1, len(ROWS)))
def test_lost_moved_and_doubled_lines_show(order: list[int], count: int):
    lines = LINES.splitlines(keepends=True)
    chosen = order[:count]
    if chosen != list(range(count)):
        unreadable(b"".join(lines[i] for i in chosen))
    unreadable(b"".join(lines[: chosen[0] + 1]) + lines[chosen[0]])


@FUZZ
@given(st.integers(0, len(LINES) - 1))
def test_a_cut_is_seen_beside_the_checkpoint(tmp_path: Path, length: int):
    (tmp_path / "metrics.jsonl").write_bytes(LINES[:length])
    with pytest.raises(UserError, match="fewer than the"):
        Run(tmp_path).verify(saved(END))


def saved(mark: Mark) -> Any:
    """What `verify` reads of a checkpoint."""
    return SimpleNamespace(metrics_bytes=mark.length, metrics_digest=mark.digest)


def test_verify(tmp_path: Path):
    run = Run(tmp_path)
    assert run.verify(saved(Mark())) == Mark()
    (tmp_path / "metrics.jsonl").write_bytes(LINES + b"a torn line after the checkpoint")
    assert run.verify(saved(END)) == END
    with pytest.raises(UserError, match="of another run than checkpoint"):
        run.verify(saved(Mark(END.length, "0" * 16)))
    with pytest.raises(UserError, match="line 7 is damaged"):
        run.verify(saved(Mark(END.length - 1, END.digest)))


def test_runs_from_before_there_were_digests(tmp_path: Path):
    old = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:3])
    (tmp_path / "metrics.jsonl").write_bytes(old)
    run = Run(tmp_path)
    mark = run.verify(saved(Mark(len(old), None)))
    more, end = metrics.written(ROWS[3:], mark)
    (tmp_path / "metrics.jsonl").write_bytes(old + more)
    assert run.verify(saved(end)) == end
    assert parsed(old + more)[0] == ROWS
    # later rows seal the old ones, and none of them may lack its digest
    unreadable(old.replace(b'"step": 2', b'"step": 9') + more)
    unreadable(old[old.index(b"\n") + 1 :] + more)
    stripped = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[-1:])
    unreadable(old + more.splitlines(keepends=True)[0] + stripped)


@pytest.mark.parametrize(
    "row",
    ["[]", "3", "null", "{}", '{"loss": 1}', '{"step": 1.0}', '{"step": true}', '{"step": "1"}',
     '{"step": 1, "a": "b"}',
     '{"step": 1, "loss": NaN}', '{"step": 1, "loss": Infinity}', '{"step": 1, "loss": null}', "[" * 100_000],
)  # fmt: skip
def test_old_rows_that_are_none(row: str):
    unreadable(row.encode() + b"\n")


@FUZZ
@given(st.data())
def test_a_damaged_manifest_never_ends_in_a_traceback(tmp_path: Path, data: st.DataObject):
    corpus = manifest_corpus()
    content = bytearray(corpus.manifest().encode())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    manifest_said(tmp_path, bytes(content))


@pytest.mark.parametrize(
    "content",
    [b"3", b"null", b"{}", b'{"a": 1}', b"[1]", b"[[]]", b"[{}]", b'[["a", Infinity, "b"]]', b'[["a", null, 1]]',
     b'["ab", "cd"]', b"[" * 100_000, b"\xff\xfe"],
)  # fmt: skip
def test_a_manifest_that_is_none(tmp_path: Path, content: bytes):
    manifest_said(tmp_path, content)


def manifest_corpus() -> data.Corpus:
    sources = [data.Source(name, repr(name).encode(), f"{name}{name}") for name in ("a", "b\n", "c\udce9")]
    empty = data.np.zeros(0, dtype=data.np.uint8)
    return data.Corpus(sources, empty, empty, "digest")


def manifest_said(folder: Path, content: bytes) -> None:
    path, corpus = folder / "data.json", manifest_corpus()
    path.write_bytes(content)
    assert data.damaged(corpus, path) == (content != corpus.manifest().encode())
    assert "\n" not in data.changed(corpus, path)


@pytest.mark.slow
def test_what_is_gone(whole: Path, finished: Path, texts: Path):
    """To start over would cost the metrics; what is put back goes on."""
    resume = ["train", texts, *TINY, "--resume", "--out", finished]
    before = contents(finished)
    (finished / "checkpoint.safetensors").unlink()
    assert "checkpoint.safetensors is gone; put it back" in refused(*resume)
    (finished / "checkpoint.safetensors").symlink_to(finished.parent / "unmounted")
    assert "no such file" in refused(*resume)
    (finished / "checkpoint.safetensors").unlink()
    (finished / "checkpoint.safetensors").write_bytes(before["checkpoint.safetensors"])
    (finished / "metrics.jsonl").unlink()
    assert "has 0 bytes, fewer than" in refused(*resume)
    # a model may be passed on without its metrics
    printed("show", finished, texts / "1.txt")
    for bad in (b"{", before["data.json"][:-5], b""):
        (finished / "metrics.jsonl").write_bytes(before["metrics.jsonl"])
        (finished / "data.json").write_bytes(bad)
        assert "data.json was damaged or gone and is written anew" in printed(*resume)
        assert (finished / "data.json").read_bytes() == before["data.json"]
    # with other data there is nothing to mend it by
    (finished / "data.json").write_bytes(b"{")
    (texts / "1.txt").write_text("something else")
    assert "the data has changed since the run began: its files are not the same" in refused(*resume)
    assert rows(finished) == rows(whole)
