"""What lies in padding, NaN and infinity included, changes no bit of what real tokens get, give and teach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.nn import LocalAttention, RoutedAttention, RoutedBlock, RoutedCrossAttention, RoutedFeedForward
from onepass.nn.causal import CausalRouter

DIM, WINDOW, N = 16, 4, 22

LAYERS: dict[str, Callable[[bool], nn.Module]] = {
    "local": lambda causal: LocalAttention(DIM, heads=2, dim_head=8, window=WINDOW, causal=causal),
    "attention": lambda causal: RoutedAttention(DIM, 5, 7, heads=2, dim_head=8, window=WINDOW, causal=causal),
    "feed forward": lambda causal: RoutedFeedForward(
        DIM, 5, router=CausalRouter(DIM, block=WINDOW, memory=8) if causal else None
    ),
    "block": lambda causal: RoutedBlock(DIM, 5, heads=2, dim_head=8, window=WINDOW, causal=causal),
}


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mask(n: int = N) -> Tensor:
    """Holes, a padded end, nothing real."""
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[1] = torch.arange(n) < 9
    mask[2] = False
    return mask


def _found(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
    """Output and gradient of the real tokens, gradients of all parameters; padding has an upstream gradient as well."""
    x = x.clone().requires_grad_()
    y = run(x)
    dx, *rest = torch.autograd.grad(y, [x, *layer.parameters()], _random(*y.shape, seed=4), allow_unused=True)
    return [y.detach()[mask], dx[mask], *(g for g in rest if g is not None)]


def _compare(layer: nn.Module, run: Callable[[Tensor], Tensor], mask: Tensor, value: float) -> None:
    x = _random(3, N, DIM, seed=1)
    expected = _found(run, layer, x.masked_fill(~mask[..., None], 0), mask)
    actual = _found(run, layer, x.masked_fill(~mask[..., None], value), mask)
    assert len(actual) > 2
    assert all(t.isfinite().all() for t in expected)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_cross_attention(value: float) -> None:
    layer, mask = RoutedCrossAttention(DIM, 5, 7, heads=2, dim_head=8), _mask()
    for of_context in (False, True):
        other = _random(3, N, DIM, seed=2)

        def run(x: Tensor, of_context: bool = of_context, other: Tensor = other) -> Any:
            return layer(other, x, context_mask=mask) if of_context else layer(x, other, mask)

        _compare(layer, run, mask, value)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_gets_what_zeros_get(causal: bool) -> None:
    """In attention also what padded tokens get is finite, so that a loss which multiplies it by 0 is one."""
    layer, mask, x = LAYERS["attention"](causal), _mask(), _random(3, N, DIM, seed=1)
    padded = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    y = layer(padded, mask)
    assert torch.equal(y, layer(x.masked_fill(~mask[..., None], 0), mask))
    (dx,) = torch.autograd.grad(y.square().sum(), padded)
    assert not dx[~mask].any()


@pytest.mark.parametrize("name", LAYERS)
def test_masks_are_checked(name: str) -> None:
    layer, x = LAYERS[name](False), torch.randn(2, 6, DIM)
    for mask, error, match in (
        (torch.ones(2, 6), TypeError, "mask must be bool"),
        (torch.ones(2, 5).bool(), ValueError, r"mask must be \(batch, n\) = \(2, 6\), got \(2, 5\)"),
        (torch.ones(2, 6, device="meta").bool(), ValueError, "mask is on meta but x is on cpu"),
    ):
        with pytest.raises(error, match=match):
            layer(x, mask)
