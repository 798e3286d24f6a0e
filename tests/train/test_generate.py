"""`onepass generate`: what it writes is what the full forward would, byte by byte; mistakes are one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onepass.__main__ import main
from onepass.train.generate import generate, load
from onepass.train.language import ByteModel

CAUSAL = ("--task", "causal", "--seq", "32")


@pytest.fixture
def run(train: Callable[..., int], tmp_path: Path) -> Path:
    assert train(*CAUSAL, "--out", tmp_path / "run") == 0
    return tmp_path / "run"


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
    steps = generate(model, torch.tensor([tokens]), temperature=0, generator=torch.Generator())
    for _, byte in zip(range(60), steps, strict=False):
        assert byte == int(_whole(model, tokens).argmax())
        tokens.append(byte)


def test_logits_of_steps_equal_the_full_forward(run: Path) -> None:
    model = load(run)[0].double()
    text = torch.randint(256, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ByteModel.forward(model, text)[0]
    for prompt in (1, 3, 6, 50):
        cache = model.new_cache(3)
        logits = [model.prefill(text[:, :prompt], cache)]
        logits += [model.step(text[:, i], cache) for i in range(prompt, 70)]
        torch.testing.assert_close(torch.stack(logits, 1), expected[:, prompt - 1 :], rtol=1e-6, atol=1e-6)
    assert cache.nbytes > 0


def test_draws_follow_the_seed_and_the_temperature(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    def text(*options: object) -> str:
        return written(capsys, run, "--prompt", "to", "--length", 40, *options)

    assert text("--seed", 1) == text("--seed", 1)
    assert text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    assert text().startswith("to")
    assert text().endswith("\n")


def test_draws_have_the_models_probabilities(run: Path) -> None:
    model, _ = load(run)
    likely = (_whole(model, list(b"to")) / 0.7).softmax(-1)
    first, draws = torch.zeros(256), 2000
    generator = torch.Generator().manual_seed(3)
    for _ in range(draws):
        first[next(generate(model, torch.tensor([list(b"to")]), temperature=0.7, generator=generator))] += 1
    # 256 counts of 2000 draws: five standard deviations hold for all
    assert ((first - draws * likely).abs() <= 5 * (draws * likely).sqrt() + 5).all()


def test_the_smallest_temperature_is_the_likeliest_byte(run: Path) -> None:
    model, _ = load(run)
    prompt = torch.tensor([list(b"to")])
    first = [
        next(generate(model, prompt, temperature=temperature, generator=torch.Generator().manual_seed(3)))
        for temperature in (0.0, 5e-324, 1e-308, 1e-30)
    ]
    assert len(set(first)) == 1


def test_length_and_stop(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    long = written(capsys, run, "--prompt", "to", "--length", 30, "--temperature", 0)
    inside = long[2:-1]
    stop = inside[4:6]
    cut = written(capsys, run, "--prompt", "to", "--length", 30, "--temperature", 0, "--stop", stop)
    assert cut == "to" + inside[: inside.index(stop) + len(stop)] + "\n"


def test_what_a_terminal_would_obey_is_escaped(
    capsys: pytest.CaptureFixture[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onepass.train.generate.generate", lambda *a, **k: iter("é\x1b[2J\n\t\xff".encode() + b"\xe9"))
    assert written(capsys, run, "--prompt", "é\x07") == "é\\x07é\\x1b[2J\n\tÿ\ufffd\n"


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
    checkpoint = run / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "cut off" in refused(capsys, run, "--prompt", "a")


def test_weights_that_are_no_numbers(run: Path) -> None:
    from onepass.core.errors import UserError

    model, _ = load(run)
    torch.nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(UserError, match="outputs are no numbers"):
        next(generate(model, torch.tensor([[1]]), temperature=1, generator=torch.Generator()))
