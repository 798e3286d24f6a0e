"""The definitions of `span_attention` and the rotation, and the torch path.

Tiles lie on a fixed grid, as in the kernels. Other queries may add a tile to a query's sums, but only one of exact
zeros, so that the last bit of a result does not depend on the other queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def in_two(x: float) -> tuple[float, float]:
    """Return x as a sum of two numbers; the first is exact in fp32, the dtype in which numbers reach a kernel."""
    # fp32 numbers in [1/2, 1) are multiples of 2⁻²⁴
    scale = 2.0**24 / 2.0 ** math.frexp(x)[1]
    high = round(x * scale) / scale
    return high, x - high


# the slowest pair of channels turns once in about 2π·BASE positions
BASE = 10_000.0
LOG2_BASE = in_two(math.log2(BASE))


def scale_of(q: Tensor) -> float:
    """Return 1/√width, by which products of queries and keys are scaled."""
    return 1 / math.sqrt(max(q.shape[-1], 1))


def reference(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q·kᵀ/√width) v over the keys first_i ≤ j < last_i that mask allows; 0 without such a key."""
    acc = torch.promote_types(q.dtype, torch.float32)
    keys = torch.arange(k.shape[1], device=q.device)
    visible = (keys >= first[..., None]) & (keys < last[..., None])
    visible = visible.expand(q.shape[0], *visible.shape[-2:])
    if mask is not None:
        visible = visible & mask[:, None]
    scores = torch.einsum("bnhd,bmhd->bhnm", q.to(acc), k.to(acc)) * scale_of(q)
    visible = visible[:, None]
    # a query that sees no key would give 0/0
    p = scores.masked_fill(~visible, -math.inf).masked_fill(~visible.any(-1, keepdim=True), 0.0).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", p.masked_fill(~visible, 0.0), v.to(acc)).to(q.dtype)


def rotate(x: Tensor, positions: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (x_c, x_{c + width/2}) of x (batch, n, heads, width) by position·BASE^(−2c/width)."""
    width = x.shape[-1]
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    speeds = BASE ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / width)
    acc = torch.promote_types(x.dtype, torch.float32)
    angle = (positions[..., None] * speeds)[..., None, :]
    cos, sin = angle.cos().to(acc), angle.sin().to(acc)
    if inverse:
        sin = -sin
    a, b = x.to(acc).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


QUERIES = KEYS = 128


class _Rows:
    """A tile of queries of one sequence: `at` (slice), and the tiles of keys that any of them sees."""

    def __init__(self, b: int, at: slice, first: Tensor, last: Tensor, n_keys: int, mask: Tensor | None) -> None:
        self.b, self.at, self.mask = b, at, mask
        self.first, self.last = first[min(b, len(first) - 1), at, None], last[min(b, len(last) - 1), at, None]
        low, high = max(int(self.first.min()), 0), min(int(self.last.max()), n_keys)
        starts = range(low // KEYS * KEYS, high, KEYS) if low < high else ()
        self.tiles = [slice(start, min(start + KEYS, n_keys)) for start in starts]

    def scores(self, q: Tensor, k: Tensor, tile: slice) -> Tensor:
        """Return the scores (heads, queries, keys) of one tile; −inf where a query does not see a key."""
        keys = torch.arange(tile.start, tile.stop, device=q.device)
        visible = (keys >= self.first) & (keys < self.last)
        if self.mask is not None:
            visible = visible & self.mask[self.b, tile]
        return (self.of(q, self.at) @ self.keys(k, tile).mT * scale_of(q)).masked_fill_(~visible, -math.inf)

    def of(self, t: Tensor, at: slice) -> Tensor:
        """Return rows of a (batch, length, heads, width) tensor as (heads, rows, width), in fp32 or wider."""
        return t[self.b, at].transpose(0, 1).to(torch.promote_types(t.dtype, torch.float32))

    def keys(self, t: Tensor, tile: slice) -> Tensor:
        """Return `of` for keys or values, zeros where masked: the content of padding must not reach a product."""
        rows = self.of(t, tile)
        return rows if self.mask is None else rows.masked_fill(~self.mask[self.b, tile, None], 0.0)


def _rows(q: Tensor, k: Tensor, first: Tensor, last: Tensor, mask: Tensor | None) -> Iterator[_Rows]:
    n = q.shape[1]
    for b in range(q.shape[0]):
        for start in range(0, n, QUERIES):
            rows = _Rows(b, slice(start, min(start + QUERIES, n)), first, last, k.shape[1], mask)
            if rows.tiles:
                yield rows


def _weighted(p: Tensor, values: Tensor) -> Tensor:
    """Return p @ values, where an exact 0 of p keeps out a NaN or an infinity: a query must not get what it can't see.

    A sum that is finite costs one pass over the result.
    """
    y = p @ values
    if math.isfinite(float(y.sum())):
        return y
    not_finite = ~values.isfinite()
    reached = (p != 0).to(p.dtype) @ not_finite.to(p.dtype) > 0
    return torch.where(reached, y, p @ values.masked_fill(not_finite, 0.0))


def forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output (B, N, H, D) and the logarithms of the softmax's denominators (B, H, N), +inf without a key."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.promote_types(q.dtype, torch.float32)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.inf, dtype=acc, device=q.device)
    for rows in _rows(q, k, first, last, mask):
        scores = [rows.scores(q, k, tile) for tile in rows.tiles]
        top = torch.stack([s.amax(-1) for s in scores]).amax(0)
        top.masked_fill_(top == -math.inf, 0.0)
        total, y = torch.zeros_like(top), torch.zeros_like(rows.of(q, rows.at))
        for s, tile in zip(scores, rows.tiles, strict=True):
            p = (s - top[..., None]).exp_()
            total += p.sum(-1)
            y += _weighted(p, rows.keys(v, tile))
        lse[rows.b, :, rows.at] = torch.where(total > 0, top + total.log(), math.inf)
        # a NaN stays NaN: only a query without keys has a total of 0
        y = torch.where(total[..., None] == 0, 0.0, y / total[..., None])
        out[rows.b, rows.at] = y.transpose(0, 1).to(q.dtype)
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor, last: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv by the gradient of softmax; tiles are visited in order, so sums repeat bit for bit."""
    acc = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(t.shape, dtype=acc, device=t.device) for t in (q, k, v))
    for rows in _rows(q, k, first, last, mask):
        b, at = rows.b, rows.at
        qs, do = rows.of(q, at), rows.of(dout, at)
        delta = (do * rows.of(out, at)).sum(-1, keepdim=True)
        for tile in rows.tiles:
            p = (rows.scores(q, k, tile) - lse[b, :, at, None]).exp_()
            ds = p * (do @ rows.keys(v, tile).mT - delta) * scale_of(q)
            if not math.isfinite(float(ds.sum())):
                ds.masked_fill_(p == 0, 0.0)
            dq[b, at] += _weighted(ds, rows.keys(k, tile)).transpose(0, 1)
            dk[b, tile] += _weighted(ds.mT, qs).transpose(0, 1)
            dv[b, tile] += _weighted(p.mT, do).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
