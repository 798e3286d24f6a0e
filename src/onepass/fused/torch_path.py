"""The torch path of the steps between the matrix products of routed layers: CPU, float64, no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops.routing.definition import gather, score_backward, score_forward, widest, zero_padding


def norm_forward(
    x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float,
    score_eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the RMS norm y of all tokens or of those in indices (batch, m), scores ([R,] batch, m), and statistics."""
    x = zero_padding(x, mask)
    scores = None
    if vectors is not None:
        scores, inverse = score_forward(x, vectors.view(-1, x.shape[-1]), score_eps)
        scores = scores.transpose(0, 1).contiguous().view(*vectors.shape[:-1], *x.shape[:2])
    f = (x if indices is None else gather(x, indices)).to(widest(x.dtype)).contiguous()
    rstd = row_sum(f.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = f * rstd
    if weight is not None:
        y = y * weight
    stats = rstd.view(1, -1) if vectors is None else torch.stack((rstd.view(-1), inverse.view(-1)))
    return y.to(dtype).contiguous(), scores, stats


def norm_backward(
    dy: Tensor, x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None,
    stats: Tensor, scores: Tensor | None, ds: Tensor | None, explore_grad: Tensor | None, stride: int, need_x: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx (batch, m, d) in the dtype of x, and the gradients (1 + R, d) of weight and vectors."""
    x, dy = zero_padding(x, mask), zero_padding(dy, mask)
    wide = widest(x.dtype)
    f = (x if indices is None else gather(x, indices)).to(wide)
    rstd = stats[0].view(*dy.shape[:2], 1)
    n, g = f * rstd, dy.to(wide)
    grads = [(g * n).sum((0, 1), keepdim=True)[0]]
    if weight is not None:
        g = g * weight.to(wide)
    dx = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1).mul_(rstd)
    if vectors is not None and scores is not None and ds is not None:
        inverse, shape = stats[1].view(x.shape[:2]), (-1, *x.shape[:2])
        vectors, ds = vectors.view(-1, x.shape[-1]), ds.view(shape)
        ds = ds if mask is None else ds.where(mask, 0)
        of_rows, known = ds.transpose(0, 1), scores.view(shape).transpose(0, 1)
        more, dv = score_backward(of_rows, x, vectors, known, inverse, need_x, need_w)
        dx = dx if more is None else dx + more
        if dv is not None:
            grads.append(dv.to(wide))
            if explore_grad is not None:
                probed = (explore_grad * inverse[:, ::stride].where(explore_grad != 0, 0)).to(wide)
                tokens = x[:, ::stride].to(wide).where((explore_grad != 0)[..., None], 0)
                grads[1][0] += (probed.reshape(1, -1) @ tokens.reshape(-1, x.shape[-1]))[0]
    return dx.to(x.dtype).contiguous() if need_x else None, torch.cat(grads) if need_w else None


def explore_gradient(dy: Tensor, mask: Tensor | None, stride: int, scale: float) -> Tensor:
    """Return scale·(length − its mean) of each `stride`-th row of dy (batch, n, d), over real tokens; 0 at others."""
    lengths: Tensor = torch.linalg.vector_norm(dy[:, ::stride], dim=-1, dtype=widest(dy.dtype))
    if mask is None:
        return (lengths - lengths.mean(-1, keepdim=True)) * scale
    real = mask[:, ::stride]
    lengths = lengths.where(real, 0)
    mean = lengths.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return ((lengths - mean) * scale).where(real, 0)
