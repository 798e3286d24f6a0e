"""The byte model of every family: embedding, a convolution over seven bytes, blocks, logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import onepass
from onepass.nn import Experts, RMSNorm, RoutedBlock, TransformerBlock
from onepass.nn.transformer import EPS, SelfAttention, angles
from onepass.train.data import VOCABULARY
from research.budget.runs import HEAD, SIDE, Run

NEIGHBOURS = 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ByteModel(nn.Module):
    """Tokens (batch, n) → fp32 logits of 256 bytes at all places, or at `positions` (batch, m)."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.causal, self.stream = run.task == "next", DTYPES[run.stream]
        self.embedding = nn.Embedding(VOCABULARY, run.width)
        self.grams = nn.ModuleList(Grams(size, run.grams, run.width) for size in ((2, 3) if run.grams else ()))
        self.neighbours = nn.Conv1d(run.width, run.width, NEIGHBOURS, groups=run.width)
        self.blocks = nn.ModuleList(block(run, place, self.causal) for place in range(run.depth))
        self.norm = RMSNorm(run.width)
        self.head = nn.Linear(run.width, 256)
        nn.init.normal_(self.head.weight, std=run.width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.to(DTYPES[run.weights])

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for table in self.grams:
            x = x + table(tokens)
        padding = (NEIGHBOURS - 1, 0) if self.causal else (NEIGHBOURS // 2, NEIGHBOURS // 2)
        x = (x + self.neighbours(F.pad(x.mT, padding)).mT).to(self.stream)
        for layer in self.blocks:
            x = layer(x)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
        return self.head(self.norm(x)).float()  # type: ignore[no-any-return]


def block(run: Run, place: int, causal: bool) -> nn.Module:
    """Return one block of a family; the last one of every `run.every` is global."""
    if run.family == "routed":
        return RoutedBlock(
            run.width, run.share, heads=run.width // HEAD, dim_head=HEAD, window=run.window, causal=causal,
            light_mult=run.light,
        )  # fmt: skip
    sees_all = run.family == "dense" or (run.family != "windows" and place % run.every == run.every - 1)
    experts = run.experts if run.family == "experts" else 0
    layer = TransformerBlock(
        run.width, dim_head=HEAD, window=None if sees_all else run.window, causal=causal, hidden_dim=run.inner,
        num_experts=experts, top_k=run.top_k,
    )  # fmt: skip
    if sees_all and run.chosen:
        layer.attention = Chosen(run)
    if experts and run.shared:
        shared = int(run.shared * run.width)
        layer.feed_forward = Experts(run.width, experts, run.top_k, hidden_dim=run.inner, shared_dim=shared)
    return layer


class Grams(nn.Module):
    """A table whose row is a hash of the last `size` bytes; zeros before training."""

    def __init__(self, size: int, rows: int, dim: int) -> None:
        super().__init__()
        self.size, self.table = size, nn.Embedding(rows, dim)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        key = tokens
        for back in range(1, self.size):
            key = key * VOCABULARY + F.pad(tokens, (back, 0))[:, : tokens.shape[1]]
        # the high bits of a product with the golden ratio
        return self.table((key * 0x9E3779B1 % 2**32) * self.table.num_embeddings >> 32)  # type: ignore[no-any-return]


class Chosen(SelfAttention):
    """Causal attention to the own block of `SIDE` keys and to `count` earlier ones, which the queries choose.

    The first query of a block chooses for all of it, each head for itself: the earlier blocks whose mean key has the
    largest product with it. No later one may, as the earlier ones would then depend on it.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.width, run.width // HEAD, HEAD, None, True)
        self.count = run.chosen

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim_head)).unbind(2)
        cos, sin = angles(x.shape[1], self.dim_head, q)
        q, k = onepass.qk_norm_rope(q, k, self.q_weight, self.k_weight, cos=cos, sin=sin, eps=EPS)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attend = _compiled if x.is_cuda else flex_attention
        y: Any = attend(q, k, v, block_mask=self.mask(q.detach(), k.detach()))
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @torch.no_grad()
    def mask(self, q: Tensor, k: Tensor) -> BlockMask:
        """Return which blocks the queries read; made on the device."""
        means = torch.unflatten(k, 2, (-1, SIDE)).mean(3)
        m = means.shape[2]
        past = torch.ones(m, m, dtype=torch.bool, device=q.device).tril(-1)
        scores = (q[:, :, ::SIDE] @ means.mT).float().masked_fill(~past, -torch.inf)
        # −1 where there are fewer earlier blocks: then all of them are chosen, the first one too
        picked = onepass.topk(scores, min(self.count, m)).indices.clamp_min(0)
        reads = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, picked, True) & past
        own = torch.arange(m, dtype=torch.int32, device=q.device).expand(*scores.shape[:2], m)
        # rows of places, those that count first
        order = reads.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        blocks: BlockMask = BlockMask.from_kv_blocks(
            torch.ones_like(own), torch.cat((own[..., None], order[..., 1:]), -1), reads.sum(-1, dtype=torch.int32),
            order, BLOCK_SIZE=SIDE, mask_mod=_earlier,
        )  # fmt: skip
        return blocks


def _earlier(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


_compiled: Any = torch.compile(flex_attention, dynamic=False)
