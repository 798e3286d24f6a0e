"""Beyond the contract: what is missing is never touched, in place only where asked, order; scores of no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.ops.routing import definition
from onepass.ops.routing.op import gather, scatter_add, score


def _choice(batch: int, n: int, k: int, *routes: int) -> Tensor:
    return torch.rand(batch, *routes, n).argsort(-1)[..., :k].clone()


class TestMissing:
    """-1, and whatever else names no token."""

    @pytest.mark.parametrize("missing", [-1, -7, 6, 2**40])
    def test_gather_gives_zeros_and_no_gradient(self, device: str, missing: int) -> None:
        x = torch.full((2, 6, 5), torch.nan, device=device)
        x[0, 3], x[1, 0] = 1, 2
        x.requires_grad_()
        indices = torch.tensor([[3, missing], [missing, 0]], device=device)
        y = gather(x, indices)
        assert torch.equal(y[:, :, 0].cpu(), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        expected = torch.zeros(2, 6, 5)
        expected[0, 3] = expected[1, 0] = 1
        assert torch.equal(dx.cpu(), expected)

    @pytest.mark.parametrize("missing", [-1, -7, 6, 2**40])
    def test_scatter_add_leaves_every_other_token_as_it_is(self, device: str, missing: int) -> None:
        y = torch.randn(2, 6, 5, device=device, requires_grad=True)
        update, gates = torch.ones(2, 2, 5, device=device), torch.tensor([[2.0, torch.nan], [torch.inf, 3.0]])
        update[0, 1] = update[1, 0] = torch.nan
        update, gates = update.requires_grad_(), gates.to(device).requires_grad_()
        indices = torch.tensor([[3, missing], [missing, 0]], device=device)
        out = scatter_add(y, update, gates, indices)
        expected = y.detach().clone()
        expected[0, 3] += 2
        expected[1, 0] += 3
        assert torch.equal(out, expected)
        dy = torch.randn_like(y)
        d_y, du, dg = torch.autograd.grad(out, (y, update, gates), dy)
        assert torch.equal(d_y, dy)
        assert torch.equal(du[0, 0], 2 * dy[0, 3])
        assert torch.equal(du[1, 1], 3 * dy[1, 0])
        assert not du[0, 1].any()
        assert not du[1, 0].any()
        torch.testing.assert_close(
            dg, torch.stack([dy[0, 3].sum(), dy.new_zeros(()), dy.new_zeros(()), dy[1, 0].sum()]).view(2, 2)
        )


class TestInPlace:
    def test_it_writes_into_y_and_only_when_asked(self, device: str) -> None:
        y, update = torch.randn(2, 9, 8, device=device), torch.randn(2, 4, 8, device=device)
        gates, indices = torch.rand(2, 4, device=device), _choice(2, 9, 4).to(device)
        before = y.clone()
        out = scatter_add(y, update, gates, indices)
        assert torch.equal(y, before)
        again = scatter_add(y, update, gates, indices, inplace=True)
        assert again.data_ptr() == y.data_ptr()
        assert torch.equal(again, out)

    def test_gradients_are_those_of_the_definition(self, device: str) -> None:
        x, weight = torch.randn(2 * 9, 8, device=device), torch.randn(8, 8, device=device, requires_grad=True)
        update, gates = torch.randn(2, 4, 8, device=device, requires_grad=True), torch.rand(2, 4, device=device)
        gates, indices = gates.requires_grad_(), _choice(2, 9, 4).to(device)
        dy, wanted = torch.randn(18, 8, device=device), (weight, update, gates)
        ours = scatter_add(x @ weight, update, gates, indices, inplace=True)
        theirs = definition.scatter_add(x @ weight, update, gates, indices)
        torch.testing.assert_close(ours, theirs)
        grads = [torch.autograd.grad(out, wanted, dy) for out in (ours, theirs)]
        torch.testing.assert_close(*grads)

    def test_autograd_knows_of_the_write(self, device: str, recorded: bool) -> None:
        x = torch.randn(18, 8, device=device, requires_grad=True)
        y = x.exp()
        update, indices = torch.randn(2, 4, 8, device=device), _choice(2, 9, 4).to(device)
        with torch.set_grad_enabled(recorded):
            scatter_add(y, update, None, indices, inplace=True)
        # exp needs its own result for backward, which is overwritten
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            scatter_add(x, update, None, indices, inplace=True)

    def test_a_y_with_strides_is_left_alone(self, device: str) -> None:
        y, update = torch.randn(8, 18, device=device).t(), torch.randn(2, 4, 8, device=device)
        indices = _choice(2, 9, 4).to(device)
        out = scatter_add(y, update, None, indices, inplace=True)
        torch.testing.assert_close(out, definition.scatter_add(y, update, None, indices))


def test_routes_that_share_tokens_are_added_one_after_another(device: str) -> None:
    """In bf16 the order of additions shows in the result, and it is that of the routes."""
    y = torch.randn(2, 5, 16, device=device).bfloat16()
    update, gates = torch.randn(2, 3, 5, 16, device=device), torch.rand(2, 3, 5, device=device)
    indices = _choice(2, 5, 5, 3).to(device)
    expected = y.clone()
    for r in range(3):
        expected = scatter_add(expected, update[:, r], gates[:, r], indices[:, r])
    assert torch.equal(scatter_add(y, update, gates, indices), expected)


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
