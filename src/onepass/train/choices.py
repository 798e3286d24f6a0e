"""What the routers of a model chose on the validation text, as numbers of the metrics and a line of the summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.nn import routing_stats
from onepass.train.config import Config


class Choices:
    """Counts of what the blocks of a configuration chose; `total` adds a tensor up over the processes."""

    def __init__(self, config: Config, device: torch.device, total: Callable[[Tensor], Tensor]) -> None:
        self.config, self.total = config, total
        # hidden bytes, all bytes; with a heavy branch: in all blocks, in one block at least
        self.sums = torch.zeros(4, dtype=torch.int64, device=device)
        self.loads = torch.zeros(config.blocks, config.experts, dtype=torch.int64, device=device)
        self.passes: list[dict[str, Any]] = []

    def add(self, routings: list[Any], hidden: Tensor, shape: torch.Size) -> None:
        """Count a pass over tokens (batch, n), of which those at `hidden` (batch, m) were asked for."""
        self.sums[0] += hidden.numel()
        self.sums[1] += shape.numel()
        if self.config.model == "routed":
            self.passes.append({f"blocks.{i}": each for i, each in enumerate(routings)})
            counts = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
            for indices in (each.feed_forward.indices for each in routings):
                counts.scatter_add_(1, indices.clamp_min(0), (indices >= 0).long())
            self.sums[2:] += torch.stack([counts.sum(), (counts > 0).sum()])
        elif self.config.experts:
            self.loads += torch.stack([routing.counts for routing in routings])

    def numbers(self) -> tuple[int, dict[str, float]]:
        """Return how many bytes were asked for, and the numbers by name."""
        asked, tokens, each, once = self.total(self.sums).tolist()
        if self.config.model == "routed":
            shares = {"routed": each / tokens / self.config.blocks, "routed_once_at_least": once / tokens}
            stats = routing_stats(self.passes, total=self.total)
            return asked, shares | {f"routing/{name}": value for name, value in stats.items()}
        # 1: as many tokens as in equal parts
        loads = self.total(self.loads).double()
        parts = (loads / loads.mean(1, keepdim=True)).tolist() if self.config.experts else []
        named = {f"routing/blocks.{i}.feed_forward": each for i, each in enumerate(parts)}
        most = {f"{name}/fullest": max(each) for name, each in named.items()}
        return asked, most | {f"{name}/emptiest": min(each) for name, each in named.items()}


def summary(numbers: dict[str, float]) -> str:
    """Return a line about the numbers of `Choices`."""
    if "routed" in numbers:
        each, once = 100 * numbers["routed"], 100 * numbers["routed_once_at_least"]
        return f"routed      {each:.1f} % of the tokens in each block; {once:.1f} % in one block at least"
    most = max(value for name, value in numbers.items() if name.endswith("/fullest"))
    least = min(value for name, value in numbers.items() if name.endswith("/emptiest"))
    return f"experts     the fullest takes {most:.2f} times an equal part of the bytes, the emptiest {least:.2f}"
