"""score beyond the contract: its scale, its isolation, only the work that is asked for."""

from __future__ import annotations

import pytest
import torch

from onepass.ops.routing.op import score

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def test_a_token_of_zeros_scores_0_and_has_a_finite_gradient(device: str) -> None:
    x = torch.zeros(1, 3, 8, device=device, requires_grad=True)
    s = score(x, torch.randn(8, device=device))
    assert not s.any()
    (dx,) = torch.autograd.grad(s.sum(), x)
    assert dx.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("routes", [1, 3])
def test_a_token_without_a_gradient_of_its_score_adds_nothing(device: str, value: float, routes: int) -> None:
    x, weight = torch.randn(2, 6, 40, device=device), torch.randn(routes, 40, device=device, requires_grad=True)
    ds = torch.randn(2, routes, 6, device=device)
    ds[1, :, 2] = 0
    clean = x.clone().requires_grad_()
    expected = torch.autograd.grad(score(clean, weight), (clean, weight), ds)
    x[1, 2] = value
    grads = torch.autograd.grad(score(x.requires_grad_(), weight), (x, weight), ds)
    assert torch.equal(grads[1], expected[1])
    assert torch.equal(grads[0], expected[0])
    assert not grads[0][1, 2].any()
