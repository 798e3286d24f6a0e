"""Routed attention as one operator forward and one backward: what compiled programs run is what plain eager runs."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from onepass.core.launch import INTERPRET
from onepass.fused import attention_op
from onepass.nn import RoutedAttention, RoutedBlock
from programs import compiled, exported, graphs_for

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="the kernels are those of the eager nodes"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
    pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"]),
]
DIM, N, WINDOW = 32, 64, 16
PARTS = "products", "tokens"


def _layer(device: str, causal: bool, **kwargs: Any) -> RoutedAttention:
    torch.manual_seed(0)
    return RoutedAttention(DIM, 1 / 8, 1 / 4, heads=2, dim_head=16, window=WINDOW, causal=causal, **kwargs).to(device)


def _block(device: str, causal: bool) -> RoutedBlock:
    torch.manual_seed(0)
    return RoutedBlock(DIM, 1 / 8, heads=2, dim_head=16, window=WINDOW, causal=causal).to(device)


def _tokens(device: str, batch: int = 2, n: int = N) -> Tensor:
    return torch.randn(batch, n, DIM, device=device, requires_grad=True)


def _mask(device: str, n: int = N) -> Tensor:
    return torch.arange(n, device=device) < torch.tensor([[n], [40]], device=device)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of calls of the operator."""
    found: list[tuple[Any, ...]] = []
    run = attention_op.routed_attention

    def noted(plan: Any, *tensors: Any) -> Any:
        found.append((*tensors, *plan.numbers()))
        return run(plan, *tensors)

    monkeypatch.setattr(attention_op, "routed_attention", noted)
    return found


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("n", [N, N + 9])
def test_the_operator_is_the_eager_nodes_bit_for_bit(
    device: str, causal: bool, n: int, autocast: bool, masked: bool
) -> None:
    layer, x, mask = _layer(device, causal), _tokens(device, n=n), _mask(device, n) if masked else None
    outs = []
    for run in (layer, lambda *args, **kwargs: _through_operators(layer, *args, **kwargs)):
        with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
            y, routing = run(x, mask, return_routing=True)
        torch.manual_seed(1)
        loss = (y * torch.randn_like(y)).sum()
        for choice in routing:
            loss = loss + choice.gates.sum() + choice.scores.where(choice.scores > 0, 0).sum() / n
        grads = torch.autograd.grad(loss, [x, *layer.parameters()])
        outs.append([*tree_leaves((y, routing)), *grads])
    for actual, expected in zip(*outs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _through_operators(layer: RoutedAttention, x: Tensor, mask: Tensor | None, return_routing: bool) -> Any:
    with mock.patch("onepass.nn.attention.plain", return_value=False):
        return layer(x, mask, return_routing=return_routing)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("n", "residual"), [(N, False), (N + 9, False), (N, True)])
def test_opcheck(device: str, causal: bool, masked: bool, n: int, residual: bool, seen: list[tuple[Any, ...]]) -> None:
    layer, x, mask = _layer(device, causal), _tokens(device, n=n), _mask(device, n) if masked else None
    for dtype in (torch.float32, torch.bfloat16):
        with mock.patch("onepass.nn.attention.plain", return_value=False):
            layer._fused(x, mask, dtype, residual)
        opcheck(
            attention_op.forward_op, seen[-1],
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"),
        )  # fmt: skip


@pytest.mark.parametrize("frozen", ["heavy", "light", "router", "x"])
def test_only_the_gradients_that_are_wanted(device: str, causal: bool, frozen: str) -> None:
    layer, x = _layer(device, causal), _tokens(device)
    if frozen == "x":
        x = x.detach()
    for name, p in layer.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    torch.manual_seed(1)
    y = layer(x)
    z = _through_operators(layer, x, None, return_routing=False)
    g = torch.randn_like(y)
    expected, actual = torch.autograd.grad(y, leaves, g), torch.autograd.grad(z, leaves, g)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_a_compiled_block_holds_two_operators_forward_and_four_backward(device: str, causal: bool) -> None:
    block, x = _block(device, causal), _tokens(device)
    y, (z, graphs) = block(x), compiled(block, x)
    torch.testing.assert_close(z, y, rtol=0, atol=0)
    leaves, g = [x, *block.parameters()], torch.randn_like(y)
    # dx of the attention joins that of the residual in another order
    for a, e in zip(torch.autograd.grad(z, leaves, g), torch.autograd.grad(y, leaves, g), strict=True):
        torch.testing.assert_close(a, e)
    names = ["onepass.routed_attention.default", "onepass.routed_feed_forward.default"]
    parts = [n.replace(".default", f"_{part}_backward.default") for n in reversed(names) for part in PARTS]
    assert graphs == [names, parts]


def test_one_graph_for_all_lengths(device: str, causal: bool) -> None:
    shapes = (2, 64), (2, 96), (3, 130), (5, 1000)
    assert graphs_for(_block(device, causal), (_tokens(device, *shape) for shape in shapes)) == 1


def test_export_with_named_batch_and_length(device: str, causal: bool) -> None:
    others = (_tokens(device, *shape).detach() for shape in ((3, 128), (1, 80)))
    names = exported(_block(device, causal), _tokens(device).detach(), others)
    assert names == ["onepass.routed_attention.default", "onepass.routed_feed_forward.default"]


def test_products_are_counted(device: str, causal: bool) -> None:
    layer, x = _layer(device, causal), _tokens(device)
    inner, batch = 2 * 16, 2
    forward = 2 * batch * DIM * inner * (4 * N + 2 * (N // 8) + 2 * (N // 4))
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert 2 * forward <= counter.get_total_flops() <= 2 * forward + 2 * 2 * N * DIM
