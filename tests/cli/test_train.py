"""`onepass train` and `onepass show` given what they can't use: exit code 2, one line, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from train.tiny import TINY


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for number in range(12):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} some words to learn from " * 12)
    return tmp_path / "text"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command, which has to end with code 2 and one line; return the line."""
    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith(f"onepass {arguments[0]}: ")
    assert "Traceback" not in said.out
    return said.err


def test_missing_file(capsys: pytest.CaptureFixture[str]):
    assert "can't read nowhere.txt: no such file or directory" in refused(capsys, "train", "nowhere.txt")
    assert not Path("runs").exists()


def test_unreadable_file(capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    # permissions don't stop root, whom tests may run as
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert re.search(r"can't read .*0\.txt: permission denied", refused(capsys, "train", text / "0.txt"))


def test_neither_file_nor_directory(capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    assert "pipe is neither a file nor a directory" in refused(capsys, "train", "pipe")
    Path("folder").mkdir()
    assert "folder is a directory, not a file" in refused(capsys, "train", "--config", "folder")


def test_empty_data(capsys: pytest.CaptureFixture[str]):
    Path("empty").mkdir()
    assert "there is no text in empty" in refused(capsys, "train", "empty")
    Path("empty.txt").touch()
    assert "empty.txt is no text (it is empty)" in refused(capsys, "train", "empty.txt")
    Path("white.txt").write_text(" \n\n")
    assert "white.txt is no text (it is only white space)" in refused(capsys, "train", "white.txt")


def test_a_file_with_no_text(capsys: pytest.CaptureFixture[str], text: Path):
    Path("program").write_bytes(b"\x7fELF\2\1\1\0\0")
    assert "program is no text (it is binary: byte 7 is NUL)" in refused(capsys, "train", text, "program")
    Path("noise").write_bytes(bytes(range(256)))
    assert "NUL); give files of text; --binary takes it" in refused(capsys, "train", "noise")
    Path("binaries").mkdir()
    Path("binaries/program").write_bytes(b"\x7fELF\0")
    assert "there is no text in binaries (program: it is binary: byte 4 is NUL)" in refused(capsys, "train", "binaries")


def test_sequence_longer_than_the_data(capsys: pytest.CaptureFixture[str], text: Path):
    said = refused(capsys, "train", text, "--seq", 100_000)
    assert "a sequence of 100,000 bytes is longer than the training data" in said
    assert "--seq" in said
    said = refused(capsys, "train", text, "--seq", 2000)
    assert "a sequence of 2,000 bytes is longer than the validation data" in said
    assert not Path("runs").exists()


def test_resume_without_a_run(capsys: pytest.CaptureFixture[str], text: Path):
    assert "there is no run to resume in runs/" in refused(capsys, "train", "--resume")
    assert "there is no run in nowhere" in refused(capsys, "train", "--resume", "--out", "nowhere")
    Path("folder").mkdir()
    assert "there is no run in folder (no config.json)" in refused(capsys, "train", "--resume", "--out", "folder")
    assert list(Path("folder").iterdir()) == []
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: must be from 1 to"),
        (["--steps", "many"], "--steps: must be a whole number, got 'many'"),
        (["--seed", "-1"], "--seed: must be from 0 to"),
        (["--lr", "nan"], "--lr: must be from 0"),
        (["--dim", "9"], "dim must be a multiple of 2 × heads"),
        (["--preset", "tpu"], "--preset: invalid choice: 'tpu'"),
        (["--route", "best"], "--route: invalid choice: 'best'"),
        (["--resume", "--force"], "not allowed with argument"),
    ],
)
def test_options(capsys: pytest.CaptureFixture[str], text: Path, options: list[str], message: str):
    assert message in refused(capsys, "train", text, *options)
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda(capsys: pytest.CaptureFixture[str], text: Path):
    assert "--device cuda: torch sees no CUDA device here" in refused(capsys, "train", text, "--device", "cuda")


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str], text: Path):
    assert main(["train", str(text), *TINY, "--steps", "2", "--out", "run"]) == 0
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    said = refused(capsys, "train", text, *TINY, "--out", "run")
    assert "run already holds a run; add --resume to go on or --force to start over" in said
    Path("letters").mkdir()
    Path("letters/a.txt").touch()
    assert "letters holds other things than a run ('a.txt')" in refused(capsys, "train", text, "--out", "letters")
    assert "is a file" in refused(capsys, "train", text, "--out", text / "0.txt")
    assert "or below one" in refused(capsys, "train", text, "--out", text / "0.txt" / "below")
    # bad data must not cost the old run either
    refused(capsys, "train", "nowhere", "--out", "run", "--force")
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


def test_a_full_disk(capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "can't write run/data.json: no space left on device" in refused(capsys, "train", text, *TINY, "--out", "run")


@pytest.mark.parametrize("command", [["train", "--resume", "--out", "run"], ["show", "run", "letter"]])
def test_a_directory_that_may_not_be_entered(
    capsys: pytest.CaptureFixture[str], command: list[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(self: Path, **kwargs: bool) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    # permissions don't stop root, whom tests may run as
    monkeypatch.setattr(Path, "stat", refuse)
    assert re.search("can't use run.*: permission denied", refused(capsys, *command))


def test_a_loss_that_is_no_number(capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch):
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("onepass.train.loop.F.cross_entropy", lambda *args: real(*args) * float("nan"))
    said = refused(capsys, "train", text, *TINY, "--out", "run")
    assert re.search(r"the loss is (nan|inf) at step \d+; try a smaller --lr", said)


def test_show(capsys: pytest.CaptureFixture[str], text: Path):
    assert "there is no run with a checkpoint in nowhere" in refused(capsys, "show", "nowhere", text / "0.txt")
    assert main(["train", str(text), *TINY, "--steps", "2", "--out", "run"]) == 0
    assert "can't read nowhere: no such file" in refused(capsys, "show", "run", "nowhere")
    assert "text is a directory; give one file of text" in refused(capsys, "show", "run", text)
    Path("program").write_bytes(b"\0")
    assert "program is no text" in refused(capsys, "show", "run", "program")
    Path("program").write_bytes(b"a\0b")
    assert main(["show", "run", "program", "--binary"]) == 0
    assert "can't use" in refused(capsys, "show", "run", text / "0.txt", "--out", text / "0.txt")
    assert "--bytes: must be from 1" in refused(capsys, "show", "run", text / "0.txt", "--bytes", 0)
    checkpoint = Path("run/checkpoint.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "cut off" in refused(capsys, "show", "run", text / "0.txt")


@pytest.mark.slow
def test_as_a_process(text: Path):
    """The real command, from the shell: what it prints where, and how it ends."""
    command = [sys.executable, "-m", "onepass", "train"]
    bad = subprocess.run([*command, "nowhere"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "onepass train: can't read nowhere: no such file or directory\n"
    ascii = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, env=ascii)
    assert (told.returncode, told.stderr) == (0, "")
    assert r"16 \xd7 256 bytes" in told.stdout
    good = subprocess.run([*command, str(text), *TINY, "--out", "run"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    last = good.stdout.splitlines()[-6:]
    assert [line.split()[0] for line in last] == ["validation", "parameters", "speed", "routed", "drawn", "files"]
    assert re.fullmatch(
        r"validation  \d\.\d{3} bits per byte; byte-unigram entropy of the same text \d\.\d{3} \([+-]\d+ %\)", last[0]
    )
    left = {path.name for path in Path("run").iterdir() if not path.name.startswith(".")}
    pictures = {"loss.png", "routing.html", "routing.png"}
    assert left == pictures | {"checkpoint.safetensors", "config.json", "data.json", "metrics.jsonl"}
