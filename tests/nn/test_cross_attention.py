"""`RoutedCrossAttention`: its formula with full matrices, long memories, masks on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.attention_oracle import cross_attention
from onepass.nn import RoutedCrossAttention

DIM, CONTEXT = 12, 10


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layer(k_q: float = 5, k_kv: float = 7, **kwargs: Any) -> RoutedCrossAttention:
    torch.manual_seed(2)
    layer = RoutedCrossAttention(DIM, k_q, k_kv, heads=2, dim_head=6, dim_context=CONTEXT, **kwargs)
    nn.init.normal_(layer.null)
    nn.init.normal_(layer.heavy.norm_kv.weight)
    return layer.eval()


def _mask(n: int, seed: int) -> Tensor:
    """A row with holes, one with fewer real entries than k, one with none."""
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[1, 3:] = False
    mask[2] = False
    return mask


@pytest.mark.parametrize("masked", ["", "x", "context", "x context"])
def test_values_and_gradients(masked: str) -> None:
    layer = _layer().double()
    x, context = _tokens(3, 20, DIM).double(), _tokens(3, 33, CONTEXT, seed=2).double()
    mask = _mask(20, 3) if "x" in masked.split() else None
    context_mask = _mask(33, 4) if "context" in masked else None
    inputs = [x.requires_grad_(), context.requires_grad_(), *layer.parameters()]
    y, routing = layer(x, context, mask, context_mask, return_routing=True)
    expected = cross_attention(layer, x, context, routing)
    torch.testing.assert_close(y, expected)
    dy = _tokens(3, 20, DIM, seed=5).double()
    ours = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, inputs, dy, materialize_grads=True))


def test_memories_are_projected_only_when_chosen() -> None:
    """A long memory is read once: nothing as large as its projection is ever made."""
    layer, seen = _layer(4, 16), []
    layer.heavy.kv.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    layer.heavy.norm_kv.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    y = layer(_tokens(1, 8, DIM), _tokens(1, 100_000, CONTEXT))
    assert y.shape == (1, 8, DIM)
    assert seen == [(1, 16, CONTEXT)] * 2


class TestIsolation:
    def test_without_memories_a_chosen_token_gets_what_is_left_of_null(self) -> None:
        layer, x = _layer(), _tokens(3, 20, DIM)
        y, routing = layer(x, _tokens(3, 33, CONTEXT), None, _mask(33, 4), return_routing=True)
        gates = torch.zeros(20).scatter(0, routing.q.indices[2], routing.q.gates[2])
        torch.testing.assert_close(y[2], (1 - gates)[:, None] * layer.null)


class TestEdges:
    @pytest.mark.parametrize(("k_q", "k_kv"), [(0, 7), (5, 0), (0, 0)])
    def test_nothing_chosen(self, k_q: int, k_kv: int) -> None:
        layer, x = _layer(k_q, k_kv), _tokens(2, 20, DIM)
        y, routing = layer(x, _tokens(2, 33, CONTEXT), return_routing=True)
        gates = torch.zeros(2, 20).scatter(1, routing.q.indices, routing.q.gates)
        torch.testing.assert_close(y, (1 - gates)[..., None] * layer.null)
        y.sum().backward()

    def test_shares(self) -> None:
        _, routing = _layer(1 / 4, 1 / 3)(_tokens(2, 20, DIM), _tokens(2, 33, CONTEXT), return_routing=True)
        assert routing.q.indices.shape == (2, 5)
        assert routing.kv.indices.shape == (2, 11)

    @pytest.mark.parametrize("shape", [(2, 33, DIM), (3, 33, CONTEXT), (33, CONTEXT)])
    def test_contexts_that_do_not_fit(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"context must be \(2, m, 10\), got"):
            _layer()(torch.randn(2, 20, DIM), torch.randn(*shape))
