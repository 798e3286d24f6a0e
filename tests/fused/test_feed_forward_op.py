"""One operator forward and one backward: what compiled, exported and counted programs run is what plain eager runs."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from onepass.core.launch import INTERPRET
from onepass.fused import feed_forward_op
from onepass.nn import CausalRouter, RoutedFeedForward
from programs import compiled, exported, graphs_for

pytestmark = [
    pytest.mark.skipif(INTERPRET, reason="the kernels are those of the eager node"),
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]),
    pytest.mark.parametrize("causal", [False, True], ids=["best", "causal"]),
]
DIM, N = 32, 64


def _layer(device: str, causal: bool, *, bias: bool = True, k: int | float = 1 / 8) -> RoutedFeedForward:
    torch.manual_seed(0)
    router = CausalRouter(DIM, block=16) if causal else None
    return RoutedFeedForward(DIM, k=k, bias=bias, router=router).to(device)


def _tokens(device: str, batch: int = 2, n: int = N) -> Tensor:
    return torch.randn(batch, n, DIM, device=device, requires_grad=True)


def _mask(device: str) -> Tensor:
    return torch.arange(N, device=device) < torch.tensor([[N], [40]], device=device)


def _arguments(
    layer: RoutedFeedForward, x: Tensor, mask: Tensor | None, dtype: torch.dtype, residual: bool = False
) -> tuple[Any, ...]:
    """The arguments of the operator for this call."""
    with (
        mock.patch("onepass.nn.routed.plain", return_value=False),
        mock.patch.object(feed_forward_op, "forward_op", return_value=(x,) * 4) as seen,
    ):
        layer._fused(x, mask, dtype, residual)
    return tuple(seen.call_args.args)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_operator_is_the_eager_node_bit_for_bit(
    device: str, causal: bool, bias: bool, autocast: bool, masked: bool
) -> None:
    layer, x, mask = _layer(device, causal, bias=bias), _tokens(device), _mask(device) if masked else None
    with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
        y, routing = layer(x, mask, return_routing=True)
        dtype = torch.bfloat16 if autocast else torch.float32
        z, indices, gates, scores, *_ = feed_forward_op.forward_op(*_arguments(layer, x, mask, dtype))
    assert torch.equal(indices, routing.indices)
    leaves, g = [x, *layer.parameters()], torch.randn_like(y)
    expected = [y, routing.gates, routing.scores, *torch.autograd.grad((y * g).sum() + routing.gates.sum(), leaves)]
    actual = [z, gates, scores, *torch.autograd.grad((z * g).sum() + gates.sum(), leaves)]
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", ["gates", "scores"])
def test_gradients_of_the_routing_alone(device: str, causal: bool, wanted: str) -> None:
    layer, x = _layer(device, causal), _tokens(device)
    found: Any = feed_forward_op.forward_op(*_arguments(layer, x, None, torch.float32))
    at = {"gates": 2, "scores": 3}[wanted]
    _, routing = layer(x, return_routing=True)
    leaves: list[Tensor] = [x, layer.router.weight]  # type: ignore[list-item]
    for a, e in zip(
        torch.autograd.grad(found[at].square().sum(), leaves),
        torch.autograd.grad(getattr(routing, wanted).square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_opcheck(device: str, causal: bool, residual: bool, masked: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        args = _arguments(_layer(device, causal), _tokens(device), _mask(device) if masked else None, dtype, residual)
        opcheck(
            feed_forward_op.forward_op, args,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration"),
        )  # fmt: skip


def test_a_compiled_graph_holds_one_operator_forward_and_two_backward(device: str, causal: bool) -> None:
    layer, x = _layer(device, causal), _tokens(device)
    y, (z, graphs) = layer(x), compiled(layer, x)
    leaves, g = [x, *layer.parameters()], torch.randn_like(y)
    expected, actual = torch.autograd.grad(y, leaves, g), torch.autograd.grad(z, leaves, g)
    for a, e in zip((z, *actual), (y, *expected), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)
    parts = [f"onepass.routed_feed_forward_{part}_backward.default" for part in ("products", "tokens")]
    assert graphs == [["onepass.routed_feed_forward.default"], parts]


def test_one_graph_for_all_lengths(device: str, causal: bool) -> None:
    shapes = (2, 64), (2, 96), (3, 130), (5, 1000)
    assert graphs_for(_layer(device, causal), (_tokens(device, *shape) for shape in shapes)) == 1


@pytest.mark.parametrize("k", [8, 1 / 8, 0.3, 1.0])
def test_export_with_named_batch_and_length(device: str, causal: bool, k: int | float) -> None:
    others = (_tokens(device, *shape).detach() for shape in ((3, 128), (1, 80)))
    names = exported(_layer(device, causal, k=k), _tokens(device).detach(), others)
    assert names == ["onepass.routed_feed_forward.default"]


def test_products_are_counted(device: str, causal: bool) -> None:
    layer, x = _layer(device, causal), _tokens(device)
    light, heavy = (m.up.out_features for m in (layer.light, layer.heavy))  # type: ignore[union-attr]
    forward = 4 * 2 * DIM * (N * light + N // 8 * heavy)  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    assert counter.get_total_flops() == forward
    # a counter has copied the list of formulas when it was made
    with FlopCounterMode(display=False) as counter:
        counter.flop_registry.pop(torch.ops.onepass.routed_feed_forward, None)
        layer(x)
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    # explored tokens add a product with their few gradients
    assert 2 * forward <= counter.get_total_flops() <= 2 * forward + 2 * 2 * N * DIM
