"""The definitions of `score`, `gather`, `scatter_add`: the tests' oracle, and what runs on a CPU or in float64.

Tokens are rows of (batch·n, dim) there; rows without an index are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops._shared.arguments import accumulator


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return s[..., t] = <x_t, v> / sqrt(mean(x_t²) + eps); with vectors (R, d) s[..., r, t]."""
    scores, _ = score_forward(x, weight.view(-1, x.shape[-1]), eps)
    return scores if weight.dim() == 2 else scores[:, 0]


def present(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return which indices name a token, and the indices with 0 in place of the others."""
    named = (indices >= 0) & (indices < n)
    return named, indices.where(named, 0)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return y[b, j] = x[b, i_j], zeros where i_j names no token."""
    if not x.shape[1]:
        # an empty sum: zeros that autograd can trace back to x
        return x.sum() * x.new_zeros((*indices.shape, x.shape[-1]))
    named, columns = present(indices.flatten(1), x.shape[1])
    rows = x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1])).view(*indices.shape, x.shape[-1])
    return rows.where(named.view(indices.shape)[..., None], 0)  # no view: autograd forbids to change one in place


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    """Return y after y[b, i_j] += gates[b, j]·update[b, j] for each i_j that names a token; one rounding per route."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device).copy_(y)
    if out.numel() and indices.numel():
        add_rows(out.flatten(0, -2), update, gates, indices)
    return out


def score_forward(x: Tensor, vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return scores (batch, R, n) and 1/rms (batch, n) for x (batch, n, d) and vectors (R, d)."""
    wide = accumulator(x, vectors)
    f = x.to(wide).contiguous()
    inverse = torch.rsqrt(row_sum(f.square())[..., 0] / x.shape[-1] + eps)
    # no matrix product: a token's score must not depend on its place or on the other tokens
    dots = torch.stack([row_sum(f * v)[..., 0] for v in vectors.to(wide)], 1)
    out = accumulator(x)
    return (dots * inverse[:, None]).to(out), inverse.to(out)


def score_backward(
    ds: Tensor, x: Tensor, vectors: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and the gradient of the vectors for ds (batch, R, n); tokens whose ds are all 0 are left out."""
    wide = accumulator(x, vectors)
    # the content of a masked token, NaN included, must not reach the vectors
    live = (ds != 0).any(1)
    ds, inverse = ds.to(wide), inverse.where(live, 0).to(wide)
    f = x.to(wide).where(live[..., None], 0)
    along_v = (ds * inverse[:, None]).mT
    dx = None
    if need_x:
        along_x = (ds * scores.where(live[:, None], 0).to(wide)).sum(1) * inverse.square() / x.shape[-1]
        dx = (along_v @ vectors.to(wide) - along_x[..., None] * f).to(x.dtype)
    dw = (along_v.flatten(0, 1).mT @ f.flatten(0, 1)).to(vectors.dtype) if need_w else None
    return dx, dw


def add_rows(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, shift: Tensor | None = None) -> None:
    """Add gates·(update − shift) in place to y (batch·n, d), one route after another; shapes as in `scatter_add`."""
    batch, k, d = len(indices), indices.shape[-1], y.shape[-1]
    n, wide = len(y) // batch, accumulator(y, update, gates)
    update, by_route = update.reshape(batch, -1, k, d), indices.reshape(batch, -1, k)
    for r in range(by_route.shape[1]):
        named, columns = present(by_route[:, r], n)
        rows = (columns + torch.arange(batch, device=y.device)[:, None] * n)[named]
        added = update[:, r][named].to(wide)
        added = added if shift is None else added - shift
        if gates is not None:
            added = added * gates.reshape(batch, -1, k)[:, r][named][:, None].to(wide)
        y[rows] = (y[rows].to(wide) + added).to(y.dtype)


def add_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, need_u: bool, need_g: bool, shift: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return gates·dy[i] and <dy[i], update − shift> for dy (batch, n, d), 0 where an index names no token."""
    wide = accumulator(dy, update, gates)
    named, _ = present(indices, dy.shape[1])
    dy_rows, du, dg = gather(dy, indices).to(wide), None, None
    if need_u:
        du = (dy_rows if gates is None else dy_rows * gates.where(named, 0)[..., None].to(wide)).to(update.dtype)
    if need_g and gates is not None:
        u = update.where(named[..., None], 0).to(wide)
        dg = torch.linalg.vecdot(dy_rows, u if shift is None else u - shift).to(gates.dtype)
    return du, dg


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (batch, n, d) with zeros where the mask (batch, n) is False."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
