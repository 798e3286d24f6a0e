"""RMS norm of all tokens with their scores, or of chosen tokens: by kernels or torch, without checks and autograd.

Torch's steps have the names and arguments of the launchers in `kernels_norm`: `way` chooses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import outside_autocast
from onepass.core.launch import uses_triton
from onepass.core.sums import row_sum
from onepass.ops._shared.arguments import accumulator
from onepass.ops.routing.definition import gather, score_backward, score_forward, zero_padding

from .branch import programs as programs

# columns of the widest row that one program can hold
WIDEST = 4096


def way(x: Tensor, weight: Tensor | None, vectors: Tensor | None) -> Any:
    """Return the module whose `forward`, `backward` and `programs` compute: `kernels_norm`, or this one."""
    if not uses_triton(x, weight, vectors):
        return sys.modules[__name__]
    from . import kernels_norm

    return kernels_norm


@outside_autocast  # autocast would round the scores to 16 bits, and so change the choice of tokens
def forward(
    x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None, eps: float,
    score_eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the RMS norm y (batch, m, d) of all tokens or of those in indices (batch, m), scores, and statistics.

    Scores are (batch, m) for a vector (d,), (R, batch, m) for vectors (R, d), None for None. `mask` (batch, n) is for
    calls without indices: a token that is False there counts as zeros, whatever it holds, and has no gradient.
    """
    x = zero_padding(x, mask)
    scores = None
    if vectors is not None:
        scores, inverse = score_forward(x, vectors.view(-1, x.shape[-1]), score_eps)
        scores = scores.transpose(0, 1).contiguous().view(*vectors.shape[:-1], *x.shape[:2])
    f = (x if indices is None else gather(x, indices)).to(accumulator(x)).contiguous()
    rstd = row_sum(f.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = f * rstd
    if weight is not None:
        y = y * weight
    stats = rstd.view(1, -1) if vectors is None else torch.stack((rstd.view(-1), inverse.view(-1)))
    return y.to(dtype).contiguous(), scores, stats


def backward(
    dy: Tensor, x: Tensor, indices: Tensor | None, mask: Tensor | None, weight: Tensor | None, vectors: Tensor | None,
    stats: Tensor, scores: Tensor | None, ds: Tensor | None, explore_grad: Tensor | None, stride: int, need_x: bool,
    partials: Tensor | None, residual: Tensor | None,
) -> tuple[Tensor | None]:  # fmt: skip
    """Return (dx,) for each row of :func:`forward`; write partials of the weight's and the vectors' gradients.

    They fill the first columns of `partials`, which is None where they are not needed. `explore_grad`
    (batch, ⌈tokens / stride⌉) is added to ds at each `stride`-th token, for the first vector alone.
    `residual`, in the shape of dx and contiguous, is added to dx.
    """
    x, dy = zero_padding(x, mask), zero_padding(dy, mask)
    wide = accumulator(x)
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
        row_grads, row_scores = ds.transpose(0, 1), scores.view(shape).transpose(0, 1)
        dx_scores, dv = score_backward(row_grads, x, vectors, row_scores, inverse, need_x, partials is not None)
        dx = dx if dx_scores is None else dx + dx_scores
        if dv is not None:
            grads.append(dv.to(wide))
            if explore_grad is not None:
                sampled = (explore_grad * inverse[:, ::stride].where(explore_grad != 0, 0)).to(wide)
                tokens = x[:, ::stride].to(wide).where((explore_grad != 0)[..., None], 0)
                grads[1][0] += (sampled.reshape(1, -1) @ tokens.reshape(-1, x.shape[-1]))[0]
    if partials is not None:
        width = sum(g.numel() for g in grads)
        partials[:, :width] = torch.cat(grads).view(1, -1)
    if not need_x:
        return (None,)
    dx = dx.to(x.dtype).contiguous()
    return (dx if residual is None else (dx + residual).to(dx.dtype),)
