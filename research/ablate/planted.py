"""The planted task: a few tokens of a long sequence, recognisable by content, carry a computation; the answer is known.

A token is a payload of Gaussian numbers plus two hidden features of ±`size` along two hidden directions. Tokens where
both are positive are planted; filler has any of the three other combinations, so that neither feature alone is a mark:
of the tokens with one of them positive, most are filler. A planted token wants a random two-layer function of its
payload, filler wants 0. The light branch has too few hidden units for that function, and nobody says where it applies.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn import RoutedFeedForward, Router, RouterOutput
from onepass.nn.feed_forward import FeedForward

from .routes import use_chance, use_nobody
from .runner import Rates


@dataclass(frozen=True)
class Size:
    """How large the task is. `start` is where the learned routers begin: at random, or pointing away from the mark."""

    dim: int
    n: int
    k: int
    batch: int
    steps: int
    lr: float = 1e-3
    light_mult: float = 1 / 8
    heavy_mult: float = 4.0
    feature: float = 2.0
    start: str = "random"

    def rates(self) -> Rates:
        """What the optimizer is given."""
        return Rates(self.lr)


SIZES = {
    "small": Size(dim=32, n=256, k=16, batch=16, steps=450, lr=4e-3),
    "full": Size(dim=128, n=4096, k=128, batch=16, steps=3000, lr=2e-3),
}


@dataclass(frozen=True)
class Batch:
    """Tokens and targets (batch, n, dim), and which tokens are planted (batch, n)."""

    x: Tensor
    target: Tensor
    planted: Tensor


class Data:
    """Draws batches; every arm of a seed sees the same ones."""

    def __init__(self, size: Size, seed: int, device: torch.device) -> None:
        self.size, self.device = size, device
        hidden = torch.Generator().manual_seed(seed)
        dim = size.dim
        basis, _ = torch.linalg.qr(torch.randn(dim, dim, generator=hidden, dtype=torch.float64))
        self.features: Tensor = basis.T[:2].float().to(device)
        rest = basis.T[2:].float().to(device)
        self.payload = rest.T @ rest
        # relu keeps half the variance: the target's is about 1
        gain = math.sqrt(2)
        self.first = (torch.randn(dim, 2 * dim, generator=hidden) * gain / math.sqrt(dim)).to(device)
        self.second = (torch.randn(2 * dim, dim, generator=hidden) * gain / math.sqrt(2 * dim)).to(device)
        self.draws = torch.Generator(device).manual_seed(seed + 1_000_003)
        self.held_out = torch.Generator(device).manual_seed(seed + 2_000_003)
        # the loss of an output of zeros: every seed's function has its own size
        first = self.batch(held_out=True)
        self.unit = first.target.square().mean().item()

    @property
    def mark(self) -> Tensor:
        """The direction in which planted tokens lie: the sum of the two features, of length 1."""
        return self.features.sum(0) / math.sqrt(2)

    def batch(self, held_out: bool = False) -> Batch:
        """Draw a training batch, or one to measure on."""
        size, random = self.size, self.held_out if held_out else self.draws
        shape = (size.batch, size.n)
        planted = torch.zeros(shape, dtype=torch.bool, device=self.device)
        planted.scatter_(1, torch.rand(shape, generator=random, device=self.device).topk(size.k, -1).indices, True)
        kind = torch.randint(3, shape, generator=random, device=self.device)
        signs = torch.stack((planted | (kind == 0), planted | (kind == 1)), -1).to(torch.float32) * 2 - 1
        payload = torch.randn(*shape, size.dim, generator=random, device=self.device) @ self.payload
        target = torch.relu(payload @ self.first) @ self.second * planted[..., None]
        return Batch(payload + size.feature * signs @ self.features, target, planted)


class OracleRouter(nn.Module):
    """Choose the planted tokens, which someone has put into `planted`."""

    planted: Tensor

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        scores = self.planted.to(torch.float32)
        indices = scores.topk(k, dim=-1).indices
        return RouterOutput(indices, torch.ones_like(indices, dtype=torch.float32), scores)


class Model(nn.Module):
    """One routed feed-forward, or what an arm puts in its place."""

    def __init__(self, arm: str, size: Size, hidden: int) -> None:
        super().__init__()
        self.layer: nn.Module = RoutedFeedForward(
            size.dim, size.k, light_mult=size.light_mult, heavy_mult=size.heavy_mult
        )
        if arm == "dense":
            self.layer = FeedForward(size.dim, hidden)
        if arm == "random":
            use_chance(self)
        if arm == "light":
            use_nobody(self)
        if arm == "oracle":
            self.layer.router = OracleRouter()

    def forward(self, x: Tensor, planted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output and the chosen tokens (batch, k), None where nobody chooses."""
        if isinstance(self.layer, FeedForward):
            return self.layer(x), None
        for router in self.modules():
            if isinstance(router, OracleRouter):
                router.planted = planted
        y, routing = self.layer(x, return_routing=True)
        return y, routing.indices if routing.indices.shape[1] else None


class Task:
    """Model and data of one arm and one seed, as `runner.train` wants them."""

    def __init__(self, arm: str, seed: int, size: Size, device: torch.device, hidden: int = 0) -> None:
        self.arm, self.size, self.device = arm, size, device
        self.data = Data(size, seed, device)
        torch.manual_seed(seed)
        self.model = Model(arm, size, hidden).to(device)
        if size.start == "adverse":
            for router in self.model.modules():
                if isinstance(router, Router):
                    router.weight.data.copy_(-self.data.mark)

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        batch = self.data.batch()
        return batch.x, batch.target, batch.planted

    def loss(self, x: Tensor, target: Tensor, planted: Tensor) -> Tensor:
        """Mean square error, in units of what an output of zeros gets."""
        y, _ = self.model(x, planted)
        error: Tensor = (y.float() - target).square().mean() / self.data.unit
        return error

    @torch.no_grad()
    def measure(self, last: bool) -> dict[str, Any]:
        """Loss on tokens never trained on, and the share of the planted tokens that was chosen."""
        loss, picked = 0.0, 0.0
        batches = 8 if last else 2
        for _ in range(batches):
            batch = self.data.batch(held_out=True)
            y, chosen = self.model(batch.x, batch.planted)
            loss += (y.float() - batch.target).square().mean().item() / self.data.unit / batches
            if chosen is not None:
                found = batch.planted.gather(1, chosen.clamp_min(0)) & (chosen >= 0)
                picked += found.sum().item() / batch.planted.sum().item() / batches
        return {"loss": loss, **({"picked": picked} if self.arm in ("learned", "random", "oracle") else {})}

    def describe(self) -> dict[str, Any]:
        return asdict(self.size)
