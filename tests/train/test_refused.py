"""What `onepass train`, `show` and `generate` can't use: exit code 2, one line, nothing left behind."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from onepass.train.progress import say
from train.tiny import TINY, at_step, contents, refused

SAID = {
    "train nowhere.txt": "can't read nowhere.txt: no such file or directory",
    "train a\0b": "can't read a\\x00b: no file can have this name",
    "train pipe": "pipe is neither a file nor a directory",
    "train folder": "there is no text in folder",
    "train empty.txt": "empty.txt is no text (it is empty)",
    "train white.txt": "white.txt is no text (it is only white space)",
    "train text program": "program is no text (it is binary: byte 7 is NUL)",
    "train noise": "NUL); give files of text",
    "train binaries": "there is no text in binaries (program: it is binary: byte 4 is NUL)",
    "train text --seq 100000": "a sequence of 100,000 bytes is longer than the training data",
    "train text --seq 2000": "a sequence of 2,000 bytes is longer than the validation data",
    "train --resume": "there is no run to resume in runs/",
    "train --resume --out nowhere": "there is no run in nowhere",
    "train --resume --out folder": "there is no run in folder (no config.json)",
    "train text --steps 0": "--steps: must be from 1 to",
    "train text --steps many": "--steps: must be a whole number, got 'many'",
    "train text --seed -1": "--seed: must be from 0 to",
    "train text --lr nan": "--lr: must be from 0",
    "train text --dim 9": "dim must be a multiple of 2 × heads",
    "train text --preset tpu": "--preset: invalid choice: 'tpu'",
    "train text --task best": "--task: invalid choice: 'best'",
    "train text --resume --force": "not allowed with argument",
    "train --stesp 3": "onepass train: unrecognized arguments: --stesp; did you mean --steps?\n",
    "train --tsk=x": "onepass train: unrecognized arguments: --tsk=x; did you mean --task?\n",
    "doctor --zzz": "onepass doctor: unrecognized arguments: --zzz\n",
    "--versoin": "onepass: unrecognized arguments: --versoin; did you mean --version?\n",
    "train text --out letters --steps 1": "letters holds other things than a run ('a.txt')",
    "train text --out letters --steps 1 --force": "letters holds other things than a run ('a.txt')",
    "train text --out foreign --steps 1 --force": "foreign holds other things than a run ('config.json')",
    "train text --out text/1.txt": "can't use text/1.txt as a directory: not a directory",
    "train text --out text/1.txt/below": "as a directory: not a directory",
    "train text --out masked --steps 1": "already holds a run; add --resume to go on or --force to start over",
    # bad data costs no old run
    "train nowhere --out masked --force": "can't read nowhere",
    "show nowhere text/1.txt": "there is no run with a checkpoint in nowhere",
    "show masked nowhere": "can't read nowhere: no such file",
    "show masked text": "text is a directory; give one file of text",
    "show masked zero": "zero is no text",
    "show masked text/1.txt --out text/1.txt": "can't use",
    "show masked text/1.txt --bytes 0": "--bytes: must be from 1",
    "show cut text/1.txt": "cut off",
    "generate causal --prompt=": "--prompt is empty",
    f"generate causal --prompt {'a' * 33}": "--prompt has 33 bytes, more than the 32 that",
    "generate causal": "the following arguments are required: --prompt",
    "generate causal --prompt a --temperature -1": "--temperature: must be from 0 to 100",
    "generate causal --prompt a --length 0": "--length: must be from 1",
    "generate nowhere --prompt a": "there is no run with a checkpoint in nowhere",
    "generate cut --prompt a": "cut off",
    "generate masked --prompt a": "guesses hidden bytes; generate needs one of --task causal",
}
if not torch.cuda.is_available():
    SAID["train text --device cuda"] = "--device cuda: torch sees no CUDA device here"
    SAID["generate causal --prompt a --device cuda"] = "sees no CUDA device"
# orders to a terminal are shown as escapes, on one line
ORDERS = "a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"
SHOWN = r"a\x1b]0;owned\x07\x1b[31m\n\x9b2Jfake: \u202eline [red]"


@pytest.fixture(autouse=True)
def _here(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts.rename("text")
    os.mkfifo("pipe")
    files = {
        "empty.txt": b"", "white.txt": b" \n\n", "program": b"\x7fELF\2\1\1\0\0", "noise": bytes([255, *range(256)]),
        "binaries/program": b"\x7fELF\0", "letters/a.txt": b"", "foreign/config.json": b"{}", "zero": b"\0",
    }  # fmt: skip
    for name in ("folder", *(str(Path(file).parent) for file in files)):
        Path(name).mkdir(exist_ok=True)
    for name, content in files.items():
        Path(name).write_bytes(content)


def test_what_is_refused_changes_nothing(whole: Path, causal: Path):
    shutil.copytree(whole, "masked")
    shutil.copytree(causal, "causal")
    checkpoint = Path(shutil.copytree("causal", "cut"), "checkpoint.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    before, folders = contents(Path()), sorted(Path().rglob("*"))
    for arguments, said in SAID.items():
        assert said in refused(*arguments.split()), arguments
        assert contents(Path()) == before, arguments
        assert sorted(Path().rglob("*")) == folders, arguments


def test_orders_to_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert SHOWN in refused("train", ORDERS)
    Path(ORDERS).write_bytes(b"\0binary")
    assert f"{SHOWN} is no text" in refused("train", ORDERS)
    assert SHOWN in refused("train", "--out", ORDERS, "--resume")
    assert SHOWN in refused("train", "--out", ORDERS)
    assert SHOWN in refused("show", ORDERS, ORDERS)
    Path("folder", ORDERS).touch()
    assert "holds other things than a run" in refused("train", "text", "--out", "folder")
    say(ORDERS)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    # a terminal that knows ASCII only
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("16 × 256 bytes of caf\udce9")
    assert raw.getvalue() == b"16 \\xd7 256 bytes of caf\\udce9\n"


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


def test_a_full_disk():
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
        assert "can't write run/data.json: no space left on device" in refused("train", "text", *TINY, "--out", "run")


def test_too_little_memory():
    """Of a GPU, for NumPy, for torch on a CPU; of training, and of any other command."""
    for error in (torch.OutOfMemoryError(), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with at_step(2, mock.Mock(side_effect=error)):
            said = refused("train", "text", *TINY, "--out", "run", "--force")
        assert "the device has too little memory for 4 × 32 bytes a step; lower --batch or --seq" in said
        with mock.patch("onepass.train.trace.trace", side_effect=error):
            assert refused("show", "run", "text/1.txt") == "onepass show: there is too little memory\n"


def test_a_loss_that_is_no_number(monkeypatch: pytest.MonkeyPatch):
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("onepass.train.loop.F.cross_entropy", lambda *args: real(*args) * float("nan"))
    said = refused("train", "text", *TINY, "--out", "run")
    assert re.search(r"the loss is (nan|inf) at step \d+; try a smaller --lr", said)
