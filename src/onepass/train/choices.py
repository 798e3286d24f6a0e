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
        # guessed bytes, all bytes; heavy branches that bytes got in all blocks, bytes that got one at least
        self.sums = torch.zeros(4, dtype=torch.int64, device=device)
        self.loads = torch.zeros(config.blocks, config.experts, dtype=torch.int64, device=device)
        self.passes: list[dict[str, Any]] = []

    def add(self, routings: list[Any], hidden: Tensor, shape: torch.Size) -> None:
        """Count a pass over tokens (batch, n), of which the model guessed those at `hidden` (batch, m)."""
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
        """Return how many bytes were guessed, and the numbers by name."""
        hidden, tokens, all_blocks, any_block = self.total(self.sums).tolist()
        if self.config.model == "routed":
            shares = {"routed": all_blocks / tokens / self.config.blocks, "routed_once_at_least": any_block / tokens}
            stats = routing_stats(self.passes, total=self.total)
            return hidden, shares | {f"routing/{name}": value for name, value in stats.items()}
        # a load of 1: as many tokens as if all experts got the same
        loads = self.total(self.loads).double()
        parts = (loads / loads.mean(1, keepdim=True)).tolist() if self.config.experts else []
        named = {f"routing/blocks.{i}.feed_forward": block for i, block in enumerate(parts)}
        fullest = {f"{name}/fullest": max(block) for name, block in named.items()}
        return hidden, fullest | {f"{name}/emptiest": min(block) for name, block in named.items()}


def summary(numbers: dict[str, float]) -> str:
    """Return a line about the numbers of `Choices`."""
    if "routed" in numbers:
        each, once = 100 * numbers["routed"], 100 * numbers["routed_once_at_least"]
        return f"routed      {each:.1f} % of the tokens in each block; {once:.1f} % in one block at least"
    most = max(value for name, value in numbers.items() if name.endswith("/fullest"))
    least = min(value for name, value in numbers.items() if name.endswith("/emptiest"))
    return f"experts     the fullest takes {most:.2f} times an equal part of the bytes, the emptiest {least:.2f}"
