"""Damaged files of a run: one line, exit code 2, and nothing is lost by it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepass.train import metrics
from onepass.train.commands.errors import UserError
from onepass.train.metrics import Mark
from onepass.train.run import Run
from train.tiny import TINY, contents, printed, refused, rows

ROWS = [{"step": step, "loss": 1 / step, "bits_per_byte": 1.5 / step, "lr": 1e-3} for step in range(1, 8)]
LINES = b"".join(map(metrics.line, ROWS))
END = Mark(len(LINES), hashlib.sha256(LINES).hexdigest())
FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


def saved(mark: Mark) -> Any:
    """What `verify` reads of a checkpoint."""
    return SimpleNamespace(metrics_bytes=mark.length, metrics_digest=mark.digest)


def test_what_is_appended_is_what_a_checkpoint_holds(tmp_path: Path):
    run = Run(tmp_path)
    run.append(ROWS[:3])
    middle = run.mark
    run.append(ROWS[3:])
    assert (run.mark, list(run.rows())) == (END, ROWS)
    # another process goes on from the middle, and what followed is gone
    again = Run(tmp_path)
    again.rewind(saved(middle))
    assert list(again.rows()) == ROWS[:3]
    again.append(ROWS[3:])
    assert (again.mark, (tmp_path / "metrics.jsonl").read_bytes()) == (END, LINES)


@FUZZ
@given(st.data())
def test_any_changed_byte_and_any_cut_shows(tmp_path: Path, data: st.DataObject):
    content = bytearray(LINES)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda value: value != LINES[place]))
    for there, said in ((bytes(content), "it is damaged, or of another run"), (LINES[:place], "fewer than the")):
        (tmp_path / "metrics.jsonl").write_bytes(there)
        with pytest.raises(UserError, match=said):
            Run(tmp_path).verify(saved(END))


def test_what_follows_the_checkpoint_may_be_torn(tmp_path: Path):
    run = Run(tmp_path)
    assert run.verify(saved(Mark()))[1] == Mark()
    (tmp_path / "metrics.jsonl").write_bytes(LINES + b"a torn line after the checkpoint")
    assert run.verify(saved(END))[1] == END


@pytest.mark.parametrize(
    "row",
    ["[]", "3", "null", "{}", '{"loss": 1}', '{"step": 1.0}', '{"step": true}', '{"step": "1"}',
     '{"step": 1, "a": "b"}', '{"step": 1, "loss": NaN}', '{"step": 1, "loss": null}', "[" * 100_000],
)  # fmt: skip
def test_rows_that_are_none(row: str):
    with pytest.raises(UserError, match="a line is damaged"):
        metrics.parsed(row.encode(), Path("metrics.jsonl"))


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
        printed(*resume)
        assert (finished / "data.json").read_bytes() == before["data.json"]
    assert rows(finished) == rows(whole)
