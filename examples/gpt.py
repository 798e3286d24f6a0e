"""A GPT in one page: it learns Python's own sources byte by byte, a minute on a CPU, then writes.

Two blocks of three see windows, the third all bytes before; later bytes change nothing before them.

Run: python examples/gpt.py
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import Decoder, RMSNorm, TransformerBlock
from onepass.optim import Lion

LENGTH, BATCH, DIM, BLOCKS, WINDOW = 128, 16, 128, 3, 32


class GPT(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        windows = (None if i % 3 == 2 else WINDOW for i in range(BLOCKS))
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(TransformerBlock(DIM, dim_head=32, window=w, causal=True) for w in windows)
        self.norm, self.head = RMSNorm(DIM), nn.Linear(DIM, 256)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def write(self, start: bytes, count: int) -> bytes:
        """Return `start` and `count` bytes more, each drawn from the model's guess given all bytes before."""
        options = {"batch": 1, "max_tokens": len(start) + count, "temperature": 0.8}
        decoder = Decoder(self.eval().blocks, self.embedding, self.logits, **options)
        prompt = torch.tensor([list(start)], device=self.head.weight.device)
        return start + bytes(decoder.generate(prompt, count)[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps, device = parser.parse_args().steps, "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sources = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).to(device)
    model = GPT().to(device)
    optimizer = Lion(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, i / 20, 1.05 - i / steps))
    bits = 8.0
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), device=device)
        batch = text[starts + torch.arange(LENGTH + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        bits += (loss.item() / math.log(2) - bits) / 20
        if step % 50 == 0:
            print(f"step {step}  {bits:.2f} bits a byte")
    print(model.write(b"def ", 300).decode(errors="replace"))


if __name__ == "__main__":
    main()
