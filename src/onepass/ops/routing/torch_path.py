"""The torch path: CPU, float64, no Triton. Tokens are rows of (batch·n, dim); rows without an index are not read."""

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


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return the rows (batch, m, d) of x (batch, n, d) at indices (batch, m), zeros where an index names no token."""
    found, rows = rows_of(indices, x.shape[1])
    y = x.new_zeros((indices.numel(), x.shape[-1]))
    y[found] = x.reshape(-1, x.shape[-1])[rows]
    return y.view(*indices.shape, x.shape[-1])


def add_rows(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int) -> None:
    """Add gates·update (batch, k, d) in place to y (batch·n, d); indices (batch, k) are unique in a row."""
    found, rows = rows_of(indices, n)
    wide = widest(y.dtype, update.dtype, *(() if gates is None else (gates.dtype,)))
    moved = update.reshape(-1, update.shape[-1])[found].to(wide)
    if gates is not None:
        moved = moved * gates.reshape(-1)[found][:, None].to(wide)
    y[rows] = (y[rows].to(wide) + moved).to(y.dtype)


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int, need_u: bool, need_g: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return gates·dy[i] and <dy[i], update> for dy (batch·n, d), 0 where an index (batch, m) names no token."""
    found, rows = rows_of(indices, n)
    wide = widest(dy.dtype, update.dtype, *(() if gates is None else (gates.dtype,)))
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
