"""Sparse autoencoders: TopK with AuxK (a row keeps its k largest latents) or BatchTopK (--batch: k times its rows)."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import onepass

DEAD_AFTER = 50  # steps


class SparseAutoencoder(nn.Module):
    """x ≈ W_dec·z + b with few latents z of W_enc·(x − b); latents that long fired nowhere fit the rest (AuxK)."""

    def __init__(self, dim: int, latents: int, k: int, over_batch: bool = False) -> None:
        super().__init__()
        self.k, self.over_batch = k, over_batch
        self.bias = nn.Parameter(torch.zeros(dim))
        self.encoder = nn.Parameter(nn.functional.normalize(torch.randn(dim, latents), dim=0))
        self.decoder = nn.Parameter(self.encoder.detach().t().clone())
        self.register_buffer("unused", torch.zeros(latents, dtype=torch.long))

    def decode(self, latents: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the sum of the decoder's rows of each row's k largest latents, and which these are."""
        top = onepass.topk(latents, k, sorted=False)
        chosen = top.values.masked_fill(top.indices < 0, 0).relu()
        at = top.indices.clamp(min=0)
        rows = nn.functional.embedding_bag(at, self.decoder, per_sample_weights=chosen, mode="sum")
        return rows, top.indices[chosen > 0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstruction and the loss."""
        latents = (x - self.bias) @ self.encoder
        if self.over_batch:
            least = onepass.kth_value(latents.detach().flatten(), self.k * len(x)).clamp(min=0)
            kept = latents * ((latents >= least) & (latents > 0))
            rebuilt, fired = kept @ self.decoder, kept.nonzero()[:, 1]
        else:
            rebuilt, fired = self.decode(latents, self.k)
        error = x - self.bias - rebuilt
        loss, self.unused = error.square().mean(), self.unused + 1
        self.unused[fired] = 0
        if self.training and (dead := self.unused > DEAD_AFTER).any():
            spare, _ = self.decode(latents.masked_fill(~dead, -torch.inf), 2 * self.k)
            loss = loss + (error.detach() - spare).square().mean() / 32
        return rebuilt + self.bias, loss


def activations(rows: int, dim: int, seed: int) -> Tensor:
    """Return activations as of a hidden layer: sums of a few of 4·dim features."""
    features = nn.functional.normalize(torch.randn(4 * dim, dim, generator=torch.Generator().manual_seed(0)), dim=1)
    chance = torch.rand(rows, 4 * dim, generator=torch.Generator().manual_seed(seed))
    return (chance * (chance > 0.98)) @ features


def train(steps: int, over_batch: bool, dim: int = 32, k: int = 6, rows: int = 256) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(0)
    model = SparseAutoencoder(dim, 8 * dim, k, over_batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        _, loss = model(activations(rows, dim, step + 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {losses[-1]:.5f}, dead latents {int((model.unused > DEAD_AFTER).sum())}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", action="store_true", dest="over_batch", help="BatchTopK")
    train(**vars(parser.parse_args()))
