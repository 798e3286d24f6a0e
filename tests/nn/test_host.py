"""What one pass of a routed layer costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fake_gpu import Host, autocast_pass, launches, torch_calls_of_a_pass
from onepass.core.launch import INTERPRET
from onepass.fused import attention, feed_forward, tokens
from onepass.nn import CausalRouter, RoutedAttention, RoutedFeedForward

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")
NODES: dict[str, ModuleType] = {"attention": attention, "feed-forward": feed_forward}


@pytest.fixture
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, NODES[request.getfixturevalue("name")], tokens)


def _layer(name: str, causal: bool = False) -> nn.Module:
    if name == "attention":
        return RoutedAttention(32, 1 / 16, 1 / 8, heads=2, dim_head=16, window=16, causal=causal).eval()
    return RoutedFeedForward(32, 1 / 16, router=CausalRouter(32, block=16) if causal else None)


@pytest.mark.parametrize(("name", "count"), [("attention", 6), ("feed-forward", 5)])
def test_every_stretch_is_replayed(
    host: Host, name: str, count: int, masked: bool, causal: bool, autocast: bool
) -> None:
    layer, x = _layer(name, causal), torch.randn(2, 64, 32, requires_grad=True)
    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        autocast_pass(layer, x, mask, enabled=autocast)
    assert len(host.stretches) == count
    assert host.written == dict.fromkeys(host.stretches, 2)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("name", "causal", "expected"),
    [("attention", False, (15, 37)), ("attention", True, (16, 39)), ("feed-forward", False, (6, 19)),
     ("feed-forward", True, (6, 20))],
)  # fmt: skip
def test_launches(name: str, causal: bool, expected: tuple[int, int]) -> None:
    """Attention forward: norm and scores, two choices of two, two norms, cast, three turns, gates, two attentions.

    Then the addition. Backward: of the addition, three sums, twice the tiles' queries, queries and keys, three turns,
    gates, two choices, three norms, a sum, two additions. Causal: queries take two launches to choose; keys one for
    their places. Feed-forward: norm and scores, solve, select in order, norm of the chosen, cast, addition; 13
    backward. Causal: two in place of solve and select.
    """
    layer, x = _layer(name, causal), torch.randn(2, 64, 32, requires_grad=True)
    assert launches(layer, x) == expected


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["attention", "feed-forward"])
def test_what_torch_is_called_for(name: str, causal: bool) -> None:
    """Products, GELUs, and the views that these take; kernels get theirs without torch, and runs are remembered."""
    layer, x = _layer(name, causal), torch.randn(2, 64, 32, requires_grad=True)
    expected = {"linear": 3, "addmm": 1, "mm": 8, "t": 5, "gelu": 2, "split_with_sizes": 2, "view": 3}
    if name == "attention":
        # both routers' vectors together, their scores apart
        expected = {"mm": 14, "addmm": 1, "t": 10, "view": 4, "split_with_sizes": 2, "sub": 1, "cat": 1, "unbind": 1}
        expected |= {"unbind": 3} if causal else {}
    assert torch_calls_of_a_pass(layer, x) == expected
    y = layer(x)  # torch 2.11 frees the node with it
    inputs = y.grad_fn.next_functions
    assert name == "attention" or {type(node).__name__ for node, _ in inputs if node is not None} == {"AccumulateGrad"}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["attention", "feed-forward"])
def test_backward_lets_go_of_what_it_has_used(monkeypatch: pytest.MonkeyPatch, name: str, kept: bool) -> None:
    """Not all tensors of the tokens' size live at once, unless the graph is kept for another backward."""
    x = torch.randn(2, 80, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = _layer(name)(x)
    node: Any = y.grad_fn
    while not type(node).__name__.startswith("_Routed"):
        node = node.next_functions[0][0]
    # of the light branch: tokens, and what its products read and gave
    saved = [t for t in node.saved_tensors if t is not None and t.is_floating_point()]
    of_tokens = [t for t in saved if (t.numel() >= x.numel() if name == "attention" else t.shape[:1] == (160,))]
    used = [t for t in of_tokens if t.data_ptr() != x.data_ptr()]
    assert len(used) == 3
    memories, alive, backward = [StorageWeakRef(t.untyped_storage()) for t in used], [], tokens._backward

    def noted(*args: Any) -> Any:
        alive.append(sum(not memory.expired() for memory in memories))
        return backward(*args)

    monkeypatch.setattr(tokens, "_backward", noted)
    del saved, of_tokens, used
    torch.autograd.grad(y, x, torch.randn_like(y), retain_graph=kept)
    assert alive == [3 if kept else 0]
