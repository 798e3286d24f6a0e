"""`onepass train --task causal`: a language model that is one, with everything a run has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from onepass.__main__ import main
from onepass.train import data, loop
from onepass.train.config import Config, build, from_json
from onepass.train.model import RoutedLanguageModel, new
from onepass.train.trace import trace
from train.test_resume import same
from train.tiny import rows

Train = Callable[..., int]


def config(**values: object) -> Config:
    small = {
        "task": "causal",
        "route": "learned",
        "seed": 0,
        "dim": 16,
        "blocks": 2,
        "seq": 48,
        "window": 8,
        "batch": 4,
    }
    rest = {"window": 8, "steps": 100, "device": "cpu", "precision": "fp32", "threads": 1, "data": "", "paths": ()}
    return build("cpu", **{**small, **rest, **values})


def test_each_byte_is_asked_for_and_the_one_before_it_shown():
    text = np.arange(60, 160, dtype=np.uint8)
    batch = data.training_batch(text, 3, 10, None, 0, 0)
    assert batch.tokens.shape == batch.bytes.shape == batch.hidden.shape == (3, 10)
    assert (batch.tokens[:, 0] == data.MASK).all()
    assert (batch.tokens[:, 1:] == batch.bytes[:, :-1]).all()
    assert (batch.hidden == np.arange(10)).all()
    (measured,) = data.validation_batches(text, 16, 10, None, 4)
    assert (measured.tokens[:, 1:] == measured.bytes[:, :-1]).all()


@pytest.mark.parametrize("route", ["learned", "random", "none"])
def test_no_guess_depends_on_a_later_byte(route: str):
    model = new(config(route=route)).eval()
    assert isinstance(model, RoutedLanguageModel)
    tokens = torch.randint(256, (1, 48))
    asked = torch.arange(48)[None]
    with torch.no_grad():
        logits = model(tokens, asked, draw=3).logits
        assert logits.shape == (1, 48, 256)
        for place in range(1, 48):
            other = tokens.clone()
            other[0, place:] = torch.randint(256, (48 - place,))
            assert torch.equal(model(other, asked, draw=3).logits[:, :place], logits[:, :place])


def test_every_parameter_in_use_gets_a_gradient():
    for route in ("learned", "random", "none"):
        model = new(config(route=route))
        model(torch.randint(257, (3, 48)), torch.arange(48).expand(3, -1)).logits.square().mean().backward()
        silent = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        # nothing is routed to: neither what attends nor what an unrouted token gets in its place
        assert [name for name in silent if route != "none" or "null" not in name] == []


@pytest.mark.slow
@pytest.mark.parametrize("route", ["learned", "random"])
def test_resuming_changes_nothing(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str):
    options = ("--task", "causal", "--route", route, "--checkpoint-every", 3)
    assert train("--out", tmp_path / "whole", *options) == 0
    step = loop.Training._one_step

    def power_cut(self: loop.Training) -> torch.Tensor:
        if self.step == 8:
            raise RuntimeError("power cut")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "_one_step", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            train("--out", tmp_path / "parts", *options)
    assert train("--out", tmp_path / "parts", "--resume") == 0
    same(tmp_path / "whole", tmp_path / "parts")
    assert rows(tmp_path / "whole")[-1]["routed"] > 0


def test_show_and_pictures(train: Train, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train("--task", "causal", "--steps", 2, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run"), str(texts / "1.txt")]) == 0
    assert "guessed right from those before" in capsys.readouterr().out
    page = (tmp_path / "run" / "1.txt.routing.html").read_text()
    assert "hidden" not in page[page.index("</style>") :]


def test_trace_guesses_every_byte():
    traced = trace(new(config()).eval(), config(), "text", bytes(range(65, 100)) * 4, 100)
    assert not traced.hidden.any()
    assert (traced.guess >= 0).all()
    assert (traced.chance > 0).all()
    assert traced.routed.any()


def test_runs_from_before_there_was_a_choice_are_masked():
    values = json.loads(config(task="masked").to_json())
    del values["task"], values["window"]
    assert from_json(json.dumps(values), "").task == "masked"
