"""Layers for tests of residual additions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from swapping.norms import FooRMSNorm


class Mix(nn.Module):
    """An attention for tests: it returns a pair, and records the options that it was called with."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.seen: list[dict[str, Any]] = []

    def forward(self, x: Tensor, scale: float | None = None, **options: Any) -> tuple[Tensor, str]:
        self.seen.append({"scale": scale, **options})
        return self.proj(x) * (1.0 if scale is None else scale), "weights"


class Block(nn.Module):
    """The usual layer: x + mix(norm(x)), then h + mlp(norm(h)); `context` adds a third part."""

    def __init__(self, dim: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = FooRMSNorm(dim), nn.LayerNorm(dim)
        self.mix, self.mlp, self.drop = Mix(dim), nn.Linear(dim, dim), nn.Dropout(p)

    def forward(
        self, x: Tensor, scale: float | None = None, unused: bool = False, *, context: Tensor | None = None, **more: Any
    ) -> Tensor:
        h, _ = self.mix(self.n1(x), scale=scale, **more)
        h = x + self.drop(h)
        if context is not None:
            h = h + context
        return h + self.drop(self.mlp(self.n2(h)))


class PostNorm(nn.Module):
    """As BERT: the norm of a sum of two inputs, once the first has gone through a linear layer."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dense(x) + residual)


class Two(nn.Module):
    """Two sums, each the input of a norm, and the same norm."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm, self.f = nn.RMSNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.f(x)
        a = self.norm(x + h)
        b = self.norm(a + h)
        return a, b
