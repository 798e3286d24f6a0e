"""`Routed` and `RoutedFeedForward`: the sum of the two branches, at every edge, in every mode of PyTorch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.nn import Routed, RoutedFeedForward, Router, RouterOutput

DIM = 16


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _definition(layer: Routed, x: Tensor, routing: RouterOutput) -> Tensor:
    """One token at a time."""
    y = layer.light(x)
    rows = []
    for b in range(len(x)):
        indices, gates = routing.indices[b].reshape(-1), routing.gates[b].reshape(-1)
        for i in range(x.shape[1]):
            total = y[b, i]
            for j in (indices == i).nonzero()[:, 0]:
                total = total + gates[j] * layer.heavy(x[b : b + 1, i : i + 1])[0, 0]
            rows.append(total)
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("routes", [1, 3])
@pytest.mark.parametrize("kind", ["feed-forward", "any modules"])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_definition(routes: int, kind: str, masked: bool) -> None:
    router = Router(DIM, routes, explore=0)
    layer: Routed = (
        RoutedFeedForward(DIM, 4, router=router)
        if kind == "feed-forward"
        else Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid()), nn.Linear(DIM, DIM), router, 4)
    )
    layer = layer.double()
    x = _tokens(3, 11, DIM).double().requires_grad_()
    mask = None
    if masked:
        mask = torch.ones(3, 11, dtype=torch.bool)
        mask[0, 2:] = False  # fewer than k
        mask[1] = False  # none at all
    y, routing = layer(x, mask, return_routing=True)
    # a module of the user's sees padding as it is, a feed-forward sees zeros
    read = x if mask is None or kind == "any modules" else x * mask[..., None]
    expected = _definition(layer, read, routing)
    torch.testing.assert_close(y, expected)
    dy = _tokens(3, 11, DIM, seed=2).double()
    wanted = [x, *layer.parameters()]
    ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted, dy))


class TestLightOutputIsNotTouched:
    """The heavy output is added in place where that is safe, and only there."""

    def test_a_light_branch_that_returns_its_input(self) -> None:
        x = _tokens(2, 9, DIM)
        before = x.clone()
        y = Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), 3)(x)
        assert torch.equal(x, before)
        assert not torch.equal(y, before)

    def test_a_light_branch_that_keeps_its_output_for_backward(self) -> None:
        layer = Routed(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), nn.Linear(DIM, DIM), Router(DIM), 3)
        layer(_tokens(2, 9, DIM)).sum().backward()

    def test_a_light_branch_that_returns_a_buffer_of_its_own(self) -> None:
        class Constant(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("value", torch.zeros(2, 9, DIM))

            def forward(self, x: Tensor) -> Tensor:
                return self.value  # type: ignore[return-value]

        layer = Routed(Constant(), nn.Linear(DIM, DIM), Router(DIM), 3)
        layer(_tokens(2, 9, DIM))
        assert not layer.light.value.any()  # type: ignore[union-attr, operator]


class TestK:
    @pytest.mark.parametrize(
        ("k", "n", "chosen"),
        [
            (3, 10, 3),
            (30, 10, 10),
            (0.25, 10, 2),
            (0.26, 10, 3),
            (0.24, 10, 2),
            (0.01, 10, 1),
            (1.0, 10, 10),
            (1, 10, 1),
            (0, 10, 0),
            (0.5, 0, 0),
            (4, 0, 0),
        ],
    )
    def test_an_int_or_a_share_of_n(self, k: float, n: int, chosen: int) -> None:
        layer = RoutedFeedForward(DIM, k)
        y, routing = layer(torch.randn(2, n, DIM), return_routing=True)
        assert y.shape == (2, n, DIM)
        assert routing.indices.shape == (2, chosen)

    def test_none_chosen_is_the_light_branch(self) -> None:
        layer = RoutedFeedForward(DIM, 0)
        x = _tokens(2, 9, DIM)
        assert torch.equal(layer(x), layer.light(x))
        layer(x).sum().backward()

    @pytest.mark.parametrize(
        ("k", "error"), [(-1, ValueError), (0.0, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError)]
    )
    def test_other_values_are_refused(self, k: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="RoutedFeedForward: k must be an int"):
            RoutedFeedForward(DIM, k)


class TestMask:
    @staticmethod
    def _light_alone(layer: RoutedFeedForward, x: Tensor, mask: Tensor, where: Tensor) -> None:
        """Y at `where` is the light output of zeros, and the heavy branch's weights play no part in it, to the bit."""
        y = layer(x, mask)
        torch.testing.assert_close(y[where], layer.light(torch.zeros_like(x[where])))
        other = copy.deepcopy(layer)
        for p in other.heavy.parameters():
            nn.init.normal_(p)
        z = other(x, mask)
        assert torch.equal(z[where], y[where])
        assert not torch.equal(z, y)

    def test_masked_tokens_get_the_light_output_alone(self) -> None:
        mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(3)) < 0.6
        self._light_alone(RoutedFeedForward(DIM, 4), _tokens(2, 12, DIM), mask, ~mask)

    def test_a_fully_masked_row_is_the_light_branch(self) -> None:
        layer, x = RoutedFeedForward(DIM, 4), _tokens(2, 12, DIM)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[1] = False
        self._light_alone(layer, x, mask, ~mask)
        layer(x, mask).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


class TestRouterArgument:
    def test_any_module_with_the_call_signature(self) -> None:
        class First(nn.Module):
            """The first k tokens."""

            def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
                indices = torch.arange(k).expand(len(x), k)
                return RouterOutput(indices, torch.ones(len(x), k), torch.zeros(x.shape[:2]))

        layer, x = RoutedFeedForward(DIM, 4, router=First()), _tokens(2, 9, DIM)
        y = layer(x)
        light = layer.light(x)
        torch.testing.assert_close(y[:, :4], light[:, :4] + layer.heavy(x[:, :4]))
        torch.testing.assert_close(y[:, 4:], light[:, 4:])

    def test_hidden_widths(self) -> None:
        layer = RoutedFeedForward(DIM, 4, light_mult=0.25, heavy_mult=3, bias=False)
        shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
        assert shapes["light.up.weight"] == (4, DIM)
        assert shapes["heavy.up.weight"] == (48, DIM)
        assert not any(n.endswith("bias") for n in shapes)


class TestErrors:
    def test_a_branch_that_changes_the_shape(self) -> None:
        wide, same = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        with pytest.raises(ValueError, match=r"light branch must keep the shape \(2, 9, 16\), got \(2, 9, 32\)"):
            Routed(wide, same, Router(DIM), 3)(_tokens(2, 9, DIM))
        with pytest.raises(ValueError, match=r"heavy branch must keep the shape \(2, 3, 16\), got \(2, 3, 32\)"):
            Routed(same, wide, Router(DIM), 3)(_tokens(2, 9, DIM))

    def test_tokens_without_a_batch(self) -> None:
        with pytest.raises(ValueError, match=r"x must be \(batch, n, dim\), got \(9, 16\)"):
            RoutedFeedForward(DIM, 3)(_tokens(9, DIM))

    def test_what_is_no_tensor(self) -> None:
        for layer in (RoutedFeedForward(DIM, 3), Routed(nn.Identity(), nn.Linear(DIM, DIM), Router(DIM), 3)):
            with pytest.raises(TypeError, match=f"{type(layer).__name__}: x must be a tensor, got list"):
                layer([[0.0]])

    @pytest.mark.parametrize(
        ("mult", "error", "match"),
        [
            (0.01, ValueError, r"light_mult = 0\.01 of dim 16 leaves a hidden width of 0\.16; it must be"),
            (math.nan, ValueError, "light_mult = nan of dim 16 leaves a hidden width of nan"),
            (math.inf, ValueError, "light_mult = inf of dim 16 leaves a hidden width of inf"),
            ("2", TypeError, "light_mult must be a number, got str"),
        ],
    )
    def test_hidden_widths_that_are_none(self, mult: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=f"RoutedFeedForward: {match}"):
            RoutedFeedForward(DIM, 3, light_mult=mult)
