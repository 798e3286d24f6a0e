"""The torch path: CPU, float64, no Triton. Tokens are rows of (batch·n, dim); what no index names is never read."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum


def _wide(*dtypes: torch.dtype) -> torch.dtype:
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
    wide = _wide(x.dtype, vectors.dtype)
    f = x.to(wide).contiguous()
    inverse = torch.rsqrt(row_sum(f.square())[..., 0] / x.shape[-1] + eps)
    # no matrix product: a token's score must not depend on where it stands, nor on its company
    dots = torch.stack([row_sum(f * v)[..., 0] for v in vectors.to(wide)], 1)
    out = _wide(x.dtype)
    return (dots * inverse[:, None]).to(out), inverse.to(out)


def score_backward(
    ds: Tensor, x: Tensor, vectors: Tensor, scores: Tensor, inverse: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Ds (batch, R, n) → dx and the gradient of the vectors; tokens whose ds are 0 are not looked at."""
    wide = _wide(x.dtype, vectors.dtype)
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
    wide = _wide(y.dtype, update.dtype, *(() if gates is None else (gates.dtype,)))
    moved = update.reshape(-1, update.shape[-1])[found].to(wide)
    if gates is not None:
        moved = moved * gates.reshape(-1)[found][:, None].to(wide)
    y[rows] = (y[rows].to(wide) + moved).to(y.dtype)


def scatter_backward(
    dy: Tensor, update: Tensor, gates: Tensor | None, indices: Tensor, n: int, need_u: bool, need_g: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Dy (batch·n, d) → gates·dy[i] and <dy[i], update>, 0 where an index names no token; indices (batch, m)."""
    found, rows = rows_of(indices, n)
    wide = _wide(dy.dtype, update.dtype, *(() if gates is None else (gates.dtype,)))
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


def norm_forward(
    x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float,
    score_eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """RMS norm of all tokens, or of those that indices (batch, m) name: y, scores (batch, [R,] m), statistics."""
    x = zero_padding(x, mask)
    scores = None
    if vectors is not None:
        scores, inverse = score_forward(x, vectors.view(-1, x.shape[-1]), score_eps)
        scores = scores.view(len(x), *vectors.shape[:-1], -1)
    f = (x if indices is None else gather(x, indices)).to(_wide(x.dtype)).contiguous()
    rstd = row_sum(f.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = f * rstd
    if weight is not None:
        y = y * weight
    stats = rstd.view(1, -1) if vectors is None else torch.stack((rstd.view(-1), inverse.view(-1)))
    return y.to(dtype).contiguous(), scores, stats


def norm_backward(
    dy: Tensor, x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None,
    stats: Tensor, scores: Tensor | None, ds: Tensor | None, push: Tensor | None, every: int, need_x: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Dy (batch, m, d) → dx (batch, m, d) in x's dtype; the gradients (1 + R, d) of weight and vectors."""
    x, dy = zero_padding(x, mask), zero_padding(dy, mask)
    wide = _wide(x.dtype)
    f = (x if indices is None else gather(x, indices)).to(wide)
    rstd = stats[0].view(*dy.shape[:2], 1)
    n, g = f * rstd, dy.to(wide)
    grads = [(g * n).sum((0, 1), keepdim=True)[0]]
    if weight is not None:
        g = g * weight.to(wide)
    dx = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(rstd)
    if vectors is not None and scores is not None and ds is not None:
        inverse, shape = stats[1].view(x.shape[:2]), (x.shape[0], -1, x.shape[1])
        vectors, ds = vectors.view(-1, x.shape[-1]), ds.view(shape)
        ds = ds if mask is None else ds.where(mask[:, None], 0)
        more, dv = score_backward(ds, x, vectors, scores.view(shape), inverse, need_x, need_w)
        dx = dx if more is None else dx + more
        if dv is not None:
            grads.append(dv.to(wide))
            if push is not None:
                probed = (push * inverse[:, ::every].where(push != 0, 0)).to(wide)
                tokens = x[:, ::every].to(wide).where((push != 0)[..., None], 0)
                grads[1] = grads[1] + probed.reshape(1, -1) @ tokens.reshape(-1, x.shape[-1])
    return dx.to(x.dtype).contiguous() if need_x else None, torch.cat(grads) if need_w else None


def probe(dy: Tensor, mask: Tensor | None, every: int, scale: float) -> Tensor:
    """Scale·(length − its mean) of each `every`-th row of dy (batch, n, d); 0 where the mask is False, and no part."""
    lengths: Tensor = torch.linalg.vector_norm(dy[:, ::every], dim=-1, dtype=_wide(dy.dtype))
    if mask is None:
        return (lengths - lengths.mean(-1, keepdim=True)) * scale
    real = mask[:, ::every]
    lengths = lengths.where(real, 0)
    mean = lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return ((lengths - mean) * scale).where(real, 0)
