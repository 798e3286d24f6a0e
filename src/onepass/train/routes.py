"""Replacements for a learned router, for comparison: random choices, or none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.nn import RoutedAttention, RoutedFeedForward, RouterOutput


class RandomRouter(nn.Module):
    """Choose k random tokens with gate 1: the baseline for a learned router at equal compute.

    Equal `draw` gives equal tokens, whatever was drawn before, so a checkpoint needs no random state. The choice is
    sorted by position and does not depend on the tokens' values. With `rows` = (first, total), x is a part of a batch
    of `total` rows, and its choice that part of the batch's.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draw = 0
        self.rows: tuple[int, int] | None = None

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + self.draw) % 2**63)
        batch, n = x.shape[:2]
        first, total = self.rows or (0, batch)
        scores = torch.rand(total, n, generator=random)[first : first + batch]
        return choose(scores.to(x.device), k, mask)


class DeviceRandomRouter(nn.Module):
    """Choose k random tokens from the device's random numbers: a CUDA graph draws new ones at every replay."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        return choose(torch.rand(x.shape[:2], device=x.device), k, mask)


class Nobody(nn.Module):
    """Choose no token."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        scores = torch.zeros(x.shape[:2], device=x.device)
        return RouterOutput(scores[:, :0].long(), scores[:, :0], scores)


def choose(scores: Tensor, k: int, mask: Tensor | None) -> RouterOutput:
    """Return the tokens with the k best scores, gate 1, sorted by position; index -1 and gate 0 pad the end."""
    n = scores.shape[1]
    if mask is not None:
        scores = scores.masked_fill(~mask, -1.0)
    best, indices = scores.topk(min(k, n), dim=-1)
    indices = indices.where(best >= 0, n).sort(-1).values
    real = indices < n
    return RouterOutput(indices.where(real, -1), real.to(scores.dtype), scores)


def use_chance(model: nn.Module, make: type[DeviceRandomRouter] | None = None, seed: int = 0) -> None:
    """Replace every router of a model by a random one: a seeded RandomRouter, or `make()` if given."""
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
    """Replace every router of a model by one that chooses no token, and stop training the unused heavy branches."""
    for part in model.modules():
        if isinstance(part, RoutedAttention):
            part.router_q, part.router_kv = Nobody(), Nobody()
            part.heavy.requires_grad_(False)
        elif isinstance(part, RoutedFeedForward):
            part.router = Nobody()
            part.heavy.requires_grad_(False)
