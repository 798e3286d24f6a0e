"""The torch path: CPU, float64, no Triton. Tokens are rows of (batch·n, dim); what no index names is never read."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that sums over these are kept in: fp32, or fp64 if one of them is."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


def rows_of(indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Indices (batch, k) → (which of batch·k name a token, rows of those among batch·n tokens)."""
    found = (indices >= 0) & (indices < n)
    rows = indices + torch.arange(indices.shape[0], device=indices.device)[:, None] * n
    return found.view(-1), rows[found]


def score_forward(x: Tensor, vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """X (batch, n, d), vectors (R, d) → scores (batch, R, n) and 1/rms (batch, n)."""
    wide = widest(x.dtype, vectors.dtype)
    f = x.to(wide).contiguous()
    inverse = torch.rsqrt(row_sum(f.square())[..., 0] / x.shape[-1] + eps)
    # no matrix product: a token's score must not depend on where it stands, nor on its company
    dots = torch.stack([row_sum(f * v)[..., 0] for v in vectors.to(wide)], 1)
    out = widest(x.dtype)
    return (dots * inverse[:, None]).to(out), inverse.to(out)


def score_backward(
    ds: Tensor, x: Tensor, vectors: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Ds (batch, R, n) → dx and the gradient of the vectors; tokens whose ds are 0 are not looked at."""
    wide = widest(x.dtype, vectors.dtype)
    # what stands in a masked token, NaN included, must not reach the vectors
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
    """X (batch, n, d), indices (batch, m) → (batch, m, d), zeros where an index names no token."""
    found, rows = rows_of(indices, x.shape[1])
    y = x.new_zeros((indices.numel(), x.shape[-1]))
    y[found] = x.reshape(-1, x.shape[-1])[rows]
    return y.view(*indices.shape, x.shape[-1])


def add_rows(y: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int) -> None:
    """Y (batch·n, d) += gates·update in place; update (batch, k, d), gates and indices (batch, k), unique in a row."""
    found, rows = rows_of(indices, n)
    wide = widest(y.dtype, update.dtype, *(() if gates is None else (gates.dtype,)))
    moved = update.reshape(-1, update.shape[-1])[found].to(wide)
    if gates is not None:
        moved = moved * gates.reshape(-1)[found][:, None].to(wide)
    y[rows] = (y[rows].to(wide) + moved).to(y.dtype)


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int, need_u: bool, need_g: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Dy (batch·n, d) → gates·dy[i] and <dy[i], update>, 0 where an index names no token; indices (batch, m)."""
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
    """X (batch, n, d) with zeros where the mask (batch, n) is False, whatever stands there."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
