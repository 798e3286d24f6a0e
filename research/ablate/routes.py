"""Replacements for a learned router, for comparison: random choices, or none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepass.nn import RoutedAttention, RoutedFeedForward, RouterOutput


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


def use_chance(model: nn.Module) -> None:
    """Replace every router of a model by a random one."""
    for part in model.modules():
        if isinstance(part, RoutedAttention):
            part.router_q, part.router_kv = DeviceRandomRouter(), DeviceRandomRouter()
        elif isinstance(part, RoutedFeedForward):
            part.router = DeviceRandomRouter()


def use_nobody(model: nn.Module) -> None:
    """Replace every router of a model by one that chooses no token, and stop training the unused heavy branches."""
    for part in model.modules():
        if isinstance(part, RoutedAttention):
            part.router_q, part.router_kv = Nobody(), Nobody()
            part.heavy.requires_grad_(False)
        elif isinstance(part, RoutedFeedForward):
            part.router = Nobody()
            part.heavy.requires_grad_(False)
