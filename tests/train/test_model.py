"""The models of `onepass train`: what they see, what learns, how they are routed, measured and asked to write."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onepass.__main__ import main
from onepass.train import data
from onepass.train.checkpoint import of_run
from onepass.train.loop import learning_rate
from onepass.train.model import new, parameter_groups
from train.tiny import command, config, printed, rows


def test_initial_weights_depend_on_the_seed_and_leave_torchs_random_state_alone():
    state = torch.get_rng_state()
    one, same, other = new(config()), new(config()), new(config(seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_decay_is_for_matrices_and_high_rates_for_what_no_block_holds():
    model = new(config())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1, 10.0)
    where = {names[id(p)]: (group["scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sorted(where) == sorted(names.values())
    kept_small = {name for name, (_, decay) in where.items() if decay == 0.1}
    assert {"head.weight", "blocks.0.attention.qkv.weight"} <= kept_small
    assert not [n for n in kept_small if "norm" in n or "bias" in n or "embedding" in n or "router" in n]
    outside = {name for name, (scale, _) in where.items() if scale == 10.0}
    assert {"embedding.weight", "head.weight", "head.bias"} <= outside
    assert not [name for name in outside if name.startswith("blocks.")]
    assert {scale for scale, _ in where.values()} == {1.0, 10.0}
    assert {group["scale"] for group in parameter_groups(model, 0.1)} == {1.0}


def test_schedule():
    run = config(steps=1000)
    rates = [learning_rate(run, step) for step in range(1000)]
    assert rates[0] == pytest.approx(run.lr / 100)
    assert rates[99] == rates[100] == run.lr
    assert max(rates) == run.lr
    assert rates[550] == pytest.approx(run.lr / 2)
    assert rates[-1] < run.lr * 1e-4
    assert all(math.isfinite(learning_rate(config(steps=steps), 0)) for steps in (1, 2, 9, 10))


def test_each_byte_is_asked_for_and_the_one_before_it_shown():
    text = np.arange(60, 160, dtype=np.uint8)
    batch = data.training_batch(text, 3, 10, None, 0, 0)
    assert batch.tokens.shape == batch.bytes.shape == batch.hidden.shape == (3, 10)
    assert (batch.tokens[:, 0] == data.MASK).all()
    assert (batch.tokens[:, 1:] == batch.bytes[:, :-1]).all()
    assert (batch.hidden == np.arange(10)).all()
    (measured,) = data.validation_batches(text, 16, 10, None, 4)
    assert (measured.tokens[:, 1:] == measured.bytes[:, :-1]).all()


def test_no_guess_depends_on_a_later_byte():
    model = new(config(task="causal", seq=48, window=8)).eval()
    tokens, asked = torch.randint(256, (1, 48)), torch.arange(48)[None]
    with torch.no_grad():
        logits = model(tokens, asked)[0]
        assert logits.shape == (1, 48, 256)
        for place in range(1, 48):
            other = tokens.clone()
            other[0, place:] = torch.randint(256, (48 - place,))
            assert torch.equal(model(other, asked)[0][:, :place], logits[:, :place])


@pytest.mark.parametrize("task", ["masked", "causal"])
def test_metrics_hold_what_the_loop_counts_of_the_routers(train: Callable[..., int], tmp_path: Path, task: str) -> None:
    assert train("--out", tmp_path / "run", "--task", task, "--model", "routed", "--steps", 2) == 0
    measured = [row for row in rows(tmp_path / "run") if "routed" in row]
    assert measured
    for row in measured:
        found = {name: value for name, value in row.items() if name.startswith("routing/")}
        shares = [value for name, value in found.items() if name.endswith("feed_forward.router/share")]
        assert sum(shares) / len(shares) == pytest.approx(row["routed"])
        # of two blocks, a token is chosen by both, by one or by none: |A| + |B| − |A ∩ B| = |A ∪ B|
        overlap = found["routing/blocks.1.feed_forward.router/overlap"]
        assert sum(shares) - overlap * shares[1] == pytest.approx(row["routed_once_at_least"])
        assert 0 <= found["routing/blocks.0.feed_forward.router/saturated"] < 1


def test_experts_are_balanced_once_a_step_and_counted(finished: Path) -> None:
    """Each step moves every bias by a thousandth or not at all; the metrics hold the loads."""
    biases = [v for n, v in load_file(finished / "checkpoint.safetensors").items() if n.endswith("expert_bias")]
    moves = torch.stack(biases) * 1000
    assert moves.shape == (2, 4)
    assert moves.any(1).all()
    assert torch.allclose(moves, moves.round().clamp(-12, 12), atol=1e-3)
    for row in (row for row in rows(finished) if "validation_bits_per_byte" in row):
        for name in ("routing/blocks.0.feed_forward", "routing/blocks.1.feed_forward"):
            assert 0 <= row[f"{name}/emptiest"] <= 1 <= row[f"{name}/fullest"] <= 4


def test_temperature_0_is_the_argmax_of_the_full_forward(causal: Path) -> None:
    model, tokens = of_run(causal)[1].double(), list(b"rou")
    for token in model.decoder(1, 63, temperature=0).stream(torch.tensor([tokens]), 60):
        with torch.no_grad():
            assert int(token) == int(model(torch.tensor([tokens]))[0][0, -1].argmax())
        tokens.append(int(token))


def test_draws_follow_the_seed_and_the_temperature(causal: Path) -> None:
    def text(*options: object) -> str:
        code, said, speed = command("generate", causal, "--prompt", "to", "--length", 12, *options)
        assert (code, speed.split()[-1]) == (0, "tokens/s")
        return said

    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    assert (text()[:2], text()[-1]) == ("to", "\n")
    assert text("--length", 30, "--temperature", 0).startswith(text("--temperature", 0)[:-1])


def test_what_a_terminal_would_obey_is_escaped(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é\x1b[2J\n\t\xff".encode() + b"\xe9"
    monkeypatch.setattr("onepass.nn.decoder.Decoder.stream", lambda *a: iter([torch.tensor([list(text)])]))
    assert printed("generate", causal, "--prompt", "é\x07") == "é\\x07é\\x1b[2J\n\tÿ\ufffd\n"
    with mock.patch.multiple(sys, stdout=None, stderr=None):  # as a daemon's
        assert main(["generate", str(causal), "--prompt", "é"]) == 0
    for error, code in ((KeyboardInterrupt(), 130), (ValueError("NaN"), 2)):
        monkeypatch.setattr("onepass.nn.decoder.Decoder.stream", lambda *a, why=error: (_ for _ in ()).throw(why))
        assert command("generate", causal, "--prompt", "é", "--length", 1)[:2] == (code, "é\n")
