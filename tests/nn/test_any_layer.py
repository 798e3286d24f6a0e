"""Routed layers of drawn sizes: padding, other rows of the batch and later tokens change no bit of a result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nn.layers import first, holes, tokens, watched
from onepass.nn import (
    LocalAttention,
    RoutedAttention,
    RoutedBlock,
    RoutedCrossAttention,
    RoutedFeedForward,
    TransformerBlock,
)
from onepass.nn.causal import CausalRouter

DIM = 16


@st.composite
def layers(draw: st.DrawFn, n: int, causal: bool) -> nn.Module:
    share = st.integers(1, n + 2) | st.sampled_from((0.1, 0.25, 1.0))
    k, k_kv, window = draw(share), draw(share), draw(st.sampled_from((1, 4, 8)))
    heads = {"heads": 2, "dim_head": 8, "window": window, "causal": causal}
    torch.manual_seed(draw(st.integers(0, 2**31)))
    match draw(st.sampled_from(("local", "attention", "feed forward", "block", "transformer"))):
        case "local":
            layer: nn.Module = LocalAttention(DIM, **heads)
        case "attention":
            layer = RoutedAttention(DIM, k, k_kv, **heads)
        case "transformer":
            layer = TransformerBlock(DIM, **heads | {"window": draw(st.sampled_from((None, window)))})
        case "block":
            layer = RoutedBlock(DIM, k, k_kv=k_kv, **heads)
        case _:
            router = CausalRouter(DIM, block=window, memory=2 * window) if causal else None
            layer = RoutedFeedForward(DIM, k, router=router)
    if draw(st.booleans()):
        watched(layer)
    return layer.train(draw(st.booleans()))


def results(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor | None]:
    """Of real tokens; padding has an upstream gradient as well."""
    x = x.detach().requires_grad_()
    y = run(x)
    up = torch.cos(torch.arange(float(y.numel()))).view(y.shape)
    dx, *rest = torch.autograd.grad(y, [x, *layer.parameters()], up, allow_unused=True)
    return [y.detach()[mask], dx[mask], *rest]


def assert_padding_reaches_nothing(
    run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, mask: Tensor, value: float
) -> None:
    plain, filled = (results(run, layer, x.masked_fill(~mask[..., None], fill), mask) for fill in (0.0, value))
    for a, b in zip(filled, plain, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a, b) and b.isfinite().all())


@settings(max_examples=60)
@given(data=st.data())
def test_nothing_reaches_what_it_must_not(data: st.DataObject) -> None:
    n, batch, causal = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), data.draw(st.booleans())
    layer = data.draw(layers(n, causal))
    x, other = torch.randn(batch, n, DIM), 10 * torch.randn(batch, n, DIM)
    mask = torch.rand(batch, n) < data.draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    value = data.draw(st.sampled_from((math.nan, math.inf, -math.inf, 1e30)))
    assert_padding_reaches_nothing(lambda x: layer(x, mask), layer, x, mask, value)
    filled = x.masked_fill(~mask[..., None], value)
    y = layer(filled, mask).detach()
    again = layer(torch.cat((filled[:1], other[1:])), mask).detach()
    assert torch.equal(again[0][mask[0]], y[0][mask[0]]), "another row of the batch reaches this one"
    if causal:
        at = data.draw(st.integers(0, n - 1))
        missing = torch.full_like(other, data.draw(st.sampled_from((math.nan, math.inf))))
        for later in (other, missing):
            with torch.set_grad_enabled(data.draw(st.booleans())):
                ahead = layer(torch.cat((filled[:, :at], later[:, at:]), 1), mask).detach()
            assert torch.equal(ahead[:, :at][mask[:, :at]], y[:, :at][mask[:, :at]]), f"token {at} reaches earlier ones"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padding_of_cross_attention(value: float) -> None:
    layer, x, other, mask = RoutedCrossAttention(DIM, 5, 7, heads=2, dim_head=8), *(tokens(2, 3, 22, DIM)), holes(22)
    assert_padding_reaches_nothing(lambda x: layer(x, other, mask), layer, x, mask, value)
    assert_padding_reaches_nothing(lambda x: layer(other, x, context_mask=mask), layer, x, mask, value)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_gets_what_zeros_get(causal: bool) -> None:
    """In attention also what padded tokens get is finite, so that a loss which multiplies it by 0 is one."""
    layer = RoutedAttention(DIM, 5, 7, heads=2, dim_head=8, window=4, causal=causal)
    mask, x = first(22, 22, 9, 0), tokens(3, 22, DIM)
    padded = x.masked_fill(~mask[..., None], torch.nan).requires_grad_()
    y = layer(padded, mask)
    assert torch.equal(y, layer(x.masked_fill(~mask[..., None], 0), mask))
    (dx,) = torch.autograd.grad(y.square().sum(), padded)
    assert not dx[~mask].any()
