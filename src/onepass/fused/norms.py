"""RMS norm of all tokens with their scores, or of chosen tokens: by kernels or torch, without checks and autograd.

Torch's steps have the names and arguments of the launchers in `kernels_norm`: `way` chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import outside_autocast
from onepass.core.launch import uses_triton
from onepass.core.sums import row_sum
from onepass.ops.routing.definition import gather, score_backward, score_forward, widest, zero_padding
from onepass.ops.routing.op import add_rows

from . import branch

# columns of the widest row that one program can hold
WIDEST = 4096


def way(x: Tensor, weight: Tensor | None, vectors: Tensor | None) -> Any:
    """Return the module whose `forward`, `backward` and `programs` compute: `kernels_norm`, or this one."""
    if not uses_triton(x, weight, vectors):
        return sys.modules[__name__]
    from . import kernels_norm

    return kernels_norm


@outside_autocast  # a caller's would round the scores to 16 bits and thereby change the choice of tokens
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
    f = (x if indices is None else gather(x, indices)).to(widest(x.dtype)).contiguous()
    rstd = row_sum(f.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = f * rstd
    if weight is not None:
        y = y * weight
    stats = rstd.view(1, -1) if vectors is None else torch.stack((rstd.view(-1), inverse.view(-1)))
    return y.to(dtype).contiguous(), scores, stats


def programs(x: Tensor, rows: int) -> int:
    """Return how many rows the buffer of partials has."""
    return 1


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
        more, dv = score_backward(of_rows, x, vectors, known, inverse, need_x, partials is not None)
        dx = dx if more is None else dx + more
        if dv is not None:
            grads.append(dv.to(wide))
            if explore_grad is not None:
                probed = (explore_grad * inverse[:, ::stride].where(explore_grad != 0, 0)).to(wide)
                tokens = x[:, ::stride].to(wide).where((explore_grad != 0)[..., None], 0)
                grads[1][0] += (probed.reshape(1, -1) @ tokens.reshape(-1, x.shape[-1]))[0]
    if partials is not None:
        width = sum(g.numel() for g in grads)
        partials[:, :width] = torch.cat(grads).view(1, -1)
    if not need_x:
        return (None,)
    dx = dx.to(x.dtype).contiguous()
    return (dx if residual is None else (dx + residual).to(dx.dtype),)


def score_tokens(
    x: Tensor, vectors: Tensor, weight: Tensor | None, mask: Tensor | None, plan: Any, *weights: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return memory for y, None for a residual; the normed tokens as rows; their scores; statistics; and copies.

    These are of the weights, in the branches' dtype; there are none if all have it.
    """
    norm = way(x, weight, vectors).forward
    normed, scores, stats = norm(x, None, mask, weight, vectors, plan.eps, plan.score_eps, plan.dtype)
    # y has the shape of x from the start: autograd forbids in-place writes to a view that a Function returned
    y = None if plan.residual else torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    other = any(w is not None and w.dtype != plan.dtype for w in weights)
    return y, normed.view(-1, x.shape[-1]), scores, stats, *(branch.cast(weights, plan.dtype) if other else ())


def norm_chosen(
    x: Tensor, indices: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the normed chosen tokens as rows, and their statistics."""
    chosen, _, stats = way(x, weight, None).forward(x, indices, None, weight, None, eps, 0.0, dtype)
    return chosen.view(-1, x.shape[-1]), stats


# of chosen tokens: the gradient of the normed rows or None, indices, weight, statistics, and whether the weight learns
Chosen = tuple[Tensor | None, Tensor, Tensor | None, Tensor, bool]


def through_norms(
    x: Tensor, weight: Tensor | None, vectors: Tensor | None, mask: Tensor | None, stats: Tensor, scores: Tensor,
    d_normed: Tensor | None, ds: Tensor | None, lists: Sequence[Chosen], explore_grad: Tensor | None, stride: int,
    residual: Tensor | None, need_x: bool, need_sums: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx through the norms of all tokens and of the chosen `lists`, and the sums of the weights' gradients.

    With `need_sums` these begin with the gradients of `weight` and, if there is `ds`, of the vectors; then come those
    of the lists.
    """
    d = x.shape[-1]
    tokens, learn = x.numel() // d, sum(need for *_, need in lists)
    vectors = None if ds is None else vectors
    norm = way(x, weight, vectors)
    begin = (d + (0 if vectors is None else vectors.numel())) if need_sums else 0
    partials = None
    if begin or learn:
        dtype = torch.promote_types(x.dtype, torch.float32)
        partials = torch.empty((norm.programs(x, tokens), begin + d * learn), dtype=dtype, device=x.device)
    updates = []
    for dy, indices, of_list, of_rows, need in lists:
        if dy is not None:
            into, dy = None if partials is None or not need else partials[:, begin:], dy.view(*indices.shape, d)
            (update,) = way(x, of_list, None).backward(
                dy, x, indices, None, of_list, None, of_rows, None, None, None, 1, need_x, into, None
            )
            updates.append((update, indices))
            begin += d if need else 0
    dx = None
    if need_x or need_sums:
        (dx,) = norm.backward(
            torch.zeros_like(x) if d_normed is None else d_normed.view(x.shape), x, None, mask, weight, vectors, stats,
            None if vectors is None else scores, None if ds is None else ds.contiguous(), explore_grad, max(1, stride),
            need_x, partials if need_sums else None, residual,
        )  # fmt: skip
    if dx is not None:
        # in place, as the node alone holds dx; one after the other, as a token may be in several lists
        for update, indices in updates:
            if update is not None:
                add_rows(dx.view(tokens, d), update, None, indices)
    return dx, None if partials is None else branch.steps(partials).total(partials)


def split_sums(
    sums: Tensor | None, vectors: Tensor, need_vectors: bool, norms: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of the vectors, (1, d) each, and of the norms, from the sums of :func:`through_norms`."""
    (n, d), last = vectors.shape, len(norms) - 1
    of_vectors: list[Tensor | None] = [None] * n
    of_norms: list[Tensor | None] = [None] * (last + 1)
    if sums is not None:
        totals = list(sums.split_with_sizes((d,) * (sums.shape[0] // d)))
        for i in range(last, -1, -1):
            if needed[i] and (norm := norms[i]) is not None:
                of_norms[i] = branch.to(totals.pop() if i else totals[0], norm.dtype)
        if need_vectors and len(totals) > 1:
            of_vectors = [branch.to(t.view(1, d), vectors.dtype) for t in totals[1:]]
    return of_vectors, of_norms
