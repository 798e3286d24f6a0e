"""The routing modules on a GPU: the same function, the same isolation, the same bits from run to run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from onepass.nn import CausalRouter, RoutedFeedForward, Router

pytestmark = pytest.mark.gpu

DIM, N = 64, 300


def _tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _mask() -> Tensor:
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, 10:] = False
    mask[1] = False
    return mask


@pytest.mark.parametrize("routes", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_cpu(routes: int, masked: bool) -> None:
    layer = RoutedFeedForward(DIM, 20, router=Router(DIM, routes))
    there = copy.deepcopy(layer).cuda()
    x, mask = _tokens(3, N, DIM), _mask() if masked else None
    dy = _tokens(3, N, DIM, seed=2)
    results = []
    for module, device in ((layer, "cpu"), (there, "cuda")):
        a = x.to(device).requires_grad_()
        y, routing = module(a, None if mask is None else mask.to(device), return_routing=True)
        grads = torch.autograd.grad(y, [a, *module.parameters()], dy.to(device))
        results.append([t.cpu() for t in (y, routing.indices, routing.gates, *grads)])
    assert torch.equal(results[0][1], results[1][1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    layer = RoutedFeedForward(DIM, 1 / 16).cuda()
    x = _tokens(3, N, DIM).to("cuda", x_dtype).requires_grad_()
    with torch.autocast("cuda", dtype):
        y = layer(x)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [x, *layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repetitions_are_bit_identical(dtype: torch.dtype) -> None:
    layer = RoutedFeedForward(DIM, 20, dtype=dtype, router=Router(DIM, 3, dtype=dtype)).cuda()
    x, mask = _tokens(3, N, DIM).to("cuda", dtype).requires_grad_(), _mask().cuda()

    def once() -> list[Tensor]:
        y = layer(x, mask)
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]

    first = once()
    for _ in range(10):
        assert all(map(torch.equal, first, once()))


@pytest.mark.parametrize("routes", [1, 3])
def test_batch_elements_and_padding_do_not_reach_others(routes: int) -> None:
    layer = RoutedFeedForward(DIM, 20, router=Router(DIM, routes)).cuda()
    x, mask = _tokens(3, N, DIM).cuda(), _mask().cuda()
    y, routing = layer(x, mask, return_routing=True)
    other = torch.where(mask[..., None], x, 100 * _tokens(3, N, DIM, seed=3).cuda())
    other[2] = _tokens(N, DIM, seed=4).cuda()
    z, routing_z = layer(other, mask, return_routing=True)
    assert torch.equal(y[:2][mask[:2]], z[:2][mask[:2]])
    assert torch.equal(routing.indices[:2], routing_z.indices[:2])


@pytest.mark.parametrize("router", [Router, CausalRouter])
def test_no_synchronisation_with_the_host(router: type[Router]) -> None:
    layer = RoutedFeedForward(DIM, 20, router=router(DIM)).cuda()
    x, mask = _tokens(3, N, DIM).cuda(), _mask().cuda()
    layer(x, mask).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compile() -> None:
    layer, x, mask = RoutedFeedForward(DIM, 20).cuda(), _tokens(3, N, DIM).cuda(), _mask().cuda()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, mask), layer(x, mask), rtol=1e-4, atol=1e-4)
