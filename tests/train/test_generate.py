"""`onepass generate`: what it writes is what the full forward would, byte by byte; mistakes are one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from onepass.train.generate import load
from onepass.train.language import ByteModel
from train.tiny import TINY

CAUSAL = ("--task", "causal", "--seq", "32")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal run that is over; who damages it copies it."""
    folder = tmp_path_factory.mktemp("causal")
    (folder / "text.txt").write_text("route the heavy token, or the light byte " * 60)
    options = [*TINY, *CAUSAL, "--threads", "1", "--out", str(folder / "run")]
    assert main(["train", str(folder / "text.txt"), *options]) == 0
    return folder / "run"


def written(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    try:
        code = main(["generate", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    return said.err


def _whole(model: ByteModel, tokens: list[int]) -> torch.Tensor:
    """Logits of the next byte by the full forward of all tokens."""
    with torch.no_grad():
        return ByteModel.forward(model, torch.tensor([tokens]))[0][0, -1]


def test_temperature_0_is_the_argmax_of_the_full_forward(run: Path) -> None:
    model, seen = load(run)
    assert seen == 32
    model = model.double()
    tokens = list(b"rou")
    for written in model.decoder(1, 63, temperature=0).stream(torch.tensor([tokens]), 60):
        assert int(written) == int(_whole(model, tokens).argmax())
        tokens.append(int(written))


def test_logits_of_steps_equal_the_full_forward(run: Path) -> None:
    model = load(run)[0].double()
    text = torch.randint(256, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ByteModel.forward(model, text)[0].double()
    decoder = model.decoder(3, 70)
    for prompt in (1, 3, 6, 50):
        logits = [decoder.prefill(text[:, :prompt]).clone()]
        logits += [decoder.step(text[:, i]).clone() for i in range(prompt, 70)]
        torch.testing.assert_close(torch.stack(logits, 1).double(), expected[:, prompt - 1 :], rtol=1e-6, atol=1e-6)


def test_draws_follow_the_seed_and_the_temperature(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    def text(*options: object) -> str:
        return written(capsys, run, "--prompt", "to", "--length", 40, *options)

    assert text("--seed", 1) == text("--seed", 1)
    assert text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    assert text().startswith("to")
    assert text().endswith("\n")


def test_length_and_stop(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    long = written(capsys, run, "--prompt", "to", "--length", 30, "--temperature", 0)
    inside = long[2:-1]
    stop = inside[4:6]
    cut = written(capsys, run, "--prompt", "to", "--length", 30, "--temperature", 0, "--stop", stop)
    assert cut == "to" + inside[: inside.index(stop) + len(stop)] + "\n"


def test_what_a_terminal_would_obey_is_escaped(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "é\x1b[2J\n\t\xff".encode() + b"\xe9"
    monkeypatch.setattr("onepass.nn.decoder.Decoder.stream", lambda *a: iter([torch.tensor([list(text)])]))
    assert written(capsys, run, "--prompt", "é\x07") == "é\\x07é\\x1b[2J\n\tÿ\ufffd\n"


def test_what_stderr_says(capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing; where a text ends because the caches are full; on a terminal, how fast it was."""
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "to", "--length", "9"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("onepass.train.generate.MOST", 8)
    assert main(["generate", str(run), "--prompt", "to", "--length", "9", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    assert said.err == "note: a text ends at 8 bytes, where its caches are full\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["generate", str(run), "--prompt", "to", "--length", "5"]) == 0
    assert re.fullmatch(r"5 bytes in \d+\.\d\d s, [\d,]+ a second\n", capsys.readouterr().err)


def test_a_longer_text_than_the_model_has_seen_is_noted(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "to", "--length", "31"]) == 0
    said = capsys.readouterr()
    assert said.err == "note: what follows byte 32 is longer than any text the model has seen\n"
    assert main(["generate", str(run), "--prompt", "to", "--length", "30"]) == 0
    assert capsys.readouterr().err == ""


def test_mistakes(capsys: pytest.CaptureFixture[str], run: Path, train: Callable[..., int], tmp_path: Path) -> None:
    assert "--prompt is empty" in refused(capsys, run, "--prompt", "")
    assert "--prompt has 33 bytes, more than the 32 that" in refused(capsys, run, "--prompt", "a" * 33)
    assert "--stop is empty" in refused(capsys, run, "--prompt", "a", "--stop", "")
    assert "the following arguments are required: --prompt" in refused(capsys, run)
    assert "--temperature: must be from 0 to 100" in refused(capsys, run, "--prompt", "a", "--temperature", -1)
    assert "--length: must be from 1" in refused(capsys, run, "--prompt", "a", "--length", 0)
    assert "there is no run with a checkpoint in nowhere" in refused(capsys, "nowhere", "--prompt", "a")
    if not torch.cuda.is_available():
        assert "sees no CUDA device" in refused(capsys, run, "--prompt", "a", "--device", "cuda")
    assert train("--out", tmp_path / "masked") == 0
    assert "guesses hidden bytes; generate needs one of --task causal" in refused(
        capsys, tmp_path / "masked", "--prompt", "a"
    )
    assert train(*CAUSAL, "--route", "none", "--out", tmp_path / "none") == 0
    assert "has --route none; generate needs --route learned" in refused(capsys, tmp_path / "none", "--prompt", "a")
    checkpoint = shutil.copytree(run, tmp_path / "cut") / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "cut off" in refused(capsys, checkpoint.parent, "--prompt", "a")


def test_weights_that_are_no_numbers(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    model, _ = load(run)
    torch.nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        model.decoder(1, 10).generate(torch.tensor([[1]]), 2)
