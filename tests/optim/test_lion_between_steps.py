"""What may change between two steps is seen by the next one: memory, objects, gradients, groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from onepass.optim import Lion

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1,), (300,), (), (8, 6), (5, 5)]

Change = Callable[[Lion, list[Tensor]], None]


def moved_parameters(optimizer: Lion, params: list[Tensor]) -> None:
    for p in params:
        p.data = p.data.clone()


def turned_parameter(optimizer: Lion, params: list[Tensor]) -> None:
    params[3].data = params[3].data.t().contiguous().t()


def turned_parameter_in_place(optimizer: Lion, params: list[Tensor]) -> None:
    params[4].data = params[4].data.t()


def narrow_parameter(optimizer: Lion, params: list[Tensor]) -> None:
    params[1].data = params[1].data.bfloat16()


def moved_gradients(optimizer: Lion, params: list[Tensor]) -> None:
    for p in params:
        assert p.grad is not None
        p.grad = p.grad.clone()


def moved_gradient_memory(optimizer: Lion, params: list[Tensor]) -> None:
    assert params[1].grad is not None
    params[1].grad.data = params[1].grad.data.clone()


def transposed_gradient(optimizer: Lion, params: list[Tensor]) -> None:
    assert params[3].grad is not None
    params[3].grad = params[3].grad.t().contiguous().t()


def replaced_states(optimizer: Lion, params: list[Tensor]) -> None:
    for p in params:
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()


def negated_single_state(optimizer: Lion, params: list[Tensor]) -> None:
    optimizer.state[params[0]]["exp_avg"] = -optimizer.state[params[0]]["exp_avg"]


def missing_gradient(optimizer: Lion, params: list[Tensor]) -> None:
    params[1].grad = None


def new_rate(optimizer: Lion, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def new_options(optimizer: Lion, params: list[Tensor]) -> None:
    optimizer.param_groups[0]["cautious_weight_decay"] = True


def dropped_parameter(optimizer: Lion, params: list[Tensor]) -> None:
    del optimizer.param_groups[0]["params"][2]


CHANGES: list[Change] = [
    moved_parameters, turned_parameter, turned_parameter_in_place, narrow_parameter, moved_gradients,
    moved_gradient_memory, transposed_gradient, replaced_states,
    negated_single_state, missing_gradient, new_rate, new_options, dropped_parameter,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_seen(change: Change, device: str) -> None:
    """The same change before an optimizer's third step and before the first one of another with its state."""
    start = [torch.randn(s, device=device) for s in SHAPES]
    params = [p.clone().requires_grad_() for p in start]
    optimizer = Lion(params, lr=0.01, weight_decay=0.1)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.step()

    others = [p.detach().clone().requires_grad_() for p in params]
    fresh = Lion(others, lr=0.01, weight_decay=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()

    old = [p.data for p in params]
    before = [t.clone() for t in old]
    for o, ps in ((optimizer, params), (fresh, others)):
        change(o, ps)
        o.step()
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        if "exp_avg" in optimizer.state[p]:
            assert torch.equal(optimizer.state[p]["exp_avg"], fresh.state[q]["exp_avg"])
    if change is moved_parameters:
        assert all(map(torch.equal, old, before)), "memory that is no parameter's any more was written to"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(
    ("old", "new", "on"),
    [(False, 0.0, True), (0.0, False, False), (1.0, True, True), (True, 1.0, False), (1, True, True),
     (False, np.True_, True)],
)  # fmt: skip
def test_equal_options_of_two_types(
    old: bool | float, new: bool | float, on: bool, foreach: bool | None, device: str
) -> None:
    """cautious=False and 1.0 are off, True and 0.0 are on, and Python finds False equal to 0.0."""
    found = []
    for first in (old, new):
        p = torch.zeros(4, device=device, requires_grad=True)
        optimizer = Lion([p], lr=0.1, cautious=old, foreach=foreach)
        p.grad = torch.ones_like(p)
        optimizer.step()
        if first is new:
            # another optimizer with this state, whose first step has the new option
            state, optimizer = optimizer.state_dict(), Lion([p], lr=0.1, cautious=new, foreach=foreach)
            optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.param_groups[0]["cautious"] = new
        p.grad = torch.tensor([-0.001, 1.0, -0.001, 1.0], device=device)
        optimizer.step()
        found.append(p.detach())
    assert torch.equal(*found)
    # where half of the updates disagree with the gradient, they are dropped
    assert bool(found[0][0] != found[0][1]) == on


@pytest.mark.parametrize("device", DEVICES)
def test_an_equal_single_element_is_another_parameter(device: str) -> None:
    """Lists of parameters are compared in C, where two different tensors of one equal element pass for the same."""
    p, q = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))
    optimizer = Lion([p, torch.ones(3, device=device, requires_grad=True)], lr=0.25)
    for t in (p, q):
        t.grad = torch.ones_like(t)
    optimizer.step()
    q.data.copy_(p)
    optimizer.param_groups[0]["params"][0] = q
    optimizer.step()
    assert p.item() == 0.75
    assert q.item() == 0.5
