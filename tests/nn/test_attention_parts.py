"""Parts of `RoutedAttention` that a user watches or exchanges: what replaces them takes part, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.nn import CausalRouter, RoutedAttention, RoutedBlock, RoutedCrossAttention, Router, RouterOutput

DIM, WINDOW = 12, 8
LINEAR = ("light.qkv", "light.out", "heavy.q", "heavy.kv", "heavy.out")


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layer(k_q: int = 5, k_kv: int = 7, causal: bool = False, **kwargs: Any) -> RoutedAttention:
    torch.manual_seed(2)
    return RoutedAttention(DIM, k_q, k_kv, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs).eval()


@pytest.mark.parametrize("causal", [False, True])
def test_hooks_of_all_parts_run(causal: bool) -> None:
    block = RoutedBlock(DIM, 4, heads=2, dim_head=6, window=WINDOW, causal=causal)
    expected, called = block(_tokens(2, 20, DIM)), set()
    for name, part in block.named_modules():
        part.register_forward_hook(lambda *_, name=name: called.add(name))
    torch.testing.assert_close(block(_tokens(2, 20, DIM)), expected)
    assert called == {name for name, _ in block.named_modules()}


class Adapted(nn.Module):
    """A linear layer with something beside it, which offers the layer's weight as its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.beside = linear, nn.Linear(linear.in_features, linear.out_features)
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.beside(x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_what_stands_in_for_a_linear_layer_is_asked(name: str, causal: bool) -> None:
    x, layer = _tokens(2, 20, DIM), _layer(causal=causal)
    before, branch = layer(x), layer.get_submodule(name.split(".")[0])
    linear = layer.get_submodule(name)
    with_bias = nn.Linear(linear.in_features, linear.out_features)
    with_bias.weight = linear.weight
    for other in (with_bias, Adapted(linear)):
        setattr(branch, name.split(".")[1], other)
        assert not torch.allclose(layer(x), before), type(other)


@pytest.mark.parametrize("name", LINEAR)
def test_a_bias_that_is_no_parameter_counts(name: str) -> None:
    x, layer = _tokens(2, 20, DIM), _layer()
    before, linear = layer(x), layer.get_submodule(name)
    del linear.bias
    linear.register_buffer("bias", torch.ones(linear.out_features))  # type: ignore[arg-type]
    assert not torch.allclose(layer(x), before)


@pytest.mark.parametrize("put", [setattr, nn.Module.register_buffer])
def test_a_null_that_is_no_parameter_counts(put: Any) -> None:
    x, layer = _tokens(2, 20, DIM), _layer()
    before = layer(x)
    del layer.null
    put(layer, "null", torch.ones(DIM))
    gates = torch.zeros(2, 20)
    y, routing = layer(x, return_routing=True)
    gates.scatter_(1, routing.q.indices, routing.q.gates.detach())
    torch.testing.assert_close(y, before + (1 - gates)[..., None])


class FirstToken(nn.Module):
    """Choose the first token and nothing else, however many are asked for."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        indices = torch.full((len(x), k), -1)
        indices[:, 0] = 0
        return RouterOutput(indices, (indices >= 0).float(), torch.zeros(x.shape[:2]))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_a_router_did_not_find_are_not_seen(causal: bool) -> None:
    few, many = (_layer(k_kv=k, causal=causal, router_kv=FirstToken()) for k in (4 if causal else 1, 32))
    x = _tokens(2, 4 * WINDOW, DIM)
    torch.testing.assert_close(many(x), few(x))


def test_memories_that_a_router_did_not_find_are_not_seen() -> None:
    x, context, made = _tokens(2, 9, DIM), _tokens(2, 30, DIM, seed=2), []
    for k in (1, 8):
        torch.manual_seed(2)
        layer = RoutedCrossAttention(DIM, 4, k, heads=2, dim_head=6, router_kv=FirstToken())
        made.append(layer(x, context))
    torch.testing.assert_close(*made)


@pytest.mark.parametrize("name", ["router_q", "router_kv"])
@pytest.mark.parametrize("kind", [RoutedAttention, RoutedCrossAttention])
def test_routers_of_several_routes_are_refused(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: {name} must have one route, got num_routes = 2"):
        kind(DIM, 4, 4, **{name: Router(DIM, num_routes=2)})


def test_causal_attention_refuses_queries_chosen_by_the_future() -> None:
    with pytest.raises(ValueError, match="with causal, router_q must be as CausalRouter"):
        _layer(causal=True, router_q=Router(DIM))
    layer = _layer(causal=True, router_q=CausalRouter(DIM, block=4, memory=8), router_kv=CausalRouter(DIM, block=4))
    assert layer(_tokens(2, 20, DIM)).isfinite().all()
