"""The planted task in its short form: the router finds what nobody shows it, also from the worst start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from onepass.nn import Router
from research.ablate import planted, runner, tables
from research.ablate.__main__ import ARMS, main

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


def test_arms_of_a_seed_share_data_and_initial_weights() -> None:
    arms = {arm: planted.Task(arm, 3, SMALL, CPU, 64) for arm in ARMS["planted"]}
    batches = {arm: task.inputs(0)[0] for arm, task in arms.items()}
    weights = {arm: dict(task.model.named_parameters()) for arm, task in arms.items()}
    for arm in ("random", "oracle", "light"):
        assert torch.equal(batches["learned"], batches[arm])
        for name in ("layer.light.up.weight", "layer.heavy.down.weight"):
            assert torch.equal(weights["learned"][name], weights[arm][name])
    assert torch.equal(batches["learned"], batches["dense"])


def test_adverse_means_that_no_planted_token_is_chosen() -> None:
    task = planted.Task("learned", 0, dataclasses.replace(SMALL, start="adverse"), CPU)
    assert task.measure(False)["picked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("start", ["adverse", "random"])
def test_learned_routing_closes_four_fifths_of_the_gap(tmp_path: Path, start: str) -> None:
    """The promise of `python -m research.ablate planted`, on the command's own records."""
    arms = [word for arm in ("learned", "random", "oracle") for word in ("--arm", arm)]
    options = ["--size", "small", "--device", "cpu", "--start", start, "--seed", "0", *arms]
    assert main(["planted", *options, "--out", str(tmp_path)]) == 0
    records = tables.by_arm(tables.load(tmp_path))
    assert records["random"][0]["final"]["picked"] < 0.1
    assert records["learned"][0]["final"]["picked"] > 0.85
    assert tables.gap_closed(records)[0] >= tables.GAP


def test_without_exploring_an_adverse_start_is_never_left() -> None:
    """What the test above would see if the router's own gradient were all there is."""
    size = dataclasses.replace(SMALL, start="adverse", steps=150)
    task = planted.Task("learned", 0, size, CPU)
    for module in task.model.modules():
        if isinstance(module, Router):
            module.explore = 0.0
    assert runner.train(task, size.steps, size.rates())["final"]["picked"] < 0.05
