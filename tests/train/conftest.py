"""A small text to learn from and a run small enough to be trained in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from onepass.train import machine
from train.tiny import TINY

WORDS = ["route", "token", "heavy", "light", "byte", "k", "norm", "=", "(x)", "é", "\n", "mask\n"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory of 24 different texts."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(24):
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(120)]
        where = folder / "deep" if number % 3 == 0 else folder
        (where / f"{number}.txt").write_text(f"{number} " + " ".join(words))
    return folder


@pytest.fixture
def train(texts: Path) -> Iterator[Callable[..., int]]:
    """`onepass train` on the small texts, one thread, options as given."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def command(*options: object) -> int:
        return main(["train", str(texts), *TINY, *map(str, options)])

    yield command
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said must not depend on what else the machine does."""
    monkeypatch.setattr(machine, "idle_cores", lambda: 64.0)
