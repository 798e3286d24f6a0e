"""The models of examples/mixture_of_depths.py side by side at equal products a token, with several seeds: JSON lines.

    OMP_NUM_THREADS=1 python -m benchmarks.mixture_of_depths --steps 1000 > record.jsonl

Text: the top level of Python's standard library; every tenth file is held out. A row of the record:
`bits_training`, `bits_inference` are bits per byte of held-out text with the choice of training (for "auxiliary": the
best eighth of the sequence, which looks ahead) and with that of inference; `same_choice` is the share of (token, block)
pairs for which a whole sequence in training and its first half at inference decide alike; `chosen_training`,
`chosen_inference` are shares of the tokens; `flops` are those of forward a token, by `FlopCounterMode`; `train_s` is
wall-clock time, other work on the machine included.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from examples.mixture_of_depths import DENSE, SHARE, N, Skipped, build, train


def flops(model: nn.Module) -> float:
    """Return the floating-point operations of products a token, forward, masked pairs of attention included."""
    # the counter knows the products of this way to attend alone
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.train()(torch.zeros(1, N, dtype=torch.int64))
    return counter.get_total_flops() / N


def chosen(model: nn.Sequential, tokens: Tensor) -> Tensor:
    """Return which tokens each skipped block chooses, (blocks, batch, n)."""
    model(tokens)
    places = torch.arange(tokens.shape[1])
    skipped = [block for block in model if isinstance(block, Skipped)]
    return torch.stack([(block.indices[:, None] == places[:, None]).any(-1) for block in skipped])


@torch.no_grad()
def measure(model: nn.Sequential, held: Tensor) -> dict[str, float]:
    """Return a row's figures of held-out sequences (batch, N + 1)."""
    row: dict[str, float] = {"flops": flops(model)}
    for mode in ("training", "inference"):
        model.train(mode == "training")
        nats = [F.cross_entropy(model(part[:, :-1]).mT, part[:, 1:], reduction="sum") for part in held.split(16)]
        row[f"bits_{mode}"] = float(sum(nats)) / held[:, 1:].numel() / math.log(2)
    if any(isinstance(block, Skipped) for block in model):
        whole, half = chosen(model.train(), held[:, :-1]), chosen(model.eval(), held[:, : N // 2])
        row["same_choice"] = (whole[..., : N // 2] == half).double().mean().item()
        row["chosen_training"], row["chosen_inference"] = whole.double().mean().item(), half.double().mean().item()
    return row


def library() -> tuple[Tensor, Tensor]:
    """Return the bytes to learn from, and 128 held-out sequences at equal distances, (128, N + 1)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, held = (
        torch.tensor(list(b"".join(file.read_bytes() for i, file in enumerate(files) if (i % 10 == 0) == out)))
        for out in (False, True)
    )
    starts = torch.arange(128) * ((len(held) - N - 1) // 128)
    return text, held[starts[:, None] + torch.arange(N + 1)]


def main() -> None:
    """Train every model with every seed and rate; print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of 8 sequences each (default: 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default: 1)")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3], help="learning rates (default: 1e-3)")
    args = parser.parse_args()
    text, held = library()
    for seed in range(args.seeds):
        for lr in args.lr:
            for name in ("auxiliary", "threshold", *DENSE):
                torch.manual_seed(seed)
                model, start = build(name), time.perf_counter()
                train(model, text, args.steps, lr)
                row: dict[str, Any] = {"model": name, "seed": seed, "lr": lr, "steps": args.steps, "share": 1 / SHARE}
                row |= {"train_s": time.perf_counter() - start, **measure(model, held)}
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
