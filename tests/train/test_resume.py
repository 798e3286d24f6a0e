from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onepass.core import files
from onepass.train import checkpoint, loop
from train.tiny import TINY, rows

Train = Callable[..., int]


def same(one: Path, other: Path) -> None:
    """Two runs came to the same numbers, bit for bit."""
    assert rows(one) == rows(other)
    a, b = (load_file(run / "checkpoint.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)
    assert any(name.startswith("optimizer/") for name in a)


@pytest.mark.parametrize("route", ["learned", "random"])
def test_resuming_changes_nothing(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str):
    options = ("--route", route, "--checkpoint-every", 3)
    assert train("--out", tmp_path / "whole", *options) == 0

    step = loop.Training._one_step

    def power_cut(self: loop.Training) -> torch.Tensor:
        if self.step == 8:
            raise RuntimeError("power cut")
        return step(self)

    monkeypatch.setattr(loop.Training, "_one_step", power_cut)
    with pytest.raises(RuntimeError, match="power cut"):
        train("--out", tmp_path / "parts", *options)
    monkeypatch.setattr(loop.Training, "_one_step", step)
    # three rows of the last checkpoint's time are cut off again
    assert train("--out", tmp_path / "parts", "--resume") == 0
    same(tmp_path / "whole", tmp_path / "parts")


def test_resuming_needs_no_option_but_the_directory(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from onepass.__main__ import main

    monkeypatch.chdir(tmp_path)
    assert train("--out", "runs/first") == 0
    before = rows(tmp_path / "runs/first")
    # without --out: the newest run below runs/
    assert main(["train", "--resume"]) == 0
    assert rows(tmp_path / "runs/first") == before


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def power_cut(self: loop.Training) -> None:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "save", power_cut)
        with pytest.raises(RuntimeError):
            train("--out", tmp_path / "parts")
    assert not (tmp_path / "parts/checkpoint.safetensors").exists()
    assert train("--out", tmp_path / "parts", "--resume") == 0
    assert train("--out", tmp_path / "whole") == 0
    same(tmp_path / "whole", tmp_path / "parts")


def test_a_directory_killed_before_the_run_began_is_free(train: Train, tmp_path: Path):
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    (out / "data.json").write_text("[]")
    (out / "config.json.partial").write_text("{")
    assert train("--out", out) == 0
    assert not (out / "config.json.partial").exists()


def test_a_crash_between_writing_and_renaming_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    files.write(path, b"old")

    def crash(old: object, new: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(SystemExit):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    files.write(path, "newer")
    assert path.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# one process imports torch once and lets forks of itself train: kill, resume, kill, … then once to the end
DRIVER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from onepass.__main__ import main
# what every fork would import again
import onepass.train.loop, onepass.train.pictures, torch._dynamo
from pathlib import Path

def fork(*options):
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        os._exit(main(["train", *ARGS, *options]))
    return child

ARGS, out, checkpoint = sys.argv[2:], Path(sys.argv[1]), Path(sys.argv[1], "checkpoint.safetensors")
random.seed(0)
steps = kills = partial = 0
while True:
    known = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
    child = fork(*(["--resume"] if (out / "config.json").exists() else []), "--out", str(out))
    if kills == 10:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        break
    # kill it some time after its first checkpoint of this round, so that the rounds go on
    deadline = time.time() + 60
    while (checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0) == known and time.time() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            raise SystemExit("finished before it was killed")
    time.sleep(random.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    kills += 1
    partial += bool(list(out.glob("*.partial")))
print(kills, partial)
"""


@pytest.mark.slow
def test_kill_9_again_and_again(train: Train, texts: Path, tmp_path: Path):
    arguments = [str(texts), *TINY, "--steps", "120", "--checkpoint-every", "1"]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "killed"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "10"
    assert train("--out", tmp_path / "whole", "--steps", "120") == 0
    same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
):
    step = loop.Training._one_step

    def interrupted(self: loop.Training) -> torch.Tensor:
        if self.step == 4:
            os.kill(os.getpid(), number)
        return step(self)

    out = tmp_path / "a run"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_one_step", interrupted)
        handler = signal.getsignal(number)
        assert train("--out", out) == code
        assert signal.getsignal(number) == handler
    said = capsys.readouterr().out
    assert "stopped after 5 of 12 steps" in said
    assert f"onepass train --resume --out '{out}'" in said
    assert train("--out", out, "--resume") == 0
    assert train("--out", tmp_path / "whole") == 0
    same(tmp_path / "whole", out)


def test_a_signal_between_a_step_and_its_checkpoint(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: loop.Training, windows: int) -> loop.Measured:
        # the loop has decided by now that this step needs no checkpoint
        os.kill(os.getpid(), signal.SIGINT)
        return loop.Measured(0.0, 0.0, 0.0, 0.0, {})

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "measure", interrupted)
        assert train("--out", tmp_path / "run") == 130
    assert checkpoint.load(tmp_path / "run/checkpoint.safetensors").step == 1


def test_force_spares_what_is_no_run(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("thesis.tex", "config.json"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        assert train("--out", folder, "--force") == 2
        assert "holds other things than a run" in capsys.readouterr().err
        assert (folder / name).read_text() == "precious"
        assert [entry.name for entry in folder.iterdir()] == [name]


@pytest.mark.gpu
def test_the_gpu_preset(texts: Path, tmp_path: Path):
    from onepass.__main__ import main

    options = ["--preset", "gpu", "--seq", "64", "--batch", "2", "--dim", "64", "--blocks", "2", "--steps", "6"]
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", str(texts), *options, *out, "--checkpoint-every", "4"]) == 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["device"], config["precision"]) == ("cuda", "bf16")
    assert all(value.dtype == torch.float32 for value in load_file(tmp_path / "run/checkpoint.safetensors").values())
    assert main(["train", "--resume", *out]) == 0
    assert len([row for row in rows(tmp_path / "run") if "loss" in row]) == 6
