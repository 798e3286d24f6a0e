"""The routed encoder: it reads a sequence of bytes, some of them hidden, and guesses the hidden ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import RMSNorm, RoutedFeedForward, RouterOutput
from onepass.nn.routed import FeedForward
from onepass.train.config import Config
from onepass.train.data import VOCABULARY

ROTARY_BASE = 10_000.0
# draws of a random router while measuring must not repeat those of training
MEASURING_DRAWS = 2**40


class Guess(NamedTuple):
    """What the encoder says: `logits` (batch, m, 256) at the asked places, `chosen` (blocks, batch, k) heavy tokens."""

    logits: Tensor
    chosen: Tensor


class RandomRouter(nn.Module):
    """Choose k random tokens and give all of them gate 1: what a learned router has to beat at equal compute.

    `draw` names the choice: equal draws choose equal tokens, whatever was asked before, so nothing random has to be
    saved with a checkpoint.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draw = 0

    def forward(self, x: Tensor, k: int, mask: Tensor | None = None) -> RouterOutput:
        random = torch.Generator().manual_seed((self.seed * 1_000_003 + self.draw) % 2**63)
        scores = torch.rand(x.shape[:2], generator=random).to(x.device)
        if mask is not None:
            scores = scores.masked_fill(~mask, -1.0)
        best, indices = scores.topk(min(k, x.shape[1]), dim=-1)
        real = best >= 0
        return RouterOutput(indices.where(real, -1), real.to(x.dtype), scores)


class Attention(nn.Module):
    """Pre-norm attention of every token to every token, with rotary positions; no residual inside."""

    def __init__(self, dim: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.qkv.weight, std=dim**-0.5)
        # the residual stream adds up two branches a block: each starts small enough that the sum does not grow
        nn.init.normal_(self.out.weight, std=(2 * blocks * dim) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(y.transpose(1, 2).reshape(b, n, dim))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i + d/2}) of (…, n, d) by its position's angle; cos and sin are (n, d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def angles(n: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (n, width/2) of the rotary positions 0 … n−1, in fp32."""
    speed = ROTARY_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(n, device=device, dtype=torch.float32)[:, None] * speed
    return angle.cos(), angle.sin()


class Block(nn.Module):
    """x + attention(x), then x + feed-forward(x): routed, or the light branch alone when nobody chooses."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.blocks)
        self.feed_forward: RoutedFeedForward | FeedForward
        if config.route == "none":
            self.feed_forward = FeedForward(config.dim, max(1, int(config.dim * config.light_mult)))
            return
        router = RandomRouter(config.seed * 257 + index) if config.route == "random" else None
        self.feed_forward = RoutedFeedForward(
            config.dim, config.routed, light_mult=config.light_mult, heavy_mult=config.heavy_mult, router=router
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(x, cos, sin)
        if isinstance(self.feed_forward, FeedForward):
            return x + self.feed_forward(x), torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
        y, routing = self.feed_forward(x, return_routing=True)
        return x + y, routing.indices


class RoutedEncoder(nn.Module):
    """Byte embeddings with a 7-wide depthwise convolution, pre-norm blocks, a guess for every position asked for.

    Rotary positions alone leave a byte's direct neighbours hard to tell apart for a small model; the convolution
    gives them to it from the first step.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.dim // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.neighbours = nn.Conv1d(config.dim, config.dim, 7, padding=3, groups=config.dim)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.blocks))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, 256)
        nn.init.normal_(self.head.weight, std=config.dim**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, asked: Tensor, *, draw: int = 0) -> Guess:
        """Guess the bytes at `asked` (batch, m) of `tokens` (batch, n); `draw` names a random router's choices."""
        for module in self.modules():
            if isinstance(module, RandomRouter):
                module.draw = draw
        x = self.embedding(tokens)
        x = x + self.neighbours(x.mT).mT
        cos, sin = angles(tokens.shape[1], self.head_width, tokens.device)
        chosen = []
        for block in self.blocks:
            x, indices = block(x, cos, sin)
            chosen.append(indices)
        x = x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1]))
        return Guess(self.head(self.norm(x)).float(), torch.stack(chosen))


def new(config: Config) -> RoutedEncoder:
    """Make the model of a configuration with its initial weights, leaving torch's global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return RoutedEncoder(config)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for the matrices that multiply tokens, none for embeddings, gains, biases and routing vectors."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or name.startswith(("embedding", "neighbours")) or "router" in name
        (others if plain else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
