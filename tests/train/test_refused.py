"""What `onepass train`, `show` and `generate` can't use: exit code 2, one line, nothing left behind."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from train.tiny import TINY, contents, refused

TRAIN = {
    "nowhere.txt": "can't read nowhere.txt: no such file or directory",
    "pipe": "pipe is neither a file nor a directory",
    "folder": "there is no text in folder",
    "empty.txt": "empty.txt is no text (it is empty)",
    "white.txt": "white.txt is no text (it is only white space)",
    "text program": "program is no text (it is binary: byte 7 is NUL)",
    "noise": "NUL); give files of text",
    "binaries": "there is no text in binaries (program: it is binary: byte 4 is NUL)",
    "text --seq 100000": "a sequence of 100,000 bytes is longer than the training data",
    "text --seq 2000": "a sequence of 2,000 bytes is longer than the validation data",
    "--resume": "there is no run to resume in runs/",
    "--resume --out nowhere": "there is no run in nowhere",
    "--resume --out folder": "there is no run in folder (no config.json)",
    "text --steps 0": "--steps: must be from 1 to",
    "text --steps many": "--steps: must be a whole number, got 'many'",
    "text --seed -1": "--seed: must be from 0 to",
    "text --lr nan": "--lr: must be from 0",
    "text --dim 9": "dim must be a multiple of 2 × heads",
    "text --preset tpu": "--preset: invalid choice: 'tpu'",
    "text --task best": "--task: invalid choice: 'best'",
    "text --resume --force": "not allowed with argument",
    "text --out letters": "letters holds other things than a run ('a.txt')",
    "text --out text/1.txt": "can't use text/1.txt as a directory: not a directory",
    "text --out text/1.txt/below": "as a directory: not a directory",
    **({} if torch.cuda.is_available() else {"text --device cuda": "--device cuda: torch sees no CUDA device here"}),
}
SHOW = {
    "nowhere text/1.txt": "there is no run with a checkpoint in nowhere",
    "run nowhere": "can't read nowhere: no such file",
    "run text": "text is a directory; give one file of text",
    "run zero": "zero is no text",
    "run text/1.txt --out text/1.txt": "can't use",
    "run text/1.txt --bytes 0": "--bytes: must be from 1",
    "cut text/1.txt": "cut off",
}


@pytest.fixture(autouse=True)
def _here(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts.rename("text")
    os.mkfifo("pipe")
    for name in ("folder", "binaries", "letters"):
        Path(name).mkdir()
    files = {
        "empty.txt": b"", "white.txt": b" \n\n", "program": b"\x7fELF\2\1\1\0\0", "noise": bytes([255, *range(256)]),
        "binaries/program": b"\x7fELF\0", "letters/a.txt": b"", "zero": b"\0",
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_bytes(content)


@pytest.mark.parametrize("arguments", TRAIN)
def test_train(arguments: str):
    before = contents(Path("text"))
    assert TRAIN[arguments] in refused("train", *arguments.split())
    assert contents(Path("text")) == before
    assert list(Path("folder").iterdir()) == []
    assert not Path("runs").exists()
    assert not Path("nowhere").exists()


def test_show(finished: Path):
    finished.rename("run")
    checkpoint = Path(shutil.copytree("run", "cut"), "checkpoint.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    for arguments, said in SHOW.items():
        assert said in refused("show", *arguments.split())


def test_nothing_is_overwritten(finished: Path):
    before = contents(finished)
    said = refused("train", "text", *TINY, "--out", finished)
    assert "already holds a run; add --resume to go on or --force to start over" in said
    # bad data must not cost the old run either
    refused("train", "nowhere", "--out", finished, "--force")
    assert contents(finished) == before


# permissions don't stop root, whom tests may run as
def _denied(self: Path, **_: object) -> None:
    raise PermissionError(13, "Permission denied", str(self))


def test_what_may_not_be_read(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", _denied)
        assert re.search(r"can't read .*1\.txt: permission denied", refused("train", "text/1.txt"))
    monkeypatch.setattr(Path, "stat", _denied)
    for command in (["train", "--resume", "--out", "run"], ["show", "run", "letter"]):
        assert re.search("can't use run.*: permission denied", refused(*command))


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "can't write run/data.json: no space left on device" in refused("train", "text", *TINY, "--out", "run")


def test_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("onepass.train.loop.F.cross_entropy", lambda *args: real(*args) * float("nan"))
    said = refused("train", "text", *TINY, "--out", "run")
    assert re.search(r"the loss is (nan|inf) at step \d+; try a smaller --lr", said)
