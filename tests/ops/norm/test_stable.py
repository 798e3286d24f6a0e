"""`stable=True`: the published formula where it is sound, a sound one where it is not, and the gradient of m."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import INTERPRET
from onepass import layer_norm
from onepass.ops.norm.reference import layer_norm as reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _grads(norm, *tensors: Tensor, dy: Tensor, eps: float) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return list(torch.autograd.grad(norm(*leaves, stable=True, eps=eps), leaves, dy.to(leaves[0])))


@pytest.mark.parametrize("device", DEVICES)
def test_is_the_published_formula_where_the_maximum_is_positive(device: str) -> None:
    x = torch.randn(10, 64, device=device) * 100
    w, b = (torch.randn(64, device=device) for _ in range(2))
    published = F.layer_norm(x / x.amax(-1, keepdim=True), (64,), w, b, 0.1)
    torch.testing.assert_close(layer_norm(x, w, b, eps=0.1, stable=True), published, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_keeps_the_sign_of_negative_rows(device: str) -> None:
    x = -torch.rand(5, 30, device=device) - 1
    y = layer_norm(x, stable=True)
    torch.testing.assert_close(y, F.layer_norm(x, (30,)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_gradient_with_ties(device: str, eps: float) -> None:
    """The term of m is O(eps): at eps = 0.1 nothing hides it. Ties share it evenly, as torch's amax does."""
    rows = [
        [3.0, 1.0, 3.0, -2.0, 3.0, 0.5],  # three attain max > 0
        [-1.0, -4.0, -2.0, -4.0, -3.0, -1.5],  # max < 0: two attain −min
        [0.0, -2.0, -1.0, -2.0, 0.0, -0.5],  # max = 0
        [-5.0, 2.0, 1.0, 0.0, -7.0, 1.0],  # max > 0 though −min is larger
        [0.0] * 6,
    ]
    x = torch.tensor(rows, dtype=torch.float64)
    w, b, dy = torch.randn(6).double(), torch.randn(6).double(), torch.randn(5, 6).double()
    expected = _grads(reference, x, w, b, dy=dy, eps=eps)
    got = _grads(layer_norm, *(t.float().to(device) for t in (x, w, b)), dy=dy, eps=eps)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=1e-4, atol=1e-4)
    without = _grads(lambda *t, stable, eps: F.layer_norm(t[0], (6,), *t[1:], eps), x, w, b, dy=dy, eps=eps)[0]
    if eps == 0.1:
        assert (expected[0][:4] - without[:4]).abs().amax(1).min() > 1e-3, "the test must see the term"


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


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_zeros(device: str) -> None:
    x = torch.zeros(2, 16, device=device, requires_grad=True)
    b = torch.randn(16, device=device)
    y = layer_norm(x, None, b, stable=True, eps=0.25)
    assert torch.equal(y, b.expand(2, 16))
    dy = torch.randn(2, 16, device=device)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, 2 * (dy - dy.mean(-1, keepdim=True)), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRET, reason="float64 never reaches a kernel")
def test_gradcheck_away_from_ties() -> None:
    x = torch.randn(5, 12, dtype=torch.float64)
    x[1] = -x[1].abs() - 0.1
    w, b = (torch.randn(12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t, stable=True, eps=0.1), (x.requires_grad_(), w, b))
