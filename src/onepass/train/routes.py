"""Who chooses the heavy branch's tokens when no router learns to: chance, or nobody."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.nn import RoutedAttention, RoutedFeedForward, RouterOutput


class RandomRouter(nn.Module):
    """Choose k random tokens and give all of them gate 1: what a learned router has to beat at equal compute.

    `draw` names the choice: equal draws choose equal tokens, whatever was asked before, so nothing random has to be
    saved with a checkpoint. The choice is in the order of the tokens and depends on none of them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draw = 0

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + self.draw) % 2**63)
        return choose(torch.rand(x.shape[:2], generator=random).to(x.device), k, mask)


class DeviceRandomRouter(nn.Module):
    """The same from the device's own random numbers: a CUDA graph draws anew at every replay."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        return choose(torch.rand(x.shape[:2], device=x.device), k, mask)


class Nobody(nn.Module):
    """Choose no token."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        scores = torch.zeros(x.shape[:2], device=x.device)
        return RouterOutput(scores[:, :0].long(), scores[:, :0], scores)


def choose(scores: Tensor, k: int, mask: Tensor | None) -> RouterOutput:
    """Give the tokens with the k best scores gate 1, in the order of the tokens, missing ones last."""
    n = scores.shape[1]
    if mask is not None:
        scores = scores.masked_fill(~mask, -1.0)
    best, indices = scores.topk(min(k, n), dim=-1)
    indices = indices.where(best >= 0, n).sort(-1).values
    real = indices < n
    return RouterOutput(indices.where(real, -1), real.to(scores.dtype), scores)


def use_chance(model: nn.Module, make: type[DeviceRandomRouter] | None = None, seed: int = 0) -> None:
    """Put random routers into every routed part of a model; seeded ones, unless `make` says which."""
    count = 0

    def router() -> nn.Module:
        nonlocal count
        count += 1
        return make() if make else RandomRouter(seed * 257 + count - 1)

    for part in model.modules():
        if isinstance(part, RoutedAttention):
            part.router_q, part.router_kv = router(), router()
        elif isinstance(part, RoutedFeedForward):
            part.router = router()


def use_nobody(model: nn.Module) -> None:
    """Take the routers out of every routed part of a model and its heavy branches out of training: none is reached."""
    for part in model.modules():
        if isinstance(part, RoutedAttention):
            part.router_q, part.router_kv = Nobody(), Nobody()
            part.heavy.requires_grad_(False)
        elif isinstance(part, RoutedFeedForward):
            part.router = Nobody()
            part.heavy.requires_grad_(False)
