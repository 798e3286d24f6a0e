"""What one pass of `RoutedAttention` costs the host, counted: kernels are not run, what starts them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu import Host, autocast_pass, launches, still_held, torch_calls_of_a_pass
from onepass.core.launch import INTERPRET
from onepass.fused import attention as attention_node
from onepass.nn import AttentionRouting, RoutedAttention, RouterOutput

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels are not run")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch, attention_node)


def _layer(causal: bool = False, **kwargs: Any) -> RoutedAttention:
    return RoutedAttention(32, 1 / 16, 1 / 8, heads=2, dim_head=16, window=16, causal=causal, **kwargs).eval()


def _first_ones(scores: Tensor, k: int) -> RouterOutput:
    return RouterOutput(torch.arange(k).expand(len(scores), k).contiguous(), scores[:, :k].contiguous(), scores)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_stretch_is_replayed(
    host: Host, masked: bool, causal: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)

    # choices that no kernel has made: what is made of them by torch must be there
    def choose(_q: Any, _kv: Any, of_q: Tensor, of_kv: Tensor, _mask: Any) -> AttentionRouting:
        return AttentionRouting(_first_ones(of_q, 4), _first_ones(of_kv, 8))

    monkeypatch.setattr(layer, "_choose", choose)
    mask = torch.ones(2, 64, dtype=torch.bool) if masked else None
    for _ in range(5):
        autocast_pass(layer, x, mask, enabled=autocast)
    assert len(host.stretches) == 6
    assert host.written == dict.fromkeys(host.stretches, 2)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("causal", "expected"), [(False, (16, 33)), (True, (15, 33))])
def test_launches(causal: bool, expected: tuple[int, int]) -> None:
    """Forward: norm and scores, twice solve, select and sort, two norms, cast, three turns, two attentions, addition.

    Backward: of the addition, two norms again, twice queries and keys, three turns, two norms, two choices, norm and
    scores, two additions. Causal: queries take two launches to choose, and two backward.
    """
    layer, x = _layer(causal), torch.randn(2, 64, 32, requires_grad=True)
    assert launches(layer, x) == expected


@pytest.mark.usefixtures("host")
def test_what_torch_is_called_for() -> None:
    """Products, gates of values, sums of parts, and the views that these take; runs of keys are remembered."""
    x = torch.randn(2, 64, 32, requires_grad=True)
    calls = torch_calls_of_a_pass(_layer(), x)
    assert calls == {
        "mm": 13, "addmm": 2, "t": 10, "view": 29, "select": 4, "unsqueeze": 6, "mul": 2, "mul_": 1, "neg": 1, "sum": 5,
        "sub": 1, "linalg_vecdot": 1, "flatten": 2, "reshape": 1, "slice": 1, "narrow": 2,
        # both routers' vectors and scores together and apart, slots, x without its history
        "cat": 1, "unbind": 1, "stack": 1, "empty": 1, "empty_strided": 2, "detach": 1,
    }  # fmt: skip
    # causal: choices of windows in the sequence, what each query sees of them, and whose tiles of keys these are
    more = torch_calls_of_a_pass(_layer(True), x) - calls
    assert more == {
        "view": 3, "reshape": 3, "arange": 3, "unsqueeze": 1, "add": 1, "ge": 2, "where": 2, "flatten": 1,
        "floor_divide": 1, "mul": 1, "zeros_like": 1, "alias": 1,
        "cat": 1, "expand": 1, "contiguous": 1, "searchsorted": 2,
    }  # fmt: skip


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
    alive = still_held(monkeypatch, attention_node, "_after_backward_products", used)
    del saved, used
    torch.autograd.grad(y, x, torch.randn_like(y), retain_graph=kept)
    assert alive == [3 if kept else 0]
