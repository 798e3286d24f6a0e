"""triton-transformer's `layernorm` against torch's, with and without CogView's division."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.compat.triton_transformer import layernorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _published(x: Tensor, gamma: Tensor, eps: float, stable: bool) -> Tensor:
    if stable:
        x = x / x.amax(-1, keepdim=True)
    return F.layer_norm(x, (x.shape[-1],), gamma, torch.zeros_like(gamma), eps)


def test_the_originals_arguments() -> None:
    assert str(inspect.signature(layernorm)).replace("'", "") == (
        "(x: Tensor, gamma: Tensor, eps: float = 1e-05, use_triton: bool = False, stable: bool = False) -> Tensor"
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("use_triton", [False, True])
def test_values_and_gradients(device: str, eps: float, stable: bool, use_triton: bool) -> None:
    x, gamma = torch.randn(4, 7, 48).double(), torch.randn(48).double()
    dy = torch.randn(4, 7, 48).double()
    exact = [t.clone().requires_grad_() for t in (x, gamma)]
    expected = _published(*exact, eps, stable)
    ours = [t.float().to(device).requires_grad_() for t in (x, gamma)]
    y = layernorm(*ours, eps, use_triton, stable)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-4, atol=1e-4)
    got = torch.autograd.grad(y, ours, dy.float().to(device))
    for a, e in zip(got, torch.autograd.grad(expected, exact, dy), strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-4, atol=1e-4)


def test_rows_that_the_original_turns_upside_down() -> None:
    x, gamma = -torch.rand(3, 20) - 1, torch.ones(20)
    assert (layernorm(x, gamma, stable=True) * _published(x, gamma, 1e-5, True) <= 1e-6).all(), "the original's sign"
    torch.testing.assert_close(layernorm(x, gamma, stable=True), layernorm(x, gamma), rtol=1e-2, atol=1e-2)
    assert _published(torch.zeros(1, 20), gamma, 1e-5, True).isnan().all()
    assert not layernorm(torch.zeros(1, 20), gamma, stable=True).any()
