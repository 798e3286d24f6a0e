"""Kernels of a choice by shares against integers counted by the host, and whole layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from harness import DEVICES
from onepass.core.launch import INTERPRET
from onepass.fused.choice import first_of_each, row_counts
from onepass.nn import RoutedBlock, RoutedFeedForward, Router
from onepass.ops.causal_choice.definition import fraction

WHERE = [
    pytest.param("cpu", id="interpreter", marks=[pytest.mark.interpret, pytest.mark.skipif(not INTERPRET, reason="-")]),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("share", [1 / 16, 0.1, 0.5, 0.575, 1.0])
@pytest.mark.parametrize("n", [1, 7, 1024, 2500])
def test_counts(device: str, share: float, n: int) -> None:
    from onepass.fused import kernels

    mask = torch.rand(5, 2 * n, generator=torch.Generator().manual_seed(1))[:, ::2] < 0.6
    mask[0], mask[1] = True, False
    mask = mask.to(device)
    expected = row_counts(share, mask).clamp_min(1)
    assert torch.equal(kernels.counts(mask, fraction(share)).long(), expected)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 1, 1), (3, 5, 9), (4, 700, 900)])
def test_cut(device: str, hard: bool, rows: int, k: int, n: int) -> None:
    from onepass.fused import kernels

    generator = torch.Generator().manual_seed(2)
    indices = torch.rand(rows, n, generator=generator).argsort(-1)[:, :k].contiguous()
    indices[-1, k // 2 :] = -1
    gates, soft = torch.rand(rows, k, generator=generator), torch.rand(rows, n, generator=generator)
    counts = torch.randint(1, k + 1, (rows,), generator=generator)
    expected = first_of_each(indices, counts)
    of_all = gates if hard else soft.gather(-1, indices.clamp_min(0))
    mine, own = indices.to(device), gates.to(device)
    kernels.cut(mine, own, None if hard else soft.to(device), counts.float().to(device))
    assert torch.equal(mine.cpu(), expected)
    assert torch.equal(own.cpu(), torch.where(expected >= 0, of_all, 0.0))


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(("gate", "k", "bias"), [("soft", 0.2, True), ("straight_through", 5, False)])
def test_a_whole_layer(device: str, gate: str, k: float, bias: bool) -> None:
    """The fused layer by kernels beside the torch path in float64: outputs, choices and gradients."""
    torch.manual_seed(3)
    here = RoutedFeedForward(32, k, bias=bias, router=Router(32, gate=gate)).to(device)
    there = copy.deepcopy(here).cpu().double()
    x = torch.randn(3, 40, 32)
    mask = torch.arange(40) < torch.tensor([[40], [13], [0]] if k < 1 else [[40]] * 3)
    found = []
    for layer, tokens, real in ((here, x.to(device), mask.to(device)), (there, x.double(), mask)):
        tokens.requires_grad_()
        y, routing = layer(tokens, real, return_routing=True)
        grads = torch.autograd.grad(y.square().sum(), [tokens, *layer.parameters()])
        found.append((routing.indices.cpu(), [t.detach().cpu().double() for t in (y, routing.gates, *grads)]))
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_without_memory(device: str, causal: bool) -> None:
    """FakeTensors take no kernel, under Triton's interpreter neither."""
    outs = []
    for mode in (FakeTensorMode(), torch.device("cpu")):
        with mode, torch.device(device if isinstance(mode, FakeTensorMode) else "cpu"):
            block = RoutedBlock(32, 1 / 8, heads=2, dim_head=16, window=16, causal=causal).eval()
            outs.append(tree_leaves(block(torch.randn(2, 73, 32), return_routing=True)))
    assert {t.device.type for t in outs[0]} == {device}
    found, expected = ([(t.shape, t.stride(), t.dtype) for t in some] for some in outs)
    assert found == expected
