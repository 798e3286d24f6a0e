"""`stable=True` where the published formula is not sound; `compat/test_triton_transformer.py` has the others."""

from __future__ import annotations

import pytest
import torch

from onepass import layer_norm
from onepass.ops.norm.definition import layer_norm as reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e30])
def test_rows_of_any_magnitude(device: str, scale: float) -> None:
    """Squares of such rows leave fp32; the result does not depend on the scale at all."""
    x = torch.randn(4, 100)
    x = torch.cat([x, -x.abs()])
    expected = layer_norm(x, stable=True, eps=1e-3)
    torch.testing.assert_close(
        layer_norm((x * scale).to(device), stable=True, eps=1e-3).cpu(), expected, rtol=1e-4, atol=1e-4
    )
    big = (x * scale).to(device).requires_grad_()
    (dx,) = torch.autograd.grad(layer_norm(big, stable=True, eps=1e-3), big, torch.ones_like(big).cumsum(-1))
    small = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer_norm(small, stable=True, eps=1e-3), small, torch.ones_like(x).cumsum(-1))
    torch.testing.assert_close(dx.cpu() * scale, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_huge_fp16_activations(device: str) -> None:
    x = (torch.randn(6, 200).clamp(-1, 1) * 65000).half()
    y = layer_norm(x.to(device), stable=True)
    torch.testing.assert_close(y.cpu().double(), reference(x.double(), stable=True), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_maximum_of_almost_nothing(device: str) -> None:
    """Divided by its tiny positive maximum such a row would overflow."""
    x = -torch.rand(3, 50) * 100 - 1
    x[:, 7] = 1e-30
    y = layer_norm(x.to(device), stable=True)
    torch.testing.assert_close(y.cpu().double(), reference(x.double(), stable=True), rtol=1e-4, atol=1e-4)
