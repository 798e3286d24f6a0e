"""A byte model of routed blocks: routed attention and routed feed-forward, causal or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn import RMSNorm, RoutedBlock
from onepass.nn.block import BlockRouting
from onepass.nn.cache import BlockCache
from onepass.train.data import VOCABULARY

NEIGHBOURS = 7  # width of the convolution after the embedding, in bytes


@dataclass
class ByteCache:
    """What a causal `ByteModel` keeps of the bytes before.

    Attributes:
        recent: ``(batch, dim, NEIGHBOURS − 1)``: the last embeddings, which the convolution reads; 0 before the first.
        blocks: one cache per block.
    """

    recent: Tensor
    blocks: list[BlockCache]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.recent.nbytes + sum(block.nbytes for block in self.blocks)


class ByteModel(nn.Module):
    """Byte embeddings, a depthwise convolution over neighbours, routed blocks, logits over the 256 bytes.

    With ``causal``, convolution and blocks read earlier bytes only: no output depends on a later byte.
    """

    def __init__(
        self, dim: int, blocks: int, *, k: int | float, heads: int, window: int, causal: bool,
        light_mult: float = 0.5, heavy_mult: float = 4.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.neighbours = nn.Conv1d(dim, dim, NEIGHBOURS, groups=dim)
        self.blocks = nn.ModuleList(
            RoutedBlock(
                dim, k, heads=heads, dim_head=dim // heads, window=window, causal=causal, light_mult=light_mult,
                heavy_mult=heavy_mult,
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, 256)
        nn.init.normal_(self.head.weight, std=dim**-0.5)
        nn.init.zeros_(self.head.bias)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings (batch, n, dim) of tokens (batch, n), each mixed with its neighbours."""
        x = self.embedding(tokens)
        around = (NEIGHBOURS - 1, 0) if self.causal else (NEIGHBOURS // 2, NEIGHBOURS // 2)
        return x + self.neighbours(F.pad(x.mT, around)).mT  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, asked: Tensor | None = None) -> tuple[Tensor, list[BlockRouting]]:
        """Return fp32 logits at all positions of (batch, n), or at `asked` (batch, m), and each block's routing."""
        x = self.embed(tokens)
        routing: list[BlockRouting] = []
        for block in self.blocks:
            x, chosen = block(x, return_routing=True)
            routing.append(chosen)
        if asked is not None:
            x = x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x)).float(), routing

    def new_cache(self, batch: int, max_bytes: int = 4096) -> ByteCache:
        """Return the cache of `batch` texts without bytes; raise as `RoutedBlock.new_cache` does."""
        weight = self.embedding.weight
        recent = torch.zeros(batch, weight.shape[1], NEIGHBOURS - 1, dtype=weight.dtype, device=weight.device)
        return ByteCache(recent, [block.new_cache(batch, max_bytes) for block in self._blocks()])

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: ByteCache) -> Tensor:
        """Return fp32 logits (batch, 256) of the byte after one more byte (batch,) of each text; update the cache."""
        x = self._embed_more(tokens[:, None], cache)[:, 0]
        for block, kept in zip(self._blocks(), cache.blocks, strict=True):
            x = block.step(x, kept)
        return self.head(self.norm(x)).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: ByteCache) -> Tensor:
        """Return fp32 logits (batch, 256) of the byte after n > 0 bytes (batch, n), read at once; fill a new cache."""
        x = self._embed_more(tokens, cache)
        for block, kept in zip(self._blocks(), cache.blocks, strict=True):
            x = block.prefill(x, kept)
        return self.head(self.norm(x[:, -1])).float()  # type: ignore[no-any-return]

    def _embed_more(self, tokens: Tensor, cache: ByteCache) -> Tensor:
        """Return embeddings (batch, n, dim) of bytes that follow those of the cache."""
        x = self.embedding(tokens)
        around = torch.cat((cache.recent, x.mT), -1)
        cache.recent = around[..., -(NEIGHBOURS - 1) :].clone()
        return x + self.neighbours(around).mT  # type: ignore[no-any-return]

    def _blocks(self) -> list[RoutedBlock]:
        return list(self.blocks)  # type: ignore[arg-type]
