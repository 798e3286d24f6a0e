"""The names of others over our operators: cs336, lion-pytorch, triton-transformer."""

from __future__ import annotations

import copy
import inspect

import lion_pytorch
import pytest
import torch
import torch.nn.functional as F
from lion_pytorch.lion_pytorch import update_fn as their_update_fn
from torch import Tensor, nn

import onepass
from onepass.compat.cs336 import WeightedSumFunc
from onepass.compat.lion_pytorch import Lion, update_fn
from onepass.compat.triton_transformer import layernorm


def test_the_exercises_function_is_weighted_sum_of_one_vector() -> None:
    x, w = torch.randn(2, 3, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    y, expected = WeightedSumFunc.apply(x, w), onepass.weighted_sum(x, w)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    assert all(map(torch.equal, *(torch.autograd.grad(out, (x, w), dy) for out in (y, expected))))
    with pytest.raises(ValueError, match=r"weight must be a vector \(D,\), got \(2, 7\)"):
        WeightedSumFunc.apply(torch.randn(5, 7), torch.randn(2, 7))


def test_trajectory(use_triton: bool, decoupled: bool) -> None:
    """Decoupled, the rate given stays the peak: under a scheduler, after the original's checkpoint, in a copy."""
    a = torch.randn(5, dtype=torch.float64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    theirs = lion_pytorch.Lion([a], 1e-2, (0.8, 0.95), 0.3, decoupled_weight_decay=decoupled)
    ours = Lion([b], 1e-2, (0.8, 0.95), 0.3, use_triton, decoupled)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9) for o in (theirs, ours)]
    for i in range(8):
        if i == 4:
            ours.load_state_dict(theirs.state_dict())
        a.grad = torch.randn(5, dtype=torch.float64)
        b.grad = a.grad.clone()
        theirs.step()
        ours.step()
        for scheduler in schedulers:
            scheduler.step()
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-13)
    twin = copy.deepcopy(ours)
    twin.add_param_group({"params": [torch.ones(2, requires_grad=True)], "lr": 0.5})
    assert [group.get("peak_lr") for group in twin.param_groups] == [1e-2 if decoupled else None] * 2


@pytest.mark.parametrize(
    "p", [torch.randn(5), torch.randn(70, 30), torch.randn(()), nn.Parameter(torch.randn(4, 6).t())]
)
def test_update_fn_in_place(p: Tensor) -> None:
    """Of a parameter too, and of memory that is laid out otherwise than its gradient's."""
    g, m = torch.randn(p.shape), torch.randn(p.shape)
    q, n = p.detach().clone(), m.clone()
    update_fn(p, g, m, 1e-2, 0.1, 0.9, 0.99)
    their_update_fn(q, g, n, 1e-2, 0.1, 0.9, 0.99)
    torch.testing.assert_close((p.detach(), m), (q, n), rtol=0, atol=1e-6)


def test_16_bit_parameters_keep_no_extra_state() -> None:
    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Lion([p], lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert list(optimizer.state[p]) == ["exp_avg"]


def test_its_variants_are_named_with_what_to_use_instead() -> None:
    for name, instead in (("foreach", "Lion, which"), ("cautious_lion", "onepass.optim.Lion with cautious")):
        with pytest.raises(ImportError, match=f"no {name}: use {instead}"):
            exec(f"from onepass.compat.lion_pytorch import {name}")


def _published(x: Tensor, gamma: Tensor, eps: float, stable: bool) -> Tensor:
    if stable:
        x = x / x.amax(-1, keepdim=True)
    return F.layer_norm(x, (x.shape[-1],), gamma, torch.zeros_like(gamma), eps)


def test_the_originals_arguments() -> None:
    assert str(inspect.signature(layernorm)).replace("'", "") == (
        "(x: Tensor, gamma: Tensor, eps: float = 1e-05, use_triton: bool = False, stable: bool = False) -> Tensor"
    )


def test_layernorm_is_layer_norm(use_triton: bool) -> None:
    x, gamma = torch.randn(4, 7, 48, requires_grad=True), torch.randn(48, requires_grad=True)
    for stable in (False, True):
        y, expected = layernorm(x, gamma, 0.1, use_triton, stable), onepass.layer_norm(x, gamma, eps=0.1, stable=stable)
        assert torch.equal(y, expected)
        torch.testing.assert_close(y, _published(x, gamma, 0.1, stable), rtol=1e-4, atol=1e-4)
        assert all(map(torch.equal, *(torch.autograd.grad(out.sum(), (x, gamma)) for out in (y, expected))))


def test_rows_that_the_original_turns_upside_down() -> None:
    x, gamma = -torch.rand(3, 20) - 1, torch.ones(20)
    assert (layernorm(x, gamma, stable=True) * _published(x, gamma, 1e-5, True) <= 1e-6).all(), "the original's sign"
    torch.testing.assert_close(layernorm(x, gamma, stable=True), layernorm(x, gamma), rtol=1e-2, atol=1e-2)
    assert _published(torch.zeros(1, 20), gamma, 1e-5, True).isnan().all()
    assert not layernorm(torch.zeros(1, 20), gamma, stable=True).any()
