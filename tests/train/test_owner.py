"""A run's directory has one owner at a time, and no write in it goes anywhere else."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.train import cli
from onepass.train.run import Run
from train.tiny import TINY, at_step, contents, drive, refused, rows

Train = Callable[..., int]


@pytest.mark.slow
def test_of_several_starts_in_one_directory_one_wins(whole: Path, texts: Path, tmp_path: Path):
    script = """
def together(count, *options):
    go = time.monotonic() + 0.2
    def do():
        time.sleep(max(0, go - time.monotonic()))
        return main(["train", *ARGS, *options])
    children = [fork(do, f"log{i}") for i in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, [Path(f"log{i}").read_text() for i in range(count)]

for options in (["--out", "run"], ["--out", "run", "--resume"], ["--out", "run", "--force"]):
    codes, said = together(3, *options)
    assert 0 in codes and set(codes) <= {0, 2}, (codes, said)
    lost = [text for code, text in zip(codes, said) if code]
    assert all("in use by another process" in text or "already holds a run" in text for text in lost), lost
    assert all(text.count("\\n") == 1 for text in lost), lost
# without a directory each gets one
codes, said = together(3)
assert codes == [0] * 3, said
"""
    drive(script, tmp_path, str(texts), *TINY)
    runs = [tmp_path / "run", *(tmp_path / "runs").iterdir()]
    assert len(runs) == 4
    assert all(rows(run) == rows(whole) for run in runs)


@pytest.mark.slow
def test_locks_between_processes(tmp_path: Path):
    script = """
def held(path):
    try:
        with Run(path).locked():
            return False
    except UserError:
        return True

def owner():
    with Run(Path("run")).locked():
        child = subprocess.Popen(["sleep", "60"])
        Path("ready").write_text(str(child.pid))
        time.sleep(60)

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
"""
    drive(script, tmp_path)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Run(tmp_path / "run").locked():
        pass
    assert "run is on a file system without locks: let one process use it\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_came_while_the_data_was_read_is_spared(
    train: Train, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started = cli.started

    def overtaken(args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(cli, "started", started)
            assert train("--out", tmp_path / "run", "--seed", 7) == 0
        return started(args)  # type: ignore[arg-type]

    monkeypatch.setattr(cli, "started", overtaken)
    assert "already holds a run" in refused("train", texts, *TINY, "--out", tmp_path / "run")
    assert '"seed": 7' in (tmp_path / "run/config.json").read_text()
    assert len(rows(tmp_path / "run")) > 12


@pytest.mark.parametrize("how", ["pointed elsewhere", "begun anew", "gone"])
def test_a_directory_that_is_replaced_under_a_run(texts: Path, finished: Path, tmp_path: Path, how: str):
    before = contents(finished)
    (tmp_path / "first").mkdir()
    out = tmp_path / "latest"
    out.symlink_to("first") if how == "pointed elsewhere" else out.mkdir()

    def replace() -> None:
        out.unlink() if how == "pointed elsewhere" else shutil.rmtree(out)
        if how == "pointed elsewhere":
            out.symlink_to(finished)
        elif how == "begun anew":
            shutil.copytree(finished, out)

    with at_step(4, replace):
        said = refused("train", texts, *TINY, "--out", out)
    assert "was moved, replaced or emptied while this run was using it" in said
    assert contents(finished) == before
    if how == "begun anew":
        assert contents(out) == before


def test_unfinished_files_are_swept(train: Train, finished: Path, tmp_path: Path):
    victim, run = tmp_path / "victim", finished
    victim.write_text("keep me")
    whole = {path.name for path in run.iterdir()}
    (run / "checkpoint.safetensors.0123abcd.partial").write_bytes(b"half")
    (run / "routing.html.partial").symlink_to(victim)
    # `onepass show` may be writing it at this moment
    (run / "letter.routing.html.0123abcd.partial").write_bytes(b"half")
    others = run / "routing.html.partial.txt"
    others.write_text("of somebody else")
    assert train("--out", run, "--resume") == 0
    assert victim.read_text() == "keep me"
    others.unlink()
    assert {path.name for path in run.iterdir()} == whole | {"letter.routing.html.0123abcd.partial"}
    # a fresh start takes away all that is a run's
    assert train("--out", run, "--force") == 0
    assert {path.name for path in run.iterdir()} == whole
