"""`--resume --steps N` trains longer, `--resume --threads N` with other threads; the configuration keeps a record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from onepass.train import checkpoint, loop
from train.tiny import rows

Train = Callable[..., int]


def config(run: Path) -> dict[str, object]:
    return json.loads((run / "config.json").read_text())


def test_training_longer(train: Train, tmp_path: Path):
    out = tmp_path / "run"
    assert train("--out", out) == 0
    before = [row for row in rows(out) if "loss" in row]
    assert train("--out", out, "--resume", "--steps", 20) == 0
    after = [row for row in rows(out) if "loss" in row]
    assert after[:12] == before
    assert [row["step"] for row in after] == list(range(1, 21))
    assert (config(out)["steps"], config(out)["changes"]) == (20, ["steps 12 to 20 after step 12"])
    saved = checkpoint.load(out / "checkpoint.safetensors")
    assert (saved.step, saved.config.steps) == (20, 20)
    # the learning rate follows the longer schedule: down to zero at its end, not at the old one
    assert after[12]["lr"] == pytest.approx(loop.learning_rate(saved.config, 12))
    assert after[12]["lr"] > after[-1]["lr"] > 0
    # a second resume needs no option
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert [row for row in rows(out) if "loss" in row] == after


def test_an_interrupted_longer_run_is_the_undisturbed_longer_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("whole", "parts"):
        assert train("--out", tmp_path / name) == 0
    assert train("--out", tmp_path / "whole", "--resume", "--steps", 20) == 0
    step = loop.Training._one_step

    def power_cut(self: loop.Training) -> torch.Tensor:
        if self.step == 15:
            raise RuntimeError("power cut")
        return step(self)

    # the configuration is new, the checkpoint is still of the shorter run
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_one_step", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            train("--out", tmp_path / "parts", "--resume", "--steps", 20)
    assert checkpoint.load(tmp_path / "parts/checkpoint.safetensors").config.steps == 12
    assert main(["train", "--out", str(tmp_path / "parts"), "--resume"]) == 0
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")


def test_other_threads(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    assert train("--out", tmp_path / "run", "--threads", 2) == 0
    assert config(tmp_path / "run")["threads"] == 2
    assert train("--out", tmp_path / "run", "--resume", "--threads", 1) == 0
    assert used == [2, 1, 1, 1]
    assert config(tmp_path / "run")["changes"] == ["threads 2 to 1 after step 12"]


def test_a_checkpoint_of_a_longer_run_does_not_fit_a_shorter_configuration(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train("--out", tmp_path / "run") == 0
    short = (tmp_path / "run/config.json").read_bytes()
    assert train("--out", tmp_path / "run", "--resume", "--steps", 20) == 0
    (tmp_path / "run/config.json").write_bytes(short)
    assert train("--out", tmp_path / "run", "--resume") == 2
    assert "is of another configuration: steps is 20 there and 12 in config.json" in capsys.readouterr().err


def test_runs_from_before_the_record_can_be_resumed(train: Train, tmp_path: Path):
    assert train("--out", tmp_path / "run") == 0
    values = config(tmp_path / "run")
    for name in ("binary", "follow_links", "changes"):
        del values[name]
    (tmp_path / "run/config.json").write_text(json.dumps(values))
    assert train("--out", tmp_path / "run", "--resume") == 0
