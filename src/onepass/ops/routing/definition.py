"""The definitions of `score`, `gather`, `scatter_add`: the tests' oracle; and what a CPU, float64 and no Triton run.

Tokens are rows of (batch·n, dim) there; rows without an index are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over these dtypes: fp32, or fp64 if one of them is."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def score(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return s[..., t] = <x_t, v> / sqrt(mean(x_t²) + eps); with vectors (R, d) s[..., r, t]."""
    wide = widest(x.dtype, weight.dtype)
    f = x.to(wide)
    inverse = (f.square().mean(-1) + eps).rsqrt()
    v = weight.to(wide)
    s = (f * v).sum(-1) * inverse if weight.dim() == 1 else (f @ v.mT).mT * inverse[..., None, :]
    return s.to(widest(x.dtype))


def present(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return which indices name a token, and the indices with 0 in place of the others."""
    found = (indices >= 0) & (indices < n)
    return found, indices.where(found, 0)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return y[b, j] = x[b, i_j], zeros where i_j names no token."""
    if not x.shape[1]:
        # an empty sum: zeros that autograd can trace back to x
        return x.sum() * x.new_zeros((*indices.shape, x.shape[-1]))
    found, columns = present(indices.flatten(1), x.shape[1])
    rows = x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
    return rows.where(found[..., None], 0).view(*indices.shape, x.shape[-1])


def scatter_add(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor) -> Tensor:
    """Return y after y[b, i_j] += gates[b, j]·update[b, j] for each i_j that names a token; one rounding per route."""
    batch = indices.shape[0]
    n = y.numel() // max(1, batch * y.shape[-1])
    if not n or not indices.numel():
        return y.clone()
    out = y.view(batch, n, -1) if y.dim() == 2 else y
    wide = widest(*(t.dtype for t in (y, update, gates) if t is not None))
    routes = indices.shape[1] if indices.dim() == 3 else 1
    by_route = indices.view(batch, routes, -1)
    moved = update.view(batch, routes, -1, update.shape[-1]).to(wide)
    if gates is not None:
        moved = moved * gates.view(batch, routes, -1, 1).to(wide)
    for r in range(routes):
        found, columns = present(by_route[:, r], n)
        rows = columns[..., None].expand(-1, -1, y.shape[-1])
        out = out.to(wide).scatter_add(1, rows, moved[:, r].where(found[..., None], 0)).to(y.dtype)
    return out.view(y.shape)


def rows_of(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return which of the batch·k indices name a token, and the rows of those among batch·n tokens."""
    found = (indices >= 0) & (indices < n)
    rows = indices + torch.arange(indices.shape[0], device=indices.device)[:, None] * n
    return found.view(-1), rows[found]


def score_forward(x: Tensor, vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return scores (batch, R, n) and 1/rms (batch, n) for x (batch, n, d) and vectors (R, d)."""
    wide = widest(x.dtype, vectors.dtype)
    f = x.to(wide).contiguous()
    inverse = torch.rsqrt(row_sum(f.square())[..., 0] / x.shape[-1] + eps)
    # no matrix product: a token's score must not depend on its place or on the other tokens
    dots = torch.stack([row_sum(f * v)[..., 0] for v in vectors.to(wide)], 1)
    out = widest(x.dtype)
    return (dots * inverse[:, None]).to(out), inverse.to(out)


def score_backward(
    ds: Tensor, x: Tensor, vectors: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and the gradient of the vectors for ds (batch, R, n); tokens whose ds are all 0 are left out."""
    wide = widest(x.dtype, vectors.dtype)
    # the content of a masked token, NaN included, must not reach the vectors
    live = (ds != 0).any(1)
    ds, inverse = ds.to(wide), inverse.where(live, 0).to(wide)
    f = x.to(wide).where(live[..., None], 0)
    along = (ds * inverse[:, None]).mT
    dx = None
    if need_x:
        back = (ds * scores.where(live[:, None], 0).to(wide)).sum(1) * inverse.square() / x.shape[-1]
        dx = (along @ vectors.to(wide) - back[..., None] * f).to(x.dtype)
    dw = (along.flatten(0, 1).mT @ f.flatten(0, 1)).to(vectors.dtype) if need_w else None
    return dx, dw


def add_rows(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int) -> None:
    """Add gates·update (batch, k, d) in place to y (batch·n, d); indices (batch, k) are unique in a row."""
    found, rows = rows_of(indices, n)
    wide = widest(*(t.dtype for t in (y, update, gates) if t is not None))
    moved = update.reshape(-1, update.shape[-1])[found].to(wide)
    if gates is not None:
        moved = moved * gates.reshape(-1)[found][:, None].to(wide)
    y[rows] = (y[rows].to(wide) + moved).to(y.dtype)


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int, need_u: bool, need_g: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gates·dy[i] and <dy[i], update> for dy (batch·n, d), 0 where an index (batch, m) names no token."""
    found, rows = rows_of(indices, n)
    wide = widest(*(t.dtype for t in (dy, update, gates) if t is not None))
    picked = dy[rows].to(wide)
    du = dg = None
    if need_u:
        du = update.new_zeros((indices.numel(), update.shape[-1]))
        part = picked if gates is None else picked * gates.reshape(-1)[found][:, None].to(wide)
        du[found] = part.to(du.dtype)
        du = du.view(update.shape)
    if need_g and gates is not None:
        dg = gates.new_zeros(indices.numel())
        dg[found] = torch.linalg.vecdot(picked, update.reshape(-1, update.shape[-1])[found].to(wide)).to(dg.dtype)
        dg = dg.view(gates.shape)
    return du, dg


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (batch, n, d) with zeros where the mask (batch, n) is False."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
