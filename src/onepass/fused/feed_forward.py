"""All of a routed feed-forward as one autograd node, or as operators: see `node`.

y = down(gelu(up(norm(x))))        y_i += gate_i · down'(gelu(up'(norm'(x_i))))        for the chosen tokens i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.launch import replayed

from . import branch
from .branch import add_chosen, begin_backward, steps, to, weight_gradient
from .choice import Choice
from .node import fused
from .tokens import backward, before_products, gates_gradient


class Plan(NamedTuple):
    """Settings that are not tensors."""

    dtype: torch.dtype  # of the branches
    choice: Choice
    explore_stride: int  # each `explore_stride`-th token gives the router a gradient (`nn.explore`); 0: none
    explore_weight: float
    residual: bool  # return x + y, and take its gradient
    eps: float  # of the norms
    score_eps: float

    @property
    def choices(self) -> tuple[tuple[Choice, int]]:
        """The router's choice, and 0: it chooses from the whole sequence, not from windows."""
        return ((self.choice, 0),)


class Public(NamedTuple):
    """What the caller gets: y (with ``plan.residual`` x + y, in the wider dtype), and the routing."""

    y: Tensor
    indices: Tensor
    gates: Tensor
    scores: Tensor


@dataclass(slots=True)
class Saved:
    """What forward keeps for backward; rows are tokens. The four matrices have the branches' dtype."""

    stats: Tensor
    state: Tensor | None  # of the choice, with its `starts`
    starts: Tensor | None
    chosen_stats: Tensor
    tokens: Tensor  # normed; so are the chosen
    u: Tensor  # h = gelu(u)
    h: Tensor
    chosen: Tensor
    heavy_u: Tensor
    heavy_h: Tensor
    update: Tensor
    up: Tensor
    down: Tensor
    heavy_up: Tensor
    heavy_down: Tensor


@replayed
def _gelu_backward(
    u: Tensor, dh: Tensor | None, heavy_u: Tensor, heavy_dh: Tensor | None, partials: Tensor | None,
    widths: tuple[int, ...],
) -> tuple[Tensor | None]:  # fmt: skip
    """Overwrite the gradient of each GELU's output with that of its input; return sums if some are of hidden units."""
    backend = steps(u)
    if heavy_dh is not None:
        backend.gelu_backward(heavy_dh, heavy_u, partials if widths[2] else None, widths[0] + widths[1])
    if dh is not None:
        backend.gelu_backward(dh, u, partials if widths[0] else None, 0)
    return (backend.total(partials) if partials is not None and (widths[0] or widths[2]) else None,)


def forward(
    plan: Plan, x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None,
    up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    heavy_up: Tensor, heavy_up_bias: Tensor | None, heavy_down: Tensor, heavy_down_bias: Tensor | None,
) -> tuple[Public, Saved]:  # fmt: skip
    """Return the results, and what backward needs."""
    weights: Any = up, up_bias, down, down_bias, heavy_up, heavy_up_bias, heavy_down, heavy_down_bias
    y, tokens, scores, stats, gates, indices, state, starts, _, chosen, chosen_stats, *copies = before_products(
        x, vectors, light_norm, mask, plan, heavy_norm, *weights
    )
    up, up_bias, down, down_bias, heavy_up, heavy_up_bias, heavy_down, heavy_down_bias = copies or weights
    u = F.linear(tokens, up, up_bias)
    h = F.gelu(u)
    out = None if y is None else y.view(tokens.shape)
    if down_bias is None:
        rows = torch.mm(h, down.t(), out=out)
    else:
        rows = torch.addmm(down_bias, h, down.t(), out=out)
    heavy_u = F.linear(chosen, heavy_up, heavy_up_bias)
    heavy_h = F.gelu(heavy_u)
    update = F.linear(heavy_h, heavy_down, heavy_down_bias)
    if y is None:
        y = branch.add_residual(x, rows, update, gates, indices, None)
    else:
        add_chosen(rows, update, gates, indices)
    return Public(y, indices, gates, scores), Saved(
        stats, state, starts, chosen_stats, tokens, u, h, chosen, heavy_u, heavy_h, update, up, down, heavy_up,
        heavy_down,
    )  # fmt: skip


def backward_products(
    saved: Saved, plan: Plan, needs: Sequence[bool], dtypes: Sequence[Any], dy: Tensor, mask: Tensor | None,
    indices: Tensor, gates: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of the normed tokens, all and chosen, the gates', explore_grad, and those of the weights."""
    need_x, need_v, need_light_norm, need_heavy_norm, *need_weights = needs
    grads: list[Tensor | None] = [None] * 8
    d = dy.shape[-1]
    need_chosen = need_x or need_heavy_norm
    need_normed, need_update = need_x or need_light_norm, need_chosen or True in need_weights[4:]
    sizes = saved.u.shape[1], d, saved.heavy_u.shape[1], d
    widths = tuple([size if need else 0 for size, need in zip(sizes, need_weights[1::2], strict=True)])
    dy = (dy if widths[1] else to(dy, plan.dtype)).contiguous()
    rounded, partials, d_update, d_gates, explore_grad = begin_backward(
        dy, saved.update, gates, indices, None, mask, plan, widths, need_update, need_x or need_v, need_v
    )
    del saved.update
    dy = (dy if rounded is None else rounded).view(-1, d)
    del rounded
    dh, heavy_dh, d_normed, d_chosen = None, None, None, None
    if d_update is not None:
        if need_weights[6]:
            grads[6] = weight_gradient(d_update, saved.heavy_h, dtypes[6])
        if need_chosen or need_weights[4] or need_weights[5]:
            heavy_dh = torch.mm(d_update, saved.heavy_down)
    del d_update, saved.heavy_h
    if need_weights[2]:
        grads[2] = weight_gradient(dy, saved.h, dtypes[2])
    del saved.h
    if need_normed or need_weights[0] or need_weights[1]:
        dh = torch.mm(dy, saved.down)
    del dy
    (sums,) = _gelu_backward(saved.u, dh, saved.heavy_u, heavy_dh, partials, widths)
    sums = partials if sums is None else sums
    del saved.u, saved.heavy_u
    if heavy_dh is not None:
        if need_weights[4]:
            grads[4] = weight_gradient(heavy_dh, saved.chosen, dtypes[4])
        if need_chosen:
            d_chosen = torch.mm(heavy_dh, saved.heavy_up)
    del heavy_dh, saved.chosen
    if dh is not None:
        if need_weights[0]:
            grads[0] = weight_gradient(dh, saved.tokens, dtypes[0])
        del saved.tokens
        if need_normed:
            d_normed = torch.mm(dh, saved.up)
    if sums is not None:
        for i, total in zip((1, 3, 5, 7), sums.split_with_sizes(widths), strict=True):
            if need_weights[i]:
                grads[i] = to(total, dtypes[i])
    return d_normed, d_chosen, d_gates, explore_grad, *grads


def backward_tokens(
    plan: Plan, needs: Sequence[bool], d_normed: Tensor | None, d_chosen: Tensor | None, d_gates: Tensor | None,
    d_explore: Tensor | None, residual: Tensor | None, g_gates: Tensor | None, g_scores: Tensor | None, x: Tensor,
    vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, indices: Tensor,
    gates: Tensor, scores: Tensor, stats: Tensor, state: Tensor | None, starts: Tensor | None, chosen_stats: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, vectors and both norms: through the norms, the choice and the scores."""
    need_x, need_v, need_light_norm, need_heavy_norm, *_ = needs
    need = need_x, need_v, need_light_norm and d_normed is not None
    return backward(
        plan, need, x, vectors, light_norm, mask, scores, stats, d_normed, g_scores, d_explore, residual,
        d_chosen, gates_gradient(need, d_gates, g_gates), heavy_norm, need_heavy_norm and d_chosen is not None,
        chosen_stats, gates, indices, state, starts,
    )  # fmt: skip


def _multiplications(plan: Plan, x: Any, up: Any, *matrices: Any) -> int:
    (batch, n, d), heavy_up = x, matrices[3]
    total: int = 4 * batch * d * (n * up[0] + plan.choice.k * heavy_up[0])
    return total


routed_feed_forward, forward_op = fused(
    "RoutedFeedForward", Plan, forward, backward_products, backward_tokens, _multiplications, 8
)
