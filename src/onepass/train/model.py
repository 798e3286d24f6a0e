"""The models of both tasks: an encoder that guesses hidden bytes, a language model that guesses each next byte."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import BlockRouting, RMSNorm, RoutedFeedForward, RouterOutput
from onepass.train.config import Config
from onepass.train.data import VOCABULARY
from onepass.train.language import ByteModel

ROTARY_BASE = 10_000.0


class Guess(NamedTuple):
    """A model's output.

    Attributes:
        logits: ``(batch, m, 256)`` at the asked positions.
        routings: what the routed layers chose, by their names.
    """

    logits: Tensor
    routings: dict[str, RouterOutput | BlockRouting]

    @property
    def chosen(self) -> list[Tensor]:
        """The tokens (batch, k) that each block's heavy feed-forward sees."""
        routings = self.routings.values()
        return [(r.feed_forward if isinstance(r, BlockRouting) else r).indices for r in routings]


class Attention(nn.Module):
    """Pre-norm attention over all tokens, or causal, with rotary positions; the caller adds the residual."""

    def __init__(self, dim: int, heads: int, blocks: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.qkv.weight, std=dim**-0.5)
        # each of the 2·blocks branches starts small enough that their sum in the residual stream does not grow
        nn.init.normal_(self.out.weight, std=(2 * blocks * dim) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, n, dim))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i + d/2}) of (…, n, d) by the angle of its position; cos and sin are (n, d/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def angles(n: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (n, width/2) of the rotary positions 0 … n−1, in fp32."""
    speed = ROTARY_BASE ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(n, device=device, dtype=torch.float32)[:, None] * speed
    return angle.cos(), angle.sin()


class Block(nn.Module):
    """x + attention(x), then x + routed feed-forward(x)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.blocks)
        self.feed_forward = RoutedFeedForward(
            config.dim, config.routed, light_mult=config.light_mult, heavy_mult=config.heavy_mult
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, RouterOutput]:
        x = x + self.attention(x, cos, sin)
        y, routing = self.feed_forward(x, return_routing=True)
        return x + y, routing


class RoutedEncoder(nn.Module):
    """Byte embeddings with a 7-wide depthwise convolution, pre-norm blocks, a guess at every asked position.

    A small model with rotary positions alone hardly distinguishes a byte's direct neighbours; the convolution provides
    them from the first step.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.dim // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.neighbours = nn.Conv1d(config.dim, config.dim, 7, padding=3, groups=config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, 256)
        nn.init.normal_(self.head.weight, std=config.dim**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, asked: Tensor) -> Guess:
        """Guess the bytes at `asked` (batch, m) of `tokens` (batch, n)."""
        x = self.embedding(tokens)
        x = x + self.neighbours(x.mT).mT
        cos, sin = angles(tokens.shape[1], self.head_width, tokens.device)
        routings: dict[str, RouterOutput | BlockRouting] = {}
        for i, block in enumerate(self.blocks):
            x, routings[f"blocks.{i}.feed_forward"] = block(x, cos, sin)
        x = x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1]))
        return Guess(self.head(self.norm(x)).float(), routings)


class RoutedLanguageModel(ByteModel):
    """A causal `ByteModel` of a configuration, with the call of `RoutedEncoder`."""

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.dim, config.blocks, k=config.routed, heads=config.heads, window=min(config.window, config.seq),
            causal=True, light_mult=config.light_mult, heavy_mult=config.heavy_mult,
        )  # fmt: skip

    def forward(self, tokens: Tensor, asked: Tensor) -> Guess:  # type: ignore[override]
        """Guess at every position of `tokens` (batch, n) the byte that follows it; `asked` is not read."""
        logits, routing = super().forward(tokens)
        return Guess(logits, {f"blocks.{i}": each for i, each in enumerate(routing)})


Model = RoutedEncoder | RoutedLanguageModel


def new(config: Config) -> Model:
    """Return the model of a configuration with initial weights; torch's global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return RoutedLanguageModel(config) if config.task == "causal" else RoutedEncoder(config)


def parameter_groups(model: nn.Module, weight_decay: float, outside: float = 1.0) -> list[dict[str, object]]:
    """Return groups with a weight decay and a `scale` of the learning rate: 1 in the blocks, `outside` elsewhere.

    Only matrices that multiply tokens decay; embeddings, convolution, gains, biases and routing vectors don't.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or name.startswith(("embedding", "neighbours")) or "router" in name
        scale = 1.0 if name.startswith("blocks.") else outside
        groups.setdefault((scale, 0.0 if plain else weight_decay), []).append(parameter)
    return [{"params": params, "scale": scale, "weight_decay": decay} for (scale, decay), params in groups.items()]
