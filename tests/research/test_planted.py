"""The planted task in its short form: the router finds what nobody shows it, also from the worst start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from research import planted

SMALL = planted.SIZES["small"]
CPU = torch.device("cpu")


def test_the_mark_is_in_no_single_feature() -> None:
    data = planted.Data(SMALL, 0, CPU)
    batch = data.batch()
    features = batch.x @ data.features.T
    both = (features > 0).all(-1)
    assert torch.equal(both, batch.planted)
    assert (batch.planted.sum(1) == SMALL.k).all()
    # of the tokens with one of them positive most are filler
    for feature in range(2):
        assert batch.planted[features[..., feature] > 0].float().mean() < 0.25


@pytest.mark.slow
def test_learned_routing_closes_four_fifths_of_the_gap(tmp_path: Path) -> None:
    """The promise of `python -m research.planted`, on the command's own records, from the worst start."""
    arms = [word for arm in ("learned", "random", "oracle") for word in ("--arm", arm)]
    options = ["--size", "small", "--device", "cpu", "--start", "adverse", "--seed", "0", *arms, "--out", str(tmp_path)]
    assert planted.main(options) == 0
    final = {arm: json.loads((tmp_path / f"planted-adverse.{arm}.0.json").read_text())["final"] for arm in arms[1::2]}
    assert final["random"]["picked"] < 0.1
    assert final["learned"]["picked"] > 0.85
    gap = final["random"]["loss"] - final["oracle"]["loss"]
    assert final["random"]["loss"] - final["learned"]["loss"] >= 0.8 * gap


def test_the_default_router_finds_the_planted_tokens() -> None:
    found = planted.train(planted.Task("learned", 1, dataclasses.replace(SMALL, steps=150), CPU))
    assert found["first"]["picked"] < SMALL.k / SMALL.n
    assert found["final"]["picked"] > 6 * SMALL.k / SMALL.n


def test_without_exploring_an_adverse_start_is_never_left() -> None:
    task = planted.Task("learned", 0, dataclasses.replace(SMALL, start="adverse", steps=150), CPU)
    task.layer.router.explore = 0.0
    assert planted.train(task)["final"]["picked"] < 0.05
