"""A mixture of experts beside a dense feed-forward of as many multiplications a token, and its balance without a loss.

Tokens are of 8 kinds, the first 8 times as frequent as the last, each with a function of its own to learn. A token
takes 1 of 8 experts. `update_balance` moves a bias after each step, so that no expert stays idle: it changes the choice
alone, the loss has no second term.
"""

import argparse

import torch
from torch import Tensor, nn

from onepass.nn import Experts, update_balance
from onepass.optim import Lion

DIM, KINDS, TOKENS, HIDDEN = 16, 8, 512, 64


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens around the center of their kind, and what its function makes of them."""
    fixed, random, shares = *(torch.Generator().manual_seed(s) for s in (0, seed)), torch.linspace(KINDS, 1, KINDS)
    kinds = torch.multinomial(shares, TOKENS, True, generator=random)
    functions = torch.randn(KINDS, 1 + DIM, DIM, generator=fixed)[kinds]
    x = functions[:, 0] + torch.randn(TOKENS, DIM, generator=random)
    return x, (x[:, None] @ functions[:, 1:])[:, 0].tanh()


def train(name: str, steps: int) -> tuple[float, float]:
    """Return the error on fresh tokens as a share of their variance, and the busiest expert's load over the mean."""
    torch.manual_seed(0)
    experts = Experts(DIM, KINDS, top_k=1, hidden_dim=HIDDEN, balance_rate=1e-2 if name == "balanced" else 0)
    dense = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
    model = dense if name == "dense" else experts
    optimizer, loads = Lion(model.parameters(), lr=1e-3), torch.zeros(KINDS)
    for step in range(steps):
        x, y = batch(1 + step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loads += experts.tokens_per_expert * (step >= steps - 100)  # one step's alone depend on where a bias just is
        update_balance(model)
    x, y = batch(1 << 20)
    error = ((model(x) - y).square().mean() / y.var()).item()
    return error, 1.0 if model is dense else (loads.max() / loads.mean()).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    print(f"{'':16}{'error':>7}{'busiest expert':>16}")
    for name in ("dense", "no balance", "balanced"):
        error, busiest = train(name, steps)
        print(f"{name:16}{error:7.3f}{busiest:16.2f}")
