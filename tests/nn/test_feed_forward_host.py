"""What one pass of `RoutedFeedForward` costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_gpu import Host, autocast_pass, launches, still_held, torch_calls_of_a_pass
from onepass.core.launch import INTERPRET
from onepass.fused import feed_forward as feed_forward_node
from onepass.nn import CausalRouter, RoutedFeedForward

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, feed_forward_node)


def _layer(causal: bool = False) -> RoutedFeedForward:
    return RoutedFeedForward(32, 1 / 16, router=CausalRouter(32, block=16) if causal else None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_stretch_is_replayed(host: Host, masked: bool, causal: bool) -> None:
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)
    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        autocast_pass(layer, x, mask)
    # `_score_alone` is for rows that are spread over devices
    assert len(host.stretches) == 6
    assert host.written == dict.fromkeys({*host.stretches} - {"_score_alone"}, 2)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("causal", "expected"), [(False, (7, 20)), (True, (6, 20))])
def test_one_node_and_its_kernels(causal: bool, expected: tuple[int, int]) -> None:
    """7 launches forward: norm and scores, solve, select, sort, norm of the chosen, cast, addition; 13 backward.

    Causal: two in place of solve, select and sort, and two backward in place of one.
    """
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)
    y = autocast_pass(layer, x)
    assert y.grad_fn is not None
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    assert launches(layer, x) == expected


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("causal", [False, True])
def test_what_torch_is_called_for(causal: bool) -> None:
    """Products, GELUs, and the views that these take; kernels get theirs without torch."""
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)
    assert torch_calls_of_a_pass(layer, x) == {
        "linear": 3, "addmm": 1, "mm": 8, "t": 5, "gelu": 2, "split_with_sizes": 2, "view": 3,
    }  # fmt: skip


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kept", [False, True])
def test_backward_lets_go_of_what_it_has_used(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Not all tensors of the tokens' size live at once, unless the graph is kept for another backward."""
    layer, x = _layer(), torch.randn(2, 80, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    node: Any = y.grad_fn
    # the light branch's: tokens, before and behind the GELU
    used = [t for t in node.saved_tensors if t is not None and t.shape[:1] == (160,)]
    assert len(used) == 3
    alive = still_held(monkeypatch, feed_forward_node, "_after_backward_products", used)
    del used
    torch.autograd.grad(y, x, torch.randn_like(y), retain_graph=kept)
    assert alive == [3 if kept else 0]
