"""Real text: guess hidden bytes, or each next byte, of Python's own sources and torch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import RouterOutput, TransformerBlock
from onepass.train import data
from onepass.train.language import ByteModel, routed

from .routes import use_chance, use_nobody
from .runner import Rates


@dataclass(frozen=True)
class Size:
    """How large model and steps are."""

    dim: int
    blocks: int
    heads: int
    n: int
    batch: int
    steps: int
    packages: tuple[str, ...] = ()  # their sources are read as well
    paths: tuple[str, ...] = ()  # text files and directories to read instead
    k: float = 1 / 16
    window: int = 128
    light_mult: float = 0.5  # hidden units of the light feed-forward, as a multiple of dim
    masked: float = 0.15
    lr: float = 4e-4
    # as `onepass train`
    outside: float = 10.0
    beta2: float = 0.95
    weight_decay: float = 0.1
    curve_windows: int = 32
    final_windows: int = 384

    def rates(self) -> Rates:
        """What the optimizer is given."""
        return Rates(self.lr, self.weight_decay, self.outside, self.beta2)


SIZES = {
    "small": Size(dim=32, blocks=2, heads=2, n=256, batch=4, steps=60, window=32, curve_windows=8, final_windows=32),
    # where the light branch sees far, or the text is read many times over, the heavy one has little to add: README
    "full": Size(dim=256, blocks=4, heads=8, n=2048, batch=8, steps=4000, packages=("torch",), k=1 / 8, window=32),
}


def build(arm: str, size: Size, causal: bool, hidden: int) -> ByteModel:
    """Make the model of an arm; equal seeds give equal initial weights to all arms with routed blocks."""
    k = 1.0 if arm == "all" else size.k
    blocks: Iterable[nn.Module] = routed(
        size.dim, size.blocks, k=k, heads=size.heads, window=size.window, causal=causal, light_mult=size.light_mult
    )
    if arm == "dense":
        form: dict[str, Any] = {"heads": size.heads, "dim_head": size.dim // size.heads, "causal": causal}
        blocks = (TransformerBlock(size.dim, hidden_dim=hidden, **form) for _ in range(size.blocks))
    model = ByteModel(size.dim, blocks, causal=causal)
    if arm == "random":
        use_chance(model)
    if arm == "light":
        use_nobody(model)
    return model


@functools.lru_cache(maxsize=1)
def corpus(paths: tuple[str, ...], packages: tuple[str, ...]) -> data.Corpus:
    """Read the text of the tasks; once, as every arm and seed has the same."""
    return data.load(paths, () if paths else packages)


class Task:
    """Model and data of one arm and one seed, as `runner.train` wants them."""

    def __init__(
        self, arm: str, seed: int, size: Size, device: torch.device, hidden: int = 0, *, causal: bool = False
    ) -> None:
        self.arm, self.size, self.device, self.causal = arm, size, device, causal
        text = corpus(size.paths, size.packages)
        # the whole text lies on the device: a batch is an index
        self.training, self.validation = (
            torch.from_numpy(part.copy()).to(device) for part in (text.training, text.validation)
        )
        self.starts = torch.from_numpy(data.validation_starts(text.validation, size.n + 1, size.final_windows))
        self.digest = text.digest
        self.draws = torch.Generator(device).manual_seed(seed + 1_000_003)
        torch.manual_seed(seed)
        self.model = build(arm, size, causal, hidden).to(device)
        self.before: dict[str, Tensor] = {}

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        size = self.size
        last = len(self.training) - size.n
        starts = torch.randint(last, (size.batch,), generator=self.draws, device=self.device)
        return self._ask(self.training, starts, self.draws)

    def _ask(self, text: Tensor, starts: Tensor, draws: torch.Generator) -> tuple[Tensor, ...]:
        """Tokens (batch, n), the places to guess, and the bytes there."""
        size = self.size
        windows = text[starts[:, None] + torch.arange(size.n + 1, device=self.device)].long()
        if self.causal:
            return windows[:, :-1], windows[:, 1:]
        tokens = windows[:, :-1]
        count = round(size.masked * size.n)
        places = torch.rand(tokens.shape, generator=draws, device=self.device).topk(count, -1).indices.sort(-1).values
        return tokens.scatter(1, places, data.MASK), tokens.gather(1, places), places

    def loss(self, tokens: Tensor, wanted: Tensor, places: Tensor | None = None) -> Tensor:
        logits, _ = self.model(tokens, places)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    @torch.no_grad()
    def measure(self, last: bool) -> dict[str, float]:
        """Validation bits per byte on text and masks that are the same for every arm, seed and step; the choices."""
        size = self.size
        # spread over the text: every so-many-th of the final windows
        some = self.starts[:: max(1, len(self.starts) // size.curve_windows)]
        starts = self.starts if last else some
        draws = torch.Generator(self.device).manual_seed(7)
        nats, count = 0.0, 0
        for first in range(0, len(starts), size.batch):
            asked = self._ask(self.validation, starts[first : first + size.batch].to(self.device), draws)
            logits, _ = self.model(asked[0], asked[2] if len(asked) > 2 else None)
            nats += F.cross_entropy(logits.flatten(0, 1), asked[1].flatten(), reduction="sum").double().item()
            count += asked[1].numel()
        figures = {"bits": nats / count / math.log(2)}
        if self.arm in ("learned", "random"):
            asked = self._ask(self.validation, some[: size.batch].to(self.device), draws.manual_seed(8))
            figures.update(self._choices(asked[0], self.model(asked[0])[1]))
        return figures

    def _choices(self, tokens: Tensor, routing: list[Any]) -> dict[str, float]:
        """What the routers chose in a batch that is always the same, by role, averaged over the blocks."""
        figures: dict[str, float] = {}
        for role, pick in ROLES.items():
            chosen = torch.stack([mark(pick(block).indices, tokens.shape[1]) for block in routing])
            total = chosen.sum((1, 2)).clamp_min(1)
            figures[f"{role}_chosen"] = chosen.float().mean().item()
            figures[f"{role}_entropy"] = float(np.mean([entropy(tokens[block]) for block in chosen]))
            if role in self.before:
                both = (chosen & self.before[role]).sum((1, 2))
                figures[f"{role}_kept"] = (both / total).mean().item()
            self.before[role] = chosen
            if len(routing) > 1:
                both = (chosen[1:] & chosen[:-1]).sum((1, 2))
                figures[f"{role}_shared"] = (both / total[1:]).mean().item()
            if not self.causal:
                hidden = tokens == data.MASK
                figures[f"{role}_of_masked"] = (chosen & hidden).sum().item() / hidden.sum().item() / len(routing)
        return figures

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.size), "causal": self.causal, "data": self.digest[:16], "bytes": len(self.training)}


ROLES: dict[str, Callable[[Any], RouterOutput]] = {
    "q": lambda block: block.attention.q,
    "kv": lambda block: block.attention.kv,
    "ff": lambda block: block.feed_forward,
}


def mark(indices: Tensor, n: int) -> Tensor:
    """Indices (batch, k) with −1 for none → which of n tokens are chosen, (batch, n) bool."""
    marks = torch.zeros(len(indices), n + 1, dtype=torch.bool, device=indices.device)
    return marks.scatter_(1, indices.where(indices >= 0, n), True)[:, :n]


def entropy(values: Tensor) -> float:
    """Bits of the distribution of byte values among the chosen tokens: over how many kinds a router spreads."""
    share = torch.bincount(values.flatten(), minlength=data.VOCABULARY).double()
    share = share[share > 0] / max(1, values.numel())
    return float(-(share * share.log2()).sum())
