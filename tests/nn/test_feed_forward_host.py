"""What one pass of `RoutedFeedForward` costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

import pytest
import torch

from fake_gpu import Host, torch_calls
from onepass.core.launch import INTERPRET
from onepass.nn import RoutedFeedForward, feed_forward_node

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, feed_forward_node)


def _pass(layer: RoutedFeedForward, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, mask)
    assert isinstance(y, torch.Tensor)
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    return y


@pytest.mark.parametrize("masked", [False, True])
def test_every_stretch_is_replayed(host: Host, masked: bool) -> None:
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        _pass(layer, x, mask)
    assert len(host.stretches) == 5
    assert host.written == dict.fromkeys(host.stretches, 2)


@pytest.mark.usefixtures("host")
def test_one_node_and_its_kernels() -> None:
    """7 launches forward: norm and scores, solve, select, sort, norm of the chosen, cast, addition; 11 backward."""
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    for _ in range(3):
        y = _pass(layer, x, None)
    assert y.grad_fn is not None
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    Host.launches = 0
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert Host.launches == 7
    torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    assert Host.launches == 18


@pytest.mark.usefixtures("host")
def test_what_torch_is_called_for() -> None:
    """Products, GELUs, sums of parts, and the views that these take; kernels get theirs without torch."""
    layer, x = RoutedFeedForward(32, 1 / 16), torch.randn(2, 64, 32, requires_grad=True)
    for _ in range(3):
        _pass(layer, x, None)
    found = torch_calls(lambda: _pass(layer, x, None))
    for own in ("ones_like", "to"):  # of this test: the gradient; of a CPU: products that give fp32 are cast
        del found[own]
    assert found == {
        "linear": 3, "addmm": 1, "mm": 8, "t": 5, "gelu": 2, "sum": 2, "split_with_sizes": 2, "view": 10,
    }  # fmt: skip
