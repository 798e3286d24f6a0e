from __future__ import annotations

import math

import pytest
import torch

from onepass.train.config import Config, build
from onepass.train.loop import learning_rate
from onepass.train.model import RandomRouter, new, parameter_groups


def config(**values: object) -> Config:
    small = {"route": "learned", "seed": 0, "dim": 16, "blocks": 2, "seq": 32, "batch": 4, "steps": 100}
    rest = {"device": "cpu", "precision": "fp32", "threads": 1, "data": "", "paths": ()}
    return build("cpu", **{**small, **rest, **values})


@pytest.mark.parametrize("route", ["learned", "random", "none"])
def test_shapes(route: str):
    model = new(config(route=route))
    guess = model(torch.randint(257, (3, 40)), torch.randint(40, (3, 6)))
    assert guess.logits.shape == (3, 6, 256)
    assert guess.logits.dtype == torch.float32
    assert [chosen.shape for chosen in guess.chosen] == ([] if route == "none" else [(3, 5)] * 2)


def test_learned_routing_is_learned():
    model = new(config())
    guess = model(torch.randint(257, (3, 40)), torch.randint(40, (3, 6)))
    guess.logits.square().mean().backward()
    routers = {name: parameter for name, parameter in model.named_parameters() if "router" in name}
    assert len(routers) == 2
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in routers.values())


def test_every_parameter_gets_a_gradient():
    model = new(config())
    model(torch.randint(257, (3, 40)), torch.randint(40, (3, 6))).logits.square().mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_no_route_means_no_heavy_branch():
    light, learned, random = (
        sum(parameter.numel() for parameter in new(config(route=route)).parameters())
        for route in ("none", "learned", "random")
    )
    assert light < random < learned
    assert learned - random == 2 * 16


def test_a_sequence_does_not_see_its_neighbours():
    model = new(config())
    tokens, asked = torch.randint(257, (2, 40)), torch.randint(40, (2, 6))
    other = tokens.clone()
    other[1] = 7
    with torch.no_grad():
        assert torch.equal(model(tokens, asked).logits[0], model(other, asked).logits[0])


def test_positions_are_told_apart():
    # without positions, moving a distant byte would change nothing but the order of a sum
    model = new(config())
    tokens = torch.full((1, 40), 65)
    tokens[0, 30] = 90
    moved = torch.full((1, 40), 65)
    moved[0, 35] = 90
    asked = torch.tensor([[0]])
    with torch.no_grad():
        assert (model(tokens, asked).logits - model(moved, asked).logits).abs().max() > 1e-4


def test_initial_weights_depend_on_the_seed_and_leave_torchs_random_state_alone():
    state = torch.get_rng_state()
    one, same, other = new(config()), new(config()), new(config(seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.head.weight, same.head.weight)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_random_router():
    router, x = RandomRouter(3), torch.zeros(4, 20, 8)
    router.draw = 5
    first = router(x, 6)
    router.draw = 6
    second = router(x, 6)
    router.draw = 5
    again = router(x, 6)
    assert torch.equal(first.indices, again.indices)
    assert not torch.equal(first.indices, second.indices)
    assert all(len(set(row)) == 6 for row in first.indices.tolist())
    assert (first.gates == 1).all()


def test_a_part_of_a_batch_has_the_random_routes_of_the_batch():
    router, x = RandomRouter(3), torch.zeros(5, 20, 8)
    whole = router(x, 6).indices
    parts = []
    for first, last in ((0, 0), (0, 2), (2, 5)):
        router.rows = first, 5
        parts.append(router(x[first:last], 6).indices)
    assert torch.equal(torch.cat(parts), whole)


def test_random_router_leaves_masked_tokens_alone():
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 3:] = False
    out = RandomRouter(0)(torch.zeros(2, 20, 8), 5, mask)
    assert sorted(out.indices[1].tolist()) == [-1, -1, 0, 1, 2]
    assert out.gates[1].sum() == 3


def test_random_router_is_uniform():
    router = RandomRouter(0)
    counts = torch.zeros(16)
    for draw in range(500):
        router.draw = draw
        counts += torch.bincount(router(torch.zeros(4, 16, 1), 4).indices.flatten(), minlength=16)
    assert counts / counts.sum() == pytest.approx(1 / 16, rel=0.12)


def test_decay_is_for_matrices_and_high_rates_for_what_no_block_holds():
    model = new(config())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1, 10.0)
    where = {names[id(p)]: (group["scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sorted(where) == sorted(names.values())
    kept_small = {name for name, (_, decay) in where.items() if decay == 0.1}
    assert kept_small
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
