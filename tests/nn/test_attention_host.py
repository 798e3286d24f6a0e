"""What one pass of `RoutedAttention` costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_gpu import Host, autocast_pass, launches, still_held, torch_calls_of_a_pass
from onepass.core.launch import INTERPRET
from onepass.fused import attention as attention_node
from onepass.nn import RoutedAttention

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, attention_node)


def _layer(causal: bool = False, **kwargs: Any) -> RoutedAttention:
    return RoutedAttention(32, 1 / 16, 1 / 8, heads=2, dim_head=16, window=16, causal=causal, **kwargs).eval()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_stretch_is_replayed(host: Host, masked: bool, causal: bool, autocast: bool) -> None:
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)

    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        autocast_pass(layer, x, mask, enabled=autocast)
    # `score` is for rows that are spread over devices
    assert len(host.stretches) == 7
    assert host.written == dict.fromkeys({*host.stretches} - {"score"}, 2)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("causal", "expected"), [(False, (17, 37)), (True, (17, 38))])
def test_launches(causal: bool, expected: tuple[int, int]) -> None:
    """Forward: norm and scores, two choices of three, two norms, cast, three turns, gates, two attentions, addition.

    Backward: of the addition, three sums, twice queries and keys, three turns, gates, two choices, three norms, a sum,
    two additions. Causal: queries take two launches to choose, and two backward; keys one for their places.
    """
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)
    assert launches(layer, x) == expected


@pytest.mark.usefixtures("host")
def test_what_torch_is_called_for() -> None:
    """Products and the views that these take; runs of keys are remembered."""
    x = torch.randn(2, 64, 32, requires_grad=True)
    calls = torch_calls_of_a_pass(_layer(), x)
    assert calls == {
        "mm": 14, "addmm": 1, "t": 10, "view": 4, "split_with_sizes": 2, "sub": 1,
        # both routers' vectors together, their scores apart
        "cat": 1, "unbind": 1,
    }  # fmt: skip
    # causal: what each query sees, and whose tiles of keys these are
    more = torch_calls_of_a_pass(_layer(True), x) - calls
    assert more == {"select": 4, "arange": 2, "cat": 1, "expand": 1, "contiguous": 1, "searchsorted": 2}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kept", [False, True])
def test_backward_lets_go_of_what_it_has_used(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Not all tensors of the tokens' size live at once, unless the graph is kept for another backward."""
    x = torch.randn(2, 64, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = _layer()(x)
    node: Any = y.grad_fn
    while type(node).__name__ != "_RoutedAttentionBackward":
        node = node.next_functions[0][0]
    # the light branch's: tokens, queries with keys and values, what attention gave
    saved = [t for t in node.saved_tensors if t is not None and t.is_floating_point() and t.numel() >= 2 * 64 * 32]
    used = [t for t in saved if t.data_ptr() != x.data_ptr()]
    assert len(used) == 3
    alive = still_held(monkeypatch, attention_node, "after_backward_products", used)
    del saved, used
    torch.autograd.grad(y, x, torch.randn_like(y), retain_graph=kept)
    assert alive == [3 if kept else 0]
