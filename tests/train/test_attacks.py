"""Whatever bytes a run's files, texts and command lines hold: refused in one line with exit code 2, or right."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepass.train import checkpoint, sources
from train.tiny import at_step, command, contents, quick

OPTIONS = ("--dim", "16", "--blocks", "1", "--seq", "16", "--batch", "2", "--device", "cpu")
RESUME = ("train", "texts", "--resume", "--out", "run")
FILES = ("config.json", "data.json", "metrics.jsonl", "checkpoint.safetensors")
PICTURES = ("loss.png", "routing.html")
FEW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=12)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `call` goes is left again."""
    torch.set_num_threads(1)
    monkeypatch.chdir(Path.cwd())


def call(*arguments: str, where: Path, codes: tuple[int, ...] = (0, 2)) -> int:
    os.chdir(where)
    code, _, refusal = command(*arguments)
    assert code in codes, (code, refusal)
    return code


def weights(run: Path) -> dict[str, bytes]:
    found = safetensors.torch.load((run / "checkpoint.safetensors").read_bytes())
    return {name: t.numpy().tobytes() for name, t in found.items()}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A run that stands at step 4 of 6, as after a kill, and the weights that it ends with."""
    home, saved, save = tmp_path_factory.mktemp("attacked"), {}, checkpoint.save
    (home / "texts").mkdir()
    for i in range(4):
        (home / "texts" / f"{i}.txt").write_text(" ".join(f"{i} route {j * i} heavy" for j in range(20)))

    def keep(path: Path, *rest: Any, **named: Any) -> None:
        save(path, *rest, **named)
        saved[named["step"]] = path.read_bytes()

    before = os.getcwd()
    options = ("--steps", "6", "--checkpoint-every", "4", "--out", "run")
    with mock.patch.object(checkpoint, "save", keep), quick():
        assert call("train", "texts", *OPTIONS, *options, where=home) == 0
    os.chdir(before)
    end = weights(home / "run")
    (home / "run" / "checkpoint.safetensors").write_bytes(saved[4])
    for name in PICTURES:
        (home / "run" / name).unlink()
    return home, end


@pytest.fixture
def home(unfinished: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    """Where `fresh` puts copies of the unfinished run."""
    return tmp_path / "home"


def fresh(home: Path, run: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(run, home)


@FEW
@given(
    name=st.sampled_from(FILES),
    at=st.integers(0, 300) | st.integers(0, 100_000),
    lost=st.sampled_from((0, 1, 1, 8, 10**9)),
    put=st.binary(max_size=9) | st.sampled_from((b"}", b'"', b",", b"9", b"-", b"\n", b"null", b"1e999", b"[" * 9999)),
    show=st.booleans(),
)
def test_a_damaged_run_is_refused_whole_or_ends_with_the_right_weights(
    unfinished: tuple[Path, dict[str, bytes]], home: Path, name: str, at: int, lost: int, put: bytes, show: bool
) -> None:
    fresh(home, unfinished[0])
    victim = home / "run" / name
    content = victim.read_bytes()
    at %= len(content) + 1
    victim.write_bytes(content[:at] + put + content[at + lost :])
    before = contents(home)
    if show:
        call("show", "run", "texts/1.txt", "--out", "pictures", where=home)
        assert before.items() <= contents(home).items()
    elif call(*RESUME, where=home) == 2:
        assert contents(home) == before
    else:
        assert weights(home / "run") == unfinished[1]


@settings(FEW, max_examples=24)
@given(
    name=st.sampled_from((*FILES, *PICTURES, ".lock")), partial=st.booleans(), dangling=st.booleans(),
    command=st.sampled_from(("resume", "force", "show")), running=st.booleans(),
)  # fmt: skip
def test_the_target_of_a_planted_link_stays_as_it_was(
    unfinished: tuple[Path, dict[str, bytes]], home: Path, name: str, partial: bool, dangling: bool, command: str,
    running: bool,
) -> None:  # fmt: skip
    """Planted before the command starts, or while it trains."""
    fresh(home, unfinished[0])
    victim = home.parent / "victim"
    victim.unlink(missing_ok=True)
    link = home / "run" / (("1.txt." if command == "show" else "") + name + (".partial" if partial else ""))
    content = link.read_bytes() if link.exists() else b"keep me"
    if not dangling:
        victim.write_bytes(content)

    def plant() -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(victim)

    again = ("train", "texts", *OPTIONS, "--steps", "2", "--force", "--out", "run")
    steps = {"resume": 5, "force": 1} if running else {}
    with at_step(steps[command], plant) if command in steps else contextlib.nullcontext(plant()):
        call(*{"resume": RESUME, "show": ("show", "run", "texts/1.txt"), "force": again}[command], where=home)
    assert not victim.exists() if dangling else victim.read_bytes() == content


WORDS = (
    "", " ", "-", "--", "-1", "0", "2", "1e999", "nan", "-inf", "0x10", "１２", "9" * 20, "missing", "in", "in/a.txt",
    "run", "/", "/proc/self/mem", "/dev/null", "/root/x", "é\n", "\x1b[31mred", "x" * 300, "bf16", "cuda", "%s", "{}",
)  # fmt: skip
# of each command: its options, and what keeps a vector that is accepted from working for hours (the last one counts)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "--out --preset --task --device --steps --seed --batch --seq --dim --blocks --lr --checkpoint-every "
        "--resume --force",
        "--preset cpu --dim 8 --seq 8 --batch 1 --blocks 1 --device cpu --steps 1",
    ),
    "show": ("--out --bytes", ""),
    "generate": ("--prompt --length --temperature --seed --device", "--length 1"),
    "doctor": ("--help", "--bogus"),
    "?": ("--help", ""),
}


@settings(FEW, max_examples=60)
@given(data=st.data())
def test_command_lines(home: Path, data: st.DataObject) -> None:
    shutil.rmtree(home, ignore_errors=True)
    (home / "in").mkdir(parents=True)
    for name in ("a.txt", "b.py", "c.py"):
        (home / "in" / name).write_text(f"{name} the quick brown fox jumps over the lazy dog\n" * 9)
    name = data.draw(st.sampled_from(tuple(COMMANDS)))
    options, short = COMMANDS[name]
    letters = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
    word = st.sampled_from(WORDS) | st.text(letters, max_size=8)
    arguments = data.draw(st.lists(word | st.sampled_from(options.split()), max_size=6))
    # after "--" options are paths: nothing would keep the command short
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    arguments = [name, *arguments[:cut], *short.split(), *arguments[cut:]]
    # without a path a run reads all of the standard library
    with mock.patch.object(sources, "standard_library", return_value=home / "in"):
        call(*arguments, where=home, codes=(0, 1, 2) if name == "doctor" else (0, 2))
