"""A routed feed-forward on a GPU: nothing waits for the host, and the real compiler takes it."""

from __future__ import annotations

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
