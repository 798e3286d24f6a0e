"""score beyond the contract: its scale, its isolation, only the work that is asked for."""

from __future__ import annotations

import pytest
import torch

from onepass.core.launch import INTERPRET
from onepass.ops.routing import reference
from onepass.ops.routing.op import score

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("dim", [16, 256])
@pytest.mark.parametrize("scale", [0.02, 1.0, 1e4])
def test_scores_have_unit_spread_at_every_width_and_scale(device: str, dim: int, scale: float) -> None:
    x = scale * torch.randn(1, 60 if INTERPRET else 2000, dim, device=device)
    weight = torch.randn(dim, device=device)
    # |v| of one draw varies by 1/√(2·dim) around √dim
    expected = float(weight.norm())
    assert score(x, weight).std().item() == pytest.approx(expected, rel=0.3 if INTERPRET else 0.1)


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


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_one_gradient_alone_is_that_of_both(device: str, wanted: str) -> None:
    x, weight = torch.randn(2, 7, 33, device=device), torch.randn(2, 33, device=device)
    ds = torch.randn(2, 2, 7, device=device)
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    both = dict(zip(("x", "weight"), torch.autograd.grad(score(a, b), (a, b), ds), strict=True))
    leaf = (x if wanted == "x" else weight).requires_grad_()
    (one,) = torch.autograd.grad(score(x, weight), leaf, ds)
    assert torch.equal(one, both[wanted])


@pytest.mark.parametrize("layout", ["transposed", "column step", "expanded", "offset"])
def test_any_strides(device: str, layout: str) -> None:
    x = {
        "transposed": torch.randn(9, 2, 24, device=device).transpose(0, 1),
        "column step": torch.randn(2, 9, 48, device=device)[..., ::2],
        "expanded": torch.randn(1, 9, 24, device=device).expand(2, 9, 24),
        "offset": torch.randn(2, 9, 27, device=device)[..., 3:],
    }[layout]
    weight = torch.randn(48, device=device)[::2].requires_grad_()
    s, expected = score(x, weight), score(x.contiguous(), weight)
    torch.testing.assert_close(s, expected)
    ds = torch.randn(9, 2, device=device).t()
    torch.testing.assert_close(torch.autograd.grad(s, weight, ds), torch.autograd.grad(expected, weight, ds))


def test_a_token_scores_the_same_wherever_it_stands(device: str) -> None:
    x, weight = torch.randn(3, 17, 40, device=device), torch.randn(2, 40, device=device)
    s, order = score(x, weight), torch.randperm(17)
    assert torch.equal(score(x[:, order.to(device)], weight), s[..., order.to(device)])
    assert torch.equal(score(x[1:2], weight), s[1:2])


def test_a_row_wider_than_a_tile(device: str) -> None:
    x, weight = torch.randn(1, 2, 9001, device=device), torch.randn(9001, device=device)
    torch.testing.assert_close(
        score(x, weight), reference.score(x.double(), weight.double()).float(), rtol=1e-4, atol=1e-5
    )
