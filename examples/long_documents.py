"""A routed encoder on long documents of different lengths: what matters is eight bytes among a thousand.

Each document is noise with eight marks of one class and eight of no meaning. Run: python examples/long_documents.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import RMSNorm, RoutedBlock
from onepass.optim import Lion

LENGTH, CLASSES, MARKS = 1024, 4, 8
NOISE = 200  # bytes 0 to 199 are noise, 200 + class is a mark, 250 means nothing


def documents(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (count, LENGTH), mask (count, LENGTH), which is True at real tokens, and classes (count,)."""
    tokens, label = torch.randint(0, NOISE, (count, LENGTH)), torch.randint(0, CLASSES, (count,))
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1))
    mask = torch.arange(LENGTH) < lengths
    places = torch.rand(count, LENGTH).masked_fill(~mask, -1).topk(2 * MARKS).indices
    tokens.scatter_(1, places[:, :MARKS], (NOISE + label)[:, None].expand(-1, MARKS))
    tokens.scatter_(1, places[:, MARKS:], 250)
    return tokens, mask, label


class Encoder(nn.Module):
    """Embedding, one routed block, the maximum over the real tokens, classes."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        # every token: attention to its neighbours; one in 64: attention to any token and a wide feed-forward
        self.block = RoutedBlock(dim, k=1 / 64, heads=2, dim_head=16, window=16)
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, routing = self.block(self.embedding(tokens), mask, return_routing=True)
        y = self.norm(y).masked_fill(~mask[..., None], -torch.inf)
        # indices (batch, k): the tokens of the heavy feed-forward, −1 where a short document has fewer
        return self.head(y.amax(1)), routing.feed_forward.indices


def main() -> None:
    torch.manual_seed(0)
    model = Encoder()
    optimizer = Lion(model.parameters(), lr=1e-2, weight_decay=0.1)
    tokens, mask, label = documents(64)

    @torch.no_grad()
    def measure() -> tuple[float, float]:
        logits, chosen = model.eval()(tokens, mask)
        model.train()
        marks = (tokens.gather(1, chosen.clamp_min(0)) >= NOISE) & (chosen >= 0)
        return (logits.argmax(-1) == label).float().mean().item(), marks.sum().item() / (chosen >= 0).sum().item()

    before = measure()
    for step in range(60):
        batch_tokens, batch_mask, batch_label = documents(8)
        loss = F.cross_entropy(model(batch_tokens, batch_mask)[0], batch_label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"step {step + 1}  loss {loss.item():.3f}")
    after = measure()
    print(f"accuracy {before[0]:.2f} to {after[0]:.2f}; marks among the chosen bytes {before[1]:.2f} to {after[1]:.2f}")


if __name__ == "__main__":
    main()
