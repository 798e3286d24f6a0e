"""The planted task: a few tokens of a long sequence, recognisable by content, carry a computation; the answer is known.

A token is a payload of Gaussian numbers plus two hidden features of ±`size` along two hidden directions. Tokens where
both are positive are planted; filler has any of the three other combinations, so that neither feature alone is a mark:
of the tokens with one of them positive, most are filler. A planted token wants a random two-layer function of its
payload, filler wants 0. The light branch has too few hidden units for that function; the loss alone tells where.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onepass.__main__ import Parser, run_command
from onepass.core.about import device_name, versions
from onepass.nn import RoutedFeedForward, RouterOutput
from onepass.optim import Lion
from onepass.train.captured import Gradients
from onepass.train.commands import files
from onepass.train.commands.errors import doing
from onepass.train.commands.options import number
from onepass.train.model import pick_device
from onepass.train.progress import say

TEXT = """\
The planted task: a few tokens of a long row carry a computation; who finds them?

  learned  a router        random  chance, at the same compute
  oracle   the planted tokens      light   no heavy branch

Each arm with each seed leaves one JSON in DIR; what is there is not trained again, so a stopped command goes on."""


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


class RandomRouter(nn.Module):
    """Choose k random tokens; a CUDA graph draws new ones at every replay."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        scores = torch.rand(x.shape[:2], device=x.device)
        indices = scores.topk(k, dim=-1).indices.sort(-1).values
        return RouterOutput(indices, torch.ones_like(indices, dtype=torch.float32), scores)


class Nobody(nn.Module):
    """Choose no token."""

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        scores = torch.zeros(x.shape[:2], device=x.device)
        return RouterOutput(scores[:, :0].long(), scores[:, :0], scores)


class Task:
    """A routed feed-forward with the router of an arm, its data, and one training step of both."""

    def __init__(self, arm: str, seed: int, size: Size, device: torch.device) -> None:
        self.arm, self.size, self.device = arm, size, device
        self.data = Data(size, seed, device)
        torch.manual_seed(seed)
        layer = RoutedFeedForward(size.dim, size.k, light_mult=size.light_mult, heavy_mult=size.heavy_mult)
        self.layer = layer.to(device)
        if arm in OTHERS:
            layer.router = OTHERS[arm]()
        elif size.start == "adverse":
            layer.router.get_parameter("weight").data.copy_(-self.data.mark)
        # in the light arm no token is chosen, so the heavy branch has no gradient
        layer.heavy.requires_grad_(arm != "light")
        self.optimizer = Lion([p for p in layer.parameters() if p.requires_grad], lr=size.lr)
        self.gradients = Gradients(self.loss, list(layer.parameters()), device)

    def forward(self, x: Tensor, planted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the chosen tokens (batch, k or 0)."""
        if isinstance(self.layer.router, OracleRouter):
            self.layer.router.planted = planted
        # no cache of cast weights: one from before a capture would be read inside it
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            y, routing = self.layer(x, return_routing=True)
        return y, routing.indices

    def loss(self, x: Tensor, target: Tensor, planted: Tensor) -> Tensor:
        """Mean square error, in units of what an output of zeros gets."""
        y, _ = self.forward(x, planted)
        error: Tensor = (y.float() - target).square().mean() / self.data.unit
        return error

    def step(self, share: float) -> None:
        """Take a training step at `share` of the peak learning rate."""
        batch = self.data.batch()
        self.optimizer.param_groups[0]["lr"] = self.size.lr * share
        self.gradients(batch.x, batch.target, batch.planted)
        self.optimizer.step()

    @torch.no_grad()
    def measure(self, batches: int = 8) -> dict[str, float]:
        """Loss on tokens never trained on, and the share of the planted tokens that was chosen."""
        self.layer.eval()
        loss, picked = 0.0, 0.0
        for _ in range(batches):
            batch = self.data.batch(held_out=True)
            y, chosen = self.forward(batch.x, batch.planted)
            loss += (y.float() - batch.target).square().mean().item() / self.data.unit / batches
            both = batch.planted.gather(1, chosen.clamp_min(0)) & (chosen >= 0)
            picked += both.sum().item() / batch.planted.sum().item() / batches
        self.layer.train()
        return {"loss": loss, "picked": picked}


OTHERS: dict[str, type[nn.Module]] = {"random": RandomRouter, "oracle": OracleRouter, "light": Nobody}
ARMS = ("learned", *OTHERS)


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: a rise over a tenth of the steps, then half a cosine to zero."""
    warmup = max(1, round(0.1 * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(task: Task) -> dict[str, Any]:
    """Train to the last step; return what was measured before the first step and after the last."""
    first, steps = task.measure(), task.size.steps
    for step in range(steps):
        task.step(rate(step, steps))
    return {"first": first, "final": task.measure()}


def table(folder: Path) -> str:
    """Return the means over seeds of a folder's records, an arm a row, as Markdown."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("planted*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        groups.setdefault((record["size"]["start"], record["arm"]), []).append(record)
    lines = ["| start | arm | seeds | loss | planted tokens chosen |", "|---|---|---|---|---|"]
    for (start, arm), runs in sorted(groups.items(), key=lambda item: (item[0][0], ARMS.index(item[0][1]))):
        losses = [run["final"]["loss"] for run in runs]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(runs) > 1 else ""
        first, last = (100 * statistics.fmean(run[when]["picked"] for run in runs) for when in ("first", "final"))
        loss = f"{statistics.fmean(losses):.3f}{spread}"
        lines.append(f"| {start} | {arm} | {len(runs)} | {loss} | {first:.1f} → {last:.1f} % |")
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Train what has no record yet, then write and show the table."""
    device = torch.device(pick_device(args.device))
    size = SIZES[args.size or ("full" if device.type == "cuda" else "small")]
    size = replace(size, start=args.start, steps=args.steps or size.steps)
    with doing(f"use {args.out}"):
        args.out.mkdir(parents=True, exist_ok=True)
    for seed, arm in itertools.product(dict.fromkeys(args.seed or range(5)), dict.fromkeys(args.arm or ARMS)):
        path = args.out / f"planted-{args.start}.{arm}.{seed}.json"
        if not path.exists():
            about = {"arm": arm, "seed": seed, "size": asdict(size), "device": device_name(device), **versions()}
            files.write(path, json.dumps(about | train(Task(arm, seed, size, device)), indent=1) + "\n")
    report = table(args.out)
    files.write(args.out / "report.md", report)
    for line in report.splitlines():
        say(line)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m research.planted", description=TEXT, formatter_class=form)
    add = parser.add_argument
    add("--size", choices=tuple(SIZES), help="small: two minutes on a CPU; full: for a GPU (default: by the device)")
    start_help = "where learned routers begin: anywhere, or pointing away from the planted tokens"
    add("--start", choices=("random", "adverse"), default="random", help=start_help)
    add("--arm", action="append", choices=ARMS, help="one arm; may be repeated (default: all)")
    add("--seed", action="append", type=number(0, 2**31), metavar="N", help="may be repeated (default: 0 to 4)")
    add("--steps", type=number(1, 10**8), metavar="N", help="training steps (default: by the size)")
    add("--device", choices=("auto", "cpu", "cuda"), help="where to train (default: auto, cuda if there is one)")
    add("--out", type=Path, default=Path("runs/planted"), metavar="DIR", help="default: runs/planted")
    parser.set_defaults(run=run)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
