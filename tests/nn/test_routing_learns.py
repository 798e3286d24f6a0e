"""The router learns which tokens deserve the heavy branch, on a task whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.nn import RoutedFeedForward, Router

DIM, N, K, BATCH, STEPS = 32, 128, 8, 8, 300


def _overlap_while_training(seed: int, router: Router) -> tuple[float, float]:
    """Share of the planted tokens that the router chose, in the first and the last 20 steps.

    Filler tokens want 0. Planted tokens are shifted along a hidden direction and want a random two-layer function of
    themselves, for which the light branch (two hidden units) is too narrow. The shift starts orthogonal to the routing
    vector, so that the router starts no better than chance.
    """
    torch.manual_seed(seed)
    layer = RoutedFeedForward(DIM, K, light_mult=2 / DIM, heavy_mult=4, router=router)
    first, second = torch.randn(DIM, 2 * DIM) / DIM**0.5, torch.randn(2 * DIM, DIM) / (2 * DIM) ** 0.5
    vector = router.weight.detach()[0]
    shift = torch.randn(DIM)
    shift = shift - (shift @ vector) / (vector @ vector) * vector
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    overlap: list[Tensor] = []
    for _ in range(STEPS):
        planted = torch.rand(BATCH, N).topk(K, -1).indices
        is_planted = torch.zeros(BATCH, N, dtype=torch.bool).scatter_(1, planted, True)
        x = torch.randn(BATCH, N, DIM) + is_planted[..., None] * shift
        target = is_planted[..., None] * 2 * (torch.relu(x @ first) @ second)
        y, routing = layer(x, return_routing=True)
        loss = (y - target).square().mean() * N / K
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        overlap.append(is_planted.gather(1, routing.indices).float().mean())
    return torch.stack(overlap[:20]).mean().item(), torch.stack(overlap[-20:]).mean().item()


@pytest.mark.parametrize("seed", range(3))
def test_the_default_router_finds_the_planted_tokens(seed: int) -> None:
    torch.manual_seed(seed)
    start, end = _overlap_while_training(seed, Router(DIM))
    chance = K / N
    assert start < chance
    assert end > 6 * chance
