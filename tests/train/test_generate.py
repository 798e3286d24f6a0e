"""`onepass generate`: what it writes is what the full forward would, byte by byte; mistakes are one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from onepass.train.checkpoint import of_run
from onepass.train.language import ByteModel
from train.tiny import TINY, printed, quick, refused

CAUSAL = ("--task", "causal", "--seq", "32")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal run that is over; who damages it copies it."""
    folder = tmp_path_factory.mktemp("causal")
    (folder / "text.txt").write_text("route the heavy token, or the light byte " * 60)
    with quick():
        printed("train", folder / "text.txt", *TINY, *CAUSAL, "--threads", "1", "--out", folder / "run")
    return folder / "run"


def _whole(model: ByteModel, tokens: list[int]) -> torch.Tensor:
    """Logits of the next byte by the full forward of all tokens."""
    with torch.no_grad():
        return ByteModel.forward(model, torch.tensor([tokens]))[0][0, -1]


def test_temperature_0_is_the_argmax_of_the_full_forward(run: Path) -> None:
    model = of_run(run)[1].double()
    tokens = list(b"rou")
    for token in model.decoder(1, 63, temperature=0).stream(torch.tensor([tokens]), 60):
        assert int(token) == int(_whole(model, tokens).argmax())
        tokens.append(int(token))


def test_draws_follow_the_seed_and_the_temperature(run: Path) -> None:
    def text(*options: object) -> str:
        return printed("generate", run, "--prompt", "to", "--length", 12, *options)

    assert text("--seed", 1) == text("--seed", 1)
    assert text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    assert text().startswith("to")
    assert text().endswith("\n")
    assert text("--length", 30, "--temperature", 0).startswith(text("--temperature", 0)[:-1])


def test_what_a_terminal_would_obey_is_escaped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é\x1b[2J\n\t\xff".encode() + b"\xe9"
    monkeypatch.setattr("onepass.nn.decoder.Decoder.stream", lambda *a: iter([torch.tensor([list(text)])]))
    assert printed("generate", run, "--prompt", "é\x07") == "é\\x07é\\x1b[2J\n\tÿ\ufffd\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--prompt", ""], "--prompt is empty"),
        (["run", "--prompt", "a" * 33], "--prompt has 33 bytes, more than the 32 that"),
        (["run"], "the following arguments are required: --prompt"),
        (["run", "--prompt", "a", "--temperature", "-1"], "--temperature: must be from 0 to 100"),
        (["run", "--prompt", "a", "--length", "0"], "--length: must be from 1"),
        (["nowhere", "--prompt", "a"], "there is no run with a checkpoint in nowhere"),
        (["cut", "--prompt", "a"], "cut off"),
        (["masked", "--prompt", "a"], "guesses hidden bytes; generate needs one of --task causal"),
        pytest.param(
            ["run", "--prompt", "a", "--device", "cuda"], "sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_mistakes(
    run: Path, finished: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(run.parent)
    folder = finished.parent / arguments[0]
    if arguments[0] == "cut":
        shutil.copytree(run, folder)
        (folder / "checkpoint.safetensors").write_bytes((run / "checkpoint.safetensors").read_bytes()[:1000])
    else:
        folder = {"masked": finished, "run": run}.get(arguments[0], Path("nowhere"))
    assert said in refused("generate", folder, *arguments[1:])
