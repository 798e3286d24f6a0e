"""A small text to learn from, a run of it that is over, and what must not depend on the machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from train.tiny import TINY, quick, write_texts


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def _train(texts: Path, *options: object) -> int:
    """`onepass train` on the small texts, one thread, options as given."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return main(["train", str(texts), *TINY, *map(str, options)])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def train(texts: Path) -> Callable[..., int]:
    return lambda *options: _train(texts, *options)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, with the options of `train`; who changes it takes `finished`, a copy."""
    folder = tmp_path_factory.mktemp("whole")
    with quick():
        assert _train(write_texts(folder / "texts"), "--out", folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="session")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model's run that is over; who changes it copies it."""
    folder = tmp_path_factory.mktemp("causal")
    (folder / "text.txt").write_text("route the heavy token, or the light byte " * 60)
    with quick():
        assert _train(folder / "text.txt", "--task", "causal", "--threads", 1, "--out", folder / "run") == 0
    return folder / "run"


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "finished"))
