"""Files are written whole or not at all, and never through a link."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import onepass
from onepass.train.commands import files
from onepass.train.commands.errors import UserError
from train.tiny import power_cut


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside the directory that is written to."""
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("keep me")
    return tmp_path / "victim"


def test_two_writers_of_one_path_share_no_temporary(victim: Path):
    path = victim.parent / "run" / "page"
    texts = [letter * 200_000 for letter in "abcd"]

    def work(text: str) -> None:
        for _ in range(20):
            files.write(path, text)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(work, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert not path.exists() or path.read_text() in texts
    # a writer that met another one's file has raised
    assert [writer.result() for writer in writers] == [None] * 4
    assert [entry.name for entry in path.parent.iterdir()] == ["page"]


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_file(victim: Path):
    code = """
import sys
from pathlib import Path
from onepass.train.commands import files
path = Path(sys.argv[1])
print("ready", flush=True)
while True:
    files.write(path, b"a" * 300_000)
    files.write(path, b"b" * 300_000)
"""
    path = victim.parent / "run" / "page"
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while not path.exists():
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert path.read_bytes() in (b"a" * 300_000, b"b" * 300_000)
    left = {entry.name for entry in path.parent.iterdir()} - {"page"}
    assert all(files.partial_of(name) == "page" for name in left)


def test_a_crash_between_writing_and_renaming_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    files.write(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", power_cut)
        with pytest.raises(RuntimeError):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    files.write(path, "newer")
    assert path.read_bytes() == b"newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["link", "nowhere", "pipe", "folder"])
def test_what_is_no_regular_file_is_neither_extended_nor_cut(victim: Path, name: str):
    path = victim.parent / "run" / name
    target = {"link": victim, "nowhere": victim.parent / "absent"}
    if name in target:
        path.symlink_to(target[name])
    else:
        os.mkfifo(path) if name == "pipe" else path.mkdir()
    for change in (lambda: files.extend(path, b"more", 0), lambda: files.cut(path, 0)):
        with pytest.raises(UserError, match=f"can't write .*{name}"):
            change()
    assert victim.read_text() == "keep me"
    assert not (victim.parent / "absent").exists()


def test_a_file_that_something_else_wrote_to_is_not_extended(victim: Path):
    with pytest.raises(UserError, match="has 7 bytes instead of 3: something else wrote to it"):
        files.extend(victim, b"more", 3)
    files.extend(victim, b"!", 7)
    assert victim.read_text() == "keep me!"
    files.cut(victim, 4)
    assert victim.read_text() == "keep"


def test_there_is_one_writer():
    """Whatever the package leaves on a disk goes through `files.write`; streams (a run's metrics) through `extend`."""
    root = Path(onepass.__file__).parent
    others: list[str] = []
    for path in sorted(root.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or path.name == "files.py":
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            modes = [v.value for v in ast.walk(call) if isinstance(v, ast.Constant)] if name == "open" else []
            opens = any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes)
            method = isinstance(call.func, ast.Attribute) and name in {"write_text", "write_bytes"}
            if opens or method or name in {"mkstemp", "NamedTemporaryFile"}:
                others.append(f"{path.relative_to(root)}: {name}")
    # os.devnull: stdout of a process that has none, and of all but the first of several
    assert others == ["__main__.py: open", "train/parallel.py: open"]
