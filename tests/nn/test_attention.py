"""`RoutedAttention`: its formula with full matrices, at every edge, in every mode of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nn.attention_oracle import routed_attention
from onepass.nn import LocalAttention, RoutedAttention

DIM, WINDOW = 12, 8


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _layer(k_q: float = 5, k_kv: float = 7, causal: bool = False, **kwargs: Any) -> RoutedAttention:
    torch.manual_seed(2)
    layer = RoutedAttention(DIM, k_q, k_kv, heads=2, dim_head=6, window=WINDOW, causal=causal, **kwargs)
    nn.init.normal_(layer.null)
    nn.init.normal_(layer.heavy.norm_q.weight)
    nn.init.normal_(layer.light.norm.weight)
    # no training mode: routers get the gradient of the gates alone
    return layer.eval()


def _mask(n: int) -> Tensor:
    """A row with holes, one with fewer real tokens than k, one with none."""
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[1, 3:] = False
    mask[2] = False
    return mask


class TestFormula:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("n", [4 * WINDOW, 3 * WINDOW + 5, 3])
    def test_values_and_gradients(self, causal: bool, masked: bool, n: int) -> None:
        layer = _layer(causal=causal).double()
        x = _tokens(3, n, DIM).double().requires_grad_()
        mask = _mask(n) if masked else None
        y, routing = layer(x, mask, return_routing=True)
        expected = routed_attention(layer, x, torch.ones(3, n).bool() if mask is None else mask, routing)
        torch.testing.assert_close(y, expected)
        dy = _tokens(3, n, DIM, seed=2).double()
        wanted = [x, *layer.parameters()]
        ours = torch.autograd.grad(y, wanted, dy, retain_graph=True)
        theirs = torch.autograd.grad(expected, wanted, dy, materialize_grads=True)
        torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_the_composition_of_modules_gives_the_same(self, causal: bool, masked: bool) -> None:
        """Plain eager calls take fewer passes over x; whoever looks on, here a hook, gets module by module."""
        layer, x = _layer(causal=causal).double(), _tokens(3, 29, DIM).double().requires_grad_()
        mask, dy = _mask(29) if masked else None, _tokens(3, 29, DIM, seed=2).double()
        wanted = [x, *layer.parameters()]
        fused = layer(x, mask)
        expected = torch.autograd.grad(fused, wanted, dy)
        calls = []
        layer.router_q.register_forward_hook(lambda *_: calls.append(1))
        y = layer(x, mask)
        assert calls
        torch.testing.assert_close(y, fused)
        torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), expected)

    def test_other_numbers_of_light_heads(self) -> None:
        layer, x = _layer(light_heads=3).double(), _tokens(2, 20, DIM).double()
        y, routing = layer(x, return_routing=True)
        torch.testing.assert_close(y, routed_attention(layer, x, torch.ones(2, 20).bool(), routing))


class TestK:
    def test_a_quota_per_window_when_causal(self) -> None:
        _, routing = _layer(1 / 16, 1 / 4, causal=True)(_tokens(2, 64, DIM), return_routing=True)
        windows = routing.kv.indices.view(2, 8, 2) // WINDOW
        assert (windows == torch.arange(8)[:, None]).all()

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("k_q", "k_kv"), [(0, 4), (4, 0), (0, 0)])
    def test_nothing_chosen(self, k_q: int, k_kv: int, causal: bool) -> None:
        """Without queries it is local attention and ν; without keys a query gets less of ν and nothing for it."""
        layer, x = _layer(k_q, k_kv, causal=causal), _tokens(2, 20, DIM)
        y, routing = layer(x, return_routing=True)
        gates = torch.zeros(2, 21).scatter(1, routing.q.indices % 21, routing.q.gates)[:, :20]
        torch.testing.assert_close(y, layer.light(x) + (1 - gates)[..., None] * layer.null)
        y.sum().backward()

    @pytest.mark.parametrize("name", ["k_q", "k_kv"])
    @pytest.mark.parametrize(("k", "error"), [(-1, ValueError), (1.5, ValueError), (True, TypeError), ("3", TypeError)])
    def test_other_values_are_refused(self, name: str, k: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"RoutedAttention: {name} must be an int"):
            RoutedAttention(DIM, **{"k_q": 1, "k_kv": 1, name: k})

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"heads": 0}, "heads must be ≥ 1"),
            ({"dim_head": 5}, "dim_head must be even"),
            ({"light_heads": 0}, "heads must be ≥ 1"),
            ({"window": 0}, "window must be ≥ 1"),
            ({"window": 2.5}, "window must be an int, got float"),
            ({"heads": "2"}, "heads must be an int, got str"),
        ],
    )
    def test_sizes_are_checked(self, kwargs: dict[str, Any], match: str) -> None:
        error = ValueError if "≥" in match or "even" in match else TypeError
        with pytest.raises(error, match=match):
            RoutedAttention(DIM, 1, 1, **kwargs)

    @pytest.mark.parametrize("x", [[1.0], torch.ones(2, 4, DIM, dtype=torch.int64)])
    def test_what_is_no_tensor_of_floats_is_refused(self, x: Any) -> None:
        with pytest.raises(TypeError, match="RoutedAttention: x must be"):
            _layer()(x)

    def test_another_width_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"x must be \(batch, n, 12\), got \(2, 4, 11\)"):
            _layer()(torch.randn(2, 4, 11))


def test_local_attention_sees_its_neighbours_and_nobody_else() -> None:
    layer = LocalAttention(DIM, heads=2, dim_head=6, window=4).double()
    x = _tokens(1, 20, DIM).double().requires_grad_()
    y = layer(x)
    for i in (0, 5, 11, 19):
        (grad,) = torch.autograd.grad(y[0, i].sum(), x, retain_graph=True)
        window = torch.arange(20) // 4
        assert torch.equal(grad[0].abs().sum(-1) > 0, (window - window[i]).abs() <= 1)
