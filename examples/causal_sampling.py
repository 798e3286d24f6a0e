"""A causal routed language model of bytes: train it for a few seconds, then let it write.

No choice of the routers depends on a later byte, so what is sampled is what was trained.

Run: python examples/causal_sampling.py
"""

from __future__ import annotations

import argparse
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import Decoder, RMSNorm, RoutedBlock
from onepass.optim import Lion

LENGTH, DIM = 128, 64


class Model(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(
            RoutedBlock(DIM, k=1 / 8, heads=2, dim_head=32, window=32, causal=True) for _ in range(2)
        )
        self.norm, self.head = RMSNorm(DIM), nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample(model: Model, start: bytes, count: int, temperature: float = 0.7) -> bytes:
    """Write `count` bytes after `start`; each is drawn from the model's guess given all bytes so far."""
    decoder = Decoder(
        model.eval().blocks, model.embedding, lambda x: model.head(model.norm(x)),
        batch=1, max_tokens=len(start) + count, temperature=temperature, top_k=50,
    )  # fmt: skip
    return start + bytes(decoder.generate(torch.tensor([list(start)]), count)[0].tolist())


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    model = Model()
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(100):
        starts = torch.randint(0, len(text) - LENGTH, (16, 1))
        batch = text[starts + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 25 == 24:
            print(f"step {step + 1}  loss {loss.item():.3f}")

    # the promise behind sampling: later bytes change nothing before them
    model.eval()
    batch = text[None, :LENGTH].clone()
    before = model(batch)[:, :100]
    batch[:, 100:] = 0
    assert torch.allclose(model(batch)[:, :100], before, atol=1e-5)
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
    print(sample(model, b"def ", 200).decode(errors="replace"))


if __name__ == "__main__":
    main()
