"""A model of bytes: an embedding that sees a byte's neighbours, any blocks, a guess of bytes; causal or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import Decoder, RMSNorm
from onepass.train.data import VOCABULARY

NEIGHBOURS = 7  # width of the convolution after the embedding, in bytes


class ByteModel(nn.Module):
    """Byte embeddings, a depthwise convolution over neighbours, blocks, logits over the 256 bytes.

    A small model with rotary positions alone hardly tells a byte's direct neighbours apart; the convolution provides
    them from the first step. With ``causal``, it reads earlier bytes only, as causal blocks do: no output depends on a
    later byte. Blocks are called with ``(x, return_routing=True)``.
    """

    def __init__(self, dim: int, blocks: Iterable[nn.Module], *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.neighbours = nn.Conv1d(dim, dim, NEIGHBOURS, groups=dim)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 256)
        nn.init.normal_(self.head.weight, std=dim**-0.5)
        nn.init.zeros_(self.head.bias)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings (batch, n, dim) of tokens (batch, n), each mixed with its neighbours."""
        x = self.embedding(tokens)
        padding = (NEIGHBOURS - 1, 0) if self.causal else (NEIGHBOURS // 2, NEIGHBOURS // 2)
        return x + self.neighbours(F.pad(x.mT, padding)).mT  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Return fp32 logits at all positions of (batch, n), or at `positions` (batch, m), and each block's routing."""
        x = self.embed(tokens)
        routing: list[Any] = []
        for block in self.blocks:
            x, chosen = block(x, return_routing=True)
            routing.append(chosen)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        return self._logits(x), routing

    def decoder(self, batch: int, max_tokens: int, **options: Any) -> Decoder:
        """Return a `Decoder` that writes bytes after prompts; options and errors are its own."""
        blocks: Any = self.blocks
        return Decoder(
            blocks, self._embed_some, self._logits, batch=batch, max_tokens=max_tokens, lookback=NEIGHBOURS - 1,
            **options,
        )  # fmt: skip

    def _embed_some(self, tokens: Tensor) -> Tensor:
        """Return `embed` of bytes (batch, n), where −1 stands for none before the first."""
        x = self.embedding(tokens.clamp_min(0)).masked_fill((tokens < 0)[..., None], 0)
        return x + self.neighbours(F.pad(x.mT, (NEIGHBOURS - 1, 0))).mT  # type: ignore[no-any-return]

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).float()  # type: ignore[no-any-return]
