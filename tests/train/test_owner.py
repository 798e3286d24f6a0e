"""A run's directory has one owner at a time, and no write in it goes anywhere else."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onepass.core.errors import UserError
from onepass.train import cli, loop
from onepass.train.run import Run
from train.tiny import TINY, rows

Train = Callable[..., int]

# one process imports torch once; its forks are the real processes
BEGIN = """
import errno, fcntl, os, signal, subprocess, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from onepass.__main__ import main
from onepass.core.errors import UserError
from onepass.train.run import Run
import onepass.train.loop, onepass.train.pictures, torch._dynamo
folder, ARGS = Path(sys.argv[1]), sys.argv[2:]
os.chdir(folder)

def fork(do, log):
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os._exit(do())

def together(count, *options):
    go = time.monotonic() + 0.2
    def do():
        time.sleep(max(0, go - time.monotonic()))
        return main(["train", *ARGS, *options])
    children = [fork(do, f"log{i}") for i in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, [Path(f"log{i}").read_text() for i in range(count)]

def held(path):
    try:
        with Run(path).locked():
            return False
    except UserError:
        return True
"""


def drive(script: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(folder), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_of_several_starts_in_one_directory_one_wins(train: Train, texts: Path, tmp_path: Path):
    script = """
for options in (["--out", "run"], ["--out", "run", "--resume"], ["--out", "run", "--force"]):
    codes, said = together(4, *options)
    assert 0 in codes and set(codes) <= {0, 2}, (codes, said)
    lost = [text for code, text in zip(codes, said) if code]
    assert all("in use by another process" in text or "already holds a run" in text for text in lost), lost
    assert all(text.count("\\n") == 1 for text in lost), lost
"""
    drive(script, tmp_path, str(texts), *TINY)
    assert train("--out", tmp_path / "whole") == 0
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_starts_without_a_directory_get_one_each(texts: Path, tmp_path: Path):
    drive("codes, said = together(4)\nassert codes == [0] * 4, said", tmp_path, str(texts), *TINY)
    found = [rows(run) for run in (tmp_path / "runs").iterdir()]
    assert len(found) == 4
    assert all(one == found[0] for one in found)


@pytest.mark.slow
def test_locks_between_processes(tmp_path: Path):
    script = """
def owner():
    with Run(Path("run")).locked():
        child = subprocess.Popen(["sleep", "60"])
        Path("ready").write_text(str(child.pid))
        time.sleep(60)

def refuse(*_):
    raise OSError(errno.ENOTSUP, "no such locks here")

def check():
    child = fork(owner, "log")
    while not (Path("ready").exists() and Path("ready").read_text()):
        time.sleep(0.01)
    assert held(Path("run"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # a program that the owner started lives on: it has not inherited the lock
    assert not held(Path("run"))
    os.kill(int(Path("ready").read_text()), signal.SIGKILL)
    Path("ready").unlink()

check()
# a fork of the owner has, but the owner lets go for both
with Run(Path("run")).locked():
    child = fork(lambda: time.sleep(60), "log")
assert not held(Path("run"))
os.kill(child, signal.SIGKILL)
# the other kind of lock
fcntl.flock = refuse
check()
"""
    drive(script, tmp_path)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with Run(tmp_path / "run").locked():
        pass
    assert "run is on a file system without locks: let one process use it\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_came_while_the_data_was_read_is_spared(
    train: Train, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started = cli.started

    def overtaken(args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(cli, "started", started)
            assert train("--out", tmp_path / "run", "--seed", 7) == 0
        return started(args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(cli, "started", overtaken)
        assert train("--out", tmp_path / "run") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert '"seed": 7' in (tmp_path / "run/config.json").read_text()
    assert len(rows(tmp_path / "run")) > 12


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pointed elsewhere", "begun anew", "gone"])
def test_a_directory_that_is_replaced_under_a_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
):
    assert train("--out", tmp_path / "other", "--seed", 3) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    (tmp_path / "first").mkdir()
    out = tmp_path / "latest"
    out.symlink_to("first") if how == "pointed elsewhere" else out.mkdir()
    step = loop.Training._one_step

    def replaced(self: loop.Training) -> torch.Tensor:
        if self.step == 4:
            out.unlink() if how == "pointed elsewhere" else shutil.rmtree(out)
            if how == "pointed elsewhere":
                out.symlink_to("other")
            elif how == "begun anew":
                shutil.copytree(tmp_path / "other", out)
        return step(self)

    monkeypatch.setattr(loop.Training, "_one_step", replaced)
    assert train("--out", out) == 2
    assert "was moved, replaced or emptied while this run was using it" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()} == before
    if how == "begun anew":
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "config.json", "data.json", "checkpoint.safetensors"])
def test_no_planted_link_is_written_through(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
):
    """Each file of a run becomes a link to somebody's file in the middle; `test_attacks.py` has other moments."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("keep me")
    step = loop.Training._one_step

    def planted(self: loop.Training) -> torch.Tensor:
        if self.step == 4:
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(victim)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_one_step", planted)
        code = train("--out", run)
    # what is replaced whole takes the link's place; what is added to is refused
    assert code == (2 if name in {".lock", "metrics.jsonl"} else 0)
    assert victim.read_text() == "keep me"
    capsys.readouterr()
    code = train("--out", run, "--resume")
    assert victim.read_text() == "keep me"
    said = capsys.readouterr().err
    assert said.count("\n") == (code == 2)
    assert ("is a symbolic link" in said) == (name in {".lock", "metrics.jsonl"})


def test_unfinished_files_are_swept(train: Train, tmp_path: Path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("keep me")
    assert train("--out", run) == 0
    whole = {path.name for path in run.iterdir()}
    (run / "checkpoint.safetensors.0123abcd.partial").write_bytes(b"half")
    (run / "routing.html.partial").symlink_to(victim)
    # `onepass show` may be writing it at this moment
    (run / "letter.routing.html.0123abcd.partial").write_bytes(b"half")
    assert train("--out", run, "--resume") == 0
    assert victim.read_text() == "keep me"
    assert {path.name for path in run.iterdir()} == whole | {"letter.routing.html.0123abcd.partial"}
    # a fresh start takes away all that is a run's
    assert train("--out", run, "--force") == 0
    assert {path.name for path in run.iterdir()} == whole


def test_names_that_only_look_like_a_runs(train: Train, tmp_path: Path):
    assert train("--out", tmp_path / "run") == 0
    for name in ("routing", "my.routing", "notes.partial", "routing.html.txt", ".routing.html"):
        (tmp_path / "run" / name).write_text("precious")
        assert train("--out", tmp_path / "run", "--force") == 2
        assert (tmp_path / "run" / name).read_text() == "precious"
        (tmp_path / "run" / name).unlink()


def test_an_owner_without_a_lock_file_is_refused(tmp_path: Path):
    run = Run(tmp_path / "run")
    with run.locked():
        os.unlink(tmp_path / "run/.lock")
        with pytest.raises(UserError, match="was moved, replaced or emptied"):
            run.append([{"step": 1}])
    assert not (tmp_path / "run/metrics.jsonl").exists()
