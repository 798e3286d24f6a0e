"""Mixture-of-Depths (arXiv:2404.02258): seven of eight bytes skip every other block. Beside it, dense models.

"auxiliary": training takes the best eighth of a sequence; a loss teaches scores above 0 to these, for inference.
"threshold": a running quantile of earlier scores decides, always. Run: python examples/mixture_of_depths.py
"""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

N, DIM, SHARE = 256, 64, 8
DENSE = {"dense, 3 blocks": [308] * 3, "dense, 4 blocks": [135] * 4}  # hidden widths: the same products a token


class Block(nn.TransformerEncoderLayer):
    def __init__(self, hidden: int = 4 * DIM):
        super().__init__(DIM, 2, hidden, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)


class Skipped(nn.Module):
    def __init__(self, threshold: bool):
        super().__init__()
        self.block, self.threshold, self.loss = Block(), threshold, 0.0
        linear = nn.LayerNorm(DIM), nn.Linear(DIM, 1)
        self.router = onepass.nn.CausalRouter(DIM, block=16) if threshold else nn.Sequential(*linear)

    def forward(self, x: Tensor) -> Tensor:
        if self.threshold:
            self.indices, gates, _ = self.router(x, x.shape[1] // SHARE)
        else:
            scores = self.router(x)[..., 0]
            best = torch.zeros_like(scores).scatter(1, scores.topk(x.shape[1] // SHARE).indices, 1.0)
            self.loss = F.binary_cross_entropy_with_logits(scores, best)
            chosen = (best if self.training else scores) > 0
            order = (~chosen).sort(stable=True).indices[:, : max(1, int(chosen.sum(1).max()))]
            self.indices, gates = order.where(chosen.gather(1, order), -1), scores.sigmoid().gather(1, order)
        at = self.indices.clamp_min(0)[..., None].expand(-1, -1, DIM)  # -1 comes last: no other token sees it
        update = self.block(x.gather(1, at)) - x.gather(1, at)
        return x.scatter_add(1, at, update * (gates * (self.indices >= 0))[..., None])


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.weight[256 : 256 + tokens.shape[1]]  # bytes, then places


def build(name: str) -> nn.Sequential:
    mixed = [Skipped(name == "threshold") if i % 2 else Block() for i in range(6)]
    blocks = [Block(hidden) for hidden in DENSE.get(name, [])] or mixed
    return nn.Sequential(Embed(256 + N, DIM), *blocks, nn.LayerNorm(DIM), nn.Linear(DIM, 256))


def train(model: nn.Sequential, text: Tensor, steps: int, lr: float = 1e-3) -> None:
    optimizer = onepass.optim.Lion(model.parameters(), weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 50, 1.05 - step / steps)
        batch = text[torch.randint(0, len(text) - N, (8, 1)) + torch.arange(N + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        (loss + 0.01 * sum(block.loss for block in model if isinstance(block, Skipped))).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files if file.stem != "argparse")))
    held = torch.tensor(list(Path(files[0].parent, "argparse.py").read_bytes()))[: 64 * N + 1].unfold(0, N + 1, N)
    for name in "auxiliary", "threshold", *DENSE:
        torch.manual_seed(0)
        train(model := build(name), text, 80)
        loss = F.cross_entropy(model.eval()(held[:, :-1]).mT, held[:, 1:])
        print(f"{name:15}  {loss / torch.tensor(2.0).log():.3f} bits a byte")
