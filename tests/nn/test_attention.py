"""`RoutedAttention` and `RoutedCrossAttention`: their formulas with full matrices, and parts that a user exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.layers import cross_attention, holes, routed_attention, tokens, watched
from onepass.nn import CausalRouter, RoutedAttention, RoutedCrossAttention, Router, RouterOutput

DIM, WINDOW, CONTEXT = 12, 8, 10
LINEAR = ("light.qkv", "light.out", "heavy.q", "heavy.kv", "heavy.out")


def _layer(k_q: float = 5, k_kv: float = 7, causal: bool = False, **kwargs: Any) -> RoutedAttention:
    torch.manual_seed(2)
    layer = RoutedAttention(DIM, k_q, k_kv, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs)
    for p in (layer.null, layer.heavy.norm_q.weight, layer.light.norm.weight):
        nn.init.normal_(p)
    # no training mode: routers get the gradient of the gates alone
    return layer.eval()


def _cross(k_q: float = 5, k_kv: float = 7, **kwargs: Any) -> RoutedCrossAttention:
    torch.manual_seed(2)
    layer = RoutedCrossAttention(DIM, k_q, k_kv, heads=2, dim_head=6, dim_context=CONTEXT, **kwargs)
    nn.init.normal_(layer.null)
    nn.init.normal_(layer.heavy.norm_kv.weight)
    return layer.eval()


def _agrees(layer: nn.Module, inputs: list[Tensor], masks: list[Tensor | None], oracle: Callable[..., Tensor]) -> None:
    """Outputs and all gradients, as one node and, where a hook looks on, as modules."""
    layer, inputs = layer.double(), [t.double().requires_grad_() for t in inputs]
    wanted, dy = [*inputs, *layer.parameters()], tokens(*inputs[0].shape, seed=5).double()
    for hooked in (False, True):
        ran = watched(layer) if hooked else []
        y, routing = layer(*inputs, *masks, return_routing=True)
        expected = oracle(layer, *inputs, routing)
        torch.testing.assert_close(y, expected)
        ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, wanted, dy, materialize_grads=True))
        assert ("router_q" in ran) == hooked


@pytest.mark.parametrize("n", [4 * WINDOW, 3 * WINDOW + 5, 3])
def test_values_and_gradients(causal: bool, masked: bool, n: int) -> None:
    mask = holes(n) if masked else None
    _agrees(_layer(causal=causal), [tokens(3, n, DIM)], [mask], lambda m, x, r: routed_attention(m, x, mask, r))


def test_other_numbers_of_light_heads() -> None:
    _agrees(_layer(light_heads=3), [tokens(2, 20, DIM)], [None], lambda m, x, r: routed_attention(m, x, None, r))


@pytest.mark.parametrize("masked", ["", "x", "context", "x context"])
def test_values_and_gradients_of_cross_attention(masked: str) -> None:
    mask = holes(20) if "x" in masked.split() else None
    context_mask = holes(34)[:, 1:] if "context" in masked else None
    _agrees(_cross(), [tokens(3, 20, DIM), tokens(3, 33, CONTEXT, seed=2)], [mask, context_mask], cross_attention)


def test_memories_are_projected_only_when_chosen() -> None:
    """A long memory is read once: nothing as large as its projection is ever made."""
    layer, seen = _cross(4, 16), []
    for part in (layer.heavy.kv, layer.heavy.norm_kv):
        part.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    assert layer(tokens(1, 8, DIM), tokens(1, 100_000, CONTEXT)).shape == (1, 8, DIM)
    assert seen == [(1, 16, CONTEXT)] * 2


@pytest.mark.parametrize("kind", ["plain", "causal", "cross"])
@pytest.mark.parametrize(("k_q", "k_kv"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_chosen(k_q: int, k_kv: int, kind: str) -> None:
    """Without queries it is local attention and ν; without keys a query gets less of ν and nothing for it."""
    x, of_cross = tokens(2, 20, DIM), kind == "cross"
    layer = _cross(1, 1) if of_cross else _layer(1, 1, causal=kind == "causal")
    layer.k_q, layer.k_kv = k_q, k_kv
    y, routing = layer(x, *[tokens(2, 33, CONTEXT)] * of_cross, return_routing=True)
    gates = torch.zeros(2, 21).scatter(1, routing.q.indices % 21, routing.q.gates)[:, :20]
    left = (1 - gates)[..., None] * layer.null  # what of ν is left where no key is seen
    torch.testing.assert_close(y, left if of_cross else layer.light(x) + left)
    y.sum().backward()


@pytest.mark.parametrize("name", LINEAR)
def test_a_bias_counts(name: str, causal: bool) -> None:
    """The node has none; a parameter or not."""
    x, layer = tokens(2, 20, DIM), _layer(causal=causal)
    before, linear = layer(x), layer.get_submodule(name)
    del linear.bias
    for put in (lambda b: linear.register_parameter("bias", nn.Parameter(b)), lambda b: setattr(linear, "bias", b)):
        put(torch.ones(linear.out_features))
        assert not torch.allclose(layer(x), before)
        del linear.bias


@pytest.mark.parametrize("kind", ["plain", "causal", "cross"])
def test_keys_that_a_router_did_not_find_are_not_seen(kind: str) -> None:
    class FirstToken(nn.Module):
        """Choose the first token and nothing else, however many are asked for."""

        def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
            indices = torch.full((len(x), k), -1)
            indices[:, 0] = 0
            return RouterOutput(indices, (indices >= 0).float(), torch.zeros(x.shape[:2]))

    inputs = [tokens(2, 4 * WINDOW, DIM), *[tokens(2, 30, CONTEXT, seed=2)] * (kind == "cross")]
    few, many = (
        (_cross(4, k, router_kv=FirstToken()) if kind == "cross" else
         _layer(k_kv=k, causal=kind == "causal", router_kv=FirstToken()))(*inputs)
        for k in (4 if kind == "causal" else 1, 30)
    )  # fmt: skip
    torch.testing.assert_close(many, few)


def test_causal_attention_takes_other_routers_by_the_past() -> None:
    layer = _layer(causal=True, router_q=CausalRouter(DIM, block=4, memory=8), router_kv=CausalRouter(DIM, block=4))
    assert layer(tokens(2, 20, DIM)).isfinite().all()
    with pytest.raises(ValueError, match="with causal, router_q must be as CausalRouter"):
        _layer(causal=True, router_q=Router(DIM))
