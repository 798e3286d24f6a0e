"""Stopped, resumed, longer, with other threads: a run is what it would have been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onepass.__main__ import main
from onepass.train import checkpoint, loop
from train.tiny import TINY, at_step, cut_off, power_cut, printed, refused, rows, same

Train = Callable[..., int]
slow = pytest.mark.slow


def config(run: Path) -> dict[str, object]:
    return json.loads((run / "config.json").read_text())


@pytest.mark.parametrize("task", ["masked", pytest.param("causal", marks=slow)])
def test_resuming_changes_nothing(train: Train, tmp_path: Path, task: str):
    options = ("--task", task, "--checkpoint-every", 3)
    assert train("--out", tmp_path / "whole", *options) == 0
    # two rows after the last checkpoint are cut off again, and what a crash may leave of a third
    cut_off(8, lambda: train("--out", tmp_path / "parts", *options))
    with (tmp_path / "parts/metrics.jsonl").open("a") as lines:
        lines.write('{"step": 9, "lo')
    assert train("--out", tmp_path / "parts", "--resume") == 0
    same(tmp_path / "whole", tmp_path / "parts")


def test_resuming_needs_no_option_but_the_directory(
    whole: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    finished.rename("runs/first")
    # without --out: the newest run below runs/
    assert main(["train", "--resume"]) == 0
    same(tmp_path / "runs/first", whole)


@slow
def test_a_run_killed_before_its_first_checkpoint(
    train: Train, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "save", power_cut)
        with pytest.raises(RuntimeError):
            train("--out", tmp_path / "parts")
    assert not (tmp_path / "parts/checkpoint.safetensors").exists()
    assert train("--out", tmp_path / "parts", "--resume") == 0
    same(whole, tmp_path / "parts")


def test_a_directory_killed_before_the_run_began_is_free(train: Train, tmp_path: Path):
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    (out / "data.json").write_text("[]")
    (out / "config.json.partial").write_text("{")
    assert train("--out", out) == 0
    assert not (out / "config.json.partial").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(
    train: Train, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
):
    out, handler = tmp_path / "a run", signal.getsignal(number)
    with at_step(4, lambda: os.kill(os.getpid(), number)):
        assert train("--out", out) == code
    assert signal.getsignal(number) == handler
    said = capsys.readouterr().out
    assert "stopped after 5 of 12 steps" in said
    assert f"go on with: {sys.executable} -m onepass train --resume --out '{out}'" in said
    assert checkpoint.load(out / checkpoint.NAME).step == 5
    assert train("--out", out, "--resume") == 0
    same(whole, out)


def test_training_longer(train: Train, whole: Path, finished: Path, texts: Path, tmp_path: Path):
    """`--resume --steps N`; an interrupted longer run is the undisturbed one."""
    cut = shutil.copytree(finished, tmp_path / "cut")
    short = (whole / "config.json").read_bytes()
    before = [row for row in rows(whole) if "loss" in row]
    assert train("--out", finished, "--resume", "--steps", 20) == 0
    after = [row for row in rows(finished) if "loss" in row]
    assert after[:12] == before
    assert [row["step"] for row in after] == list(range(1, 21))
    assert (config(finished)["steps"], config(finished)["changes"]) == (20, ["steps 12 to 20 after step 12"])
    saved = checkpoint.load(finished / "checkpoint.safetensors")
    assert (saved.step, saved.config.steps) == (20, 20)
    # the learning rate follows the longer schedule: down to zero at its end, not at the old one
    assert after[12]["lr"] == pytest.approx(loop.learning_rate(saved.config, 12))
    assert after[12]["lr"] > after[-1]["lr"] > 0
    # a second resume needs no option
    printed("train", "--out", finished, "--resume")
    assert [row for row in rows(finished) if "loss" in row] == after

    cut_off(15, lambda: train("--out", cut, "--resume", "--steps", 20))
    # the configuration is new, the checkpoint is still of the shorter run
    assert checkpoint.load(cut / "checkpoint.safetensors").config.steps == 12
    printed("train", "--out", cut, "--resume")
    same(cut, finished)

    (finished / "config.json").write_bytes(short)
    said = refused("train", texts, *TINY, "--out", finished, "--resume")
    assert "is of another configuration: steps is 20 there and 12 in config.json" in said


def test_other_threads(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []
    more = torch.get_num_threads() + 1
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert train("--out", tmp_path / "run", "--threads", more) == 0
    assert config(tmp_path / "run")["threads"] == more
    assert train("--out", tmp_path / "run", "--resume", "--threads", 1) == 0
    assert used[:2] == [1, more]  # the fixture's own are before and after each
    assert config(tmp_path / "run")["changes"] == [f"threads {more} to 1 after step 12"]


@pytest.mark.gpu
def test_the_gpu_preset(texts: Path, tmp_path: Path):
    options = ["--preset", "gpu", "--seq", "64", "--batch", "2", "--dim", "64", "--blocks", "2", "--steps", "6"]
    out = tmp_path / "run"
    printed("train", texts, *options, "--out", out, "--checkpoint-every", 4)
    assert (config(out)["device"], config(out)["precision"]) == ("cuda", "bf16")
    kinds = {n: value.dtype for n, value in load_file(out / "checkpoint.safetensors").items() if "bias" not in n}
    assert all(kind == (torch.int16 if "remainder" in n else torch.bfloat16) for n, kind in kinds.items()), kinds
    printed("train", "--resume", "--out", out)
    assert len([row for row in rows(out) if "loss" in row]) == 6
