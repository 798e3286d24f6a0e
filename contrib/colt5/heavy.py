"""The branches of colt5-attention's routed attention: local, within a window, and to routed tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.nn.count import check_int
from onepass.nn.norm import LayerNorm
from onepass.ops.span_attention.op import rotary, span_attention

from .router import ScaledNorm


class LocalAttention(nn.Module):
    """Each token sees `window` tokens to either side; causal: its own window up to itself, and the one before."""

    def __init__(self, dim: int, heads: int, dim_head: int, window: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.dim_head, self.window, self.causal = heads, dim_head, window, causal
        self.norm = LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        at, w = torch.arange(x.shape[1], device=x.device), self.window
        first, last = ((at // w - 1) * w, at + 1) if self.causal else (at - w, at + w + 1)
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim_head)).unbind(2)
        return self.to_out(span_attention(q, k, v, first, last, mask=mask).flatten(2))  # type: ignore[no-any-return]


class WindowAttention(nn.Module):
    """Each token sees all tokens of its sequence, which is one window of an image."""

    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.dim_head = heads, dim_head
        self.norm = ScaledNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.dim_head)).unbind(2)
        return self.to_out(_all_keys(q, k, v, None).flatten(2))  # type: ignore[no-any-return]


class HeavyAttention(nn.Module):
    """Attention of queries (batch, n, dim) to memories (batch, [routes,] m, dim), and to a learned one.

    The routes share the heads evenly. Gates (batch, n) multiply the queries, gates (batch, [routes,] m) the values.
    With positions of the same shapes, queries and keys are rotated.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, multiply_keys_by_score: bool) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("heads", heads), ("dim_head", dim_head)):
            check_int("attention", name, size)
        self.heads, self.dim_head, self.multiply_keys_by_score = heads, dim_head, multiply_keys_by_score
        self.norm = ScaledNorm(dim)
        self.null_kv = nn.Parameter(torch.randn(2, heads, dim_head))
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(
        self, x: Tensor, memories: Tensor, *, mask: Tensor | None = None, gates_q: Tensor | None = None,
        gates_kv: Tensor | None = None, positions: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        memories = memories[:, None] if memories.dim() == 3 else memories
        batch, routes, m, _ = memories.shape
        rows, h, d = batch * routes, self.heads // routes, self.dim_head
        q = self.to_q(self.norm(x)).unflatten(-1, (self.heads, d))
        # per head, the first half of the rows gives keys and the second values
        weight = self.to_kv.weight.view(routes, -1, x.shape[-1])
        kv = (self.norm(memories) @ weight.mT).reshape(rows, m, h, 2 * d)
        k, v = kv.chunk(2, dim=-1)
        if gates_q is not None:
            q = q * gates_q[..., None, None].to(q.dtype)
        if gates_kv is not None:
            gate = gates_kv.reshape(rows, m, 1, 1).to(v.dtype)
            v = v * gate
            k = k * gate if self.multiply_keys_by_score else k
        if positions is not None:
            q, k = rotary(q, positions[0]), rotary(k, positions[1].reshape(rows, m))
        q = q.unflatten(2, (routes, h)).transpose(1, 2).flatten(0, 1)
        null = self.null_kv.to(k.dtype).view(2, 1, routes, 1, h, d).expand(-1, batch, -1, -1, -1, -1).flatten(1, 2)
        if mask is not None:
            mask = F.pad(mask.reshape(rows, m), (1, 0), value=True)
        y = _all_keys(q, torch.cat((null[0], k), 1), torch.cat((null[1], v), 1), mask)
        y = y.view(batch, routes, x.shape[1], h * d).transpose(1, 2)
        return self.to_out(y.flatten(2))  # type: ignore[no-any-return]


def _all_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    first = torch.zeros(q.shape[1], dtype=torch.int32, device=q.device)
    return span_attention(q, k, v, first, first + k.shape[1], mask=mask)
