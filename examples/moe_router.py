"""A router of experts with exact capacity, by `topk` over each expert's tokens, beside softmax top-2 at equal compute.

Tokens of 8 kinds, the first 8 times as frequent as the last, each with a function to learn. Every way pays for two
experts' rows a token, and all but "no limit" for equally many of each expert:
- no limit: softmax top-2, however many tokens come to an expert
- first come, best first: top-2, of which each expert keeps the first tokens (`topk` of equal scores), or the best
- experts choose: each expert takes the best of all tokens, and so sees the whole batch
- weighted gates: the same, softmax's weights times the gates of `topk`, which have soft_topk's gradient
"""

import argparse

import torch
from torch import Tensor, nn

import onepass

DIM, EXPERTS, TOKENS = 16, 8, 512
WAYS = "no limit", "first come", "best first", "experts choose", "weighted gates"


class Experts(nn.Module):
    def __init__(self, way: str, hidden: int = 32) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, hidden) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, DIM) / hidden**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, each expert's tokens (−1: none), and the loss that balances top-2."""
        scores, capacity, balance = self.router(x).T, 2 * len(x) // EXPERTS, x.new_zeros(())
        weights = scores.softmax(0)
        if self.way in WAYS[3:]:
            top = onepass.topk(scores, capacity, sorted=False)
        else:
            two = torch.zeros_like(scores, dtype=torch.bool).scatter(0, scores.topk(2, 0).indices, True)
            balance = EXPERTS / 2 * (two.float().mean(1) * weights.mean(1)).sum()
            weights = weights * two / (weights * two).sum(0)
            order = weights.detach() if self.way == "best first" else two.float()
            top = onepass.topk(order, len(x) if self.way == "no limit" else capacity, mask=two, sorted=False)
        gates = top.gates if self.way == "weighted gates" else top.gates.detach()
        at = top.indices.clamp(min=0)
        rows = (x[at] @ self.up).relu() @ self.down * (weights.gather(1, at) * gates)[..., None]
        return torch.zeros_like(x).index_add(0, at.flatten(), rows.flatten(0, 1)), top.indices, balance


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens around the center of their kind, and what its function makes of them."""
    fixed, random, shares = *(torch.Generator().manual_seed(s) for s in (0, seed)), torch.linspace(8, 1, 8)
    functions = torch.randn(8, 1 + DIM, DIM, generator=fixed)[torch.multinomial(shares, TOKENS, True, generator=random)]
    x = functions[:, 0] + torch.randn(TOKENS, DIM, generator=random)
    return x, (x[:, None] @ functions[:, 1:])[:, 0].tanh()


def train(way: str, steps: int, seed: int) -> list[float]:
    """Return the error on fresh tokens, choices dropped, tokens without an expert, and the most that an expert has."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam((model := Experts(way)).parameters(), lr=1e-2)
    for step in range(steps):
        x, y = batch(1 + step)
        found, _, balance = model(x)
        ((found - y).square().mean() + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = batch(1 << 20)
    found, tokens, _ = model(x)
    kept, experts = tokens >= 0, torch.bincount(tokens[tokens >= 0], minlength=TOKENS)
    told = (found - y).square().mean() / y.var(), 1 - kept.sum() / (2 * TOKENS), (experts == 0).float().mean()
    return [number.item() for number in (*told, kept.sum(1).max())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    print(f"{'':14}{'dropped':>9}{'no expert':>11}{'busiest expert':>16}  errors of two seeds")
    for way in WAYS:
        found = torch.tensor([train(way, steps, seed) for seed in range(2)])
        _, dropped, alone, most = found.mean(0).tolist()
        print(f"{way:14}{dropped:9.1%}{alone:11.1%}{most:16.0f}  ", *(f"{error:.3f}" for error in found[:, 0].tolist()))
