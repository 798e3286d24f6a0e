"""All of a routed feed-forward as one forward and one backward function, and as one autograd node for plain eager.

    y = down(gelu(up(norm(x))))        y_i += gate_i · down'(gelu(up'(norm'(x_i))))        for the chosen tokens i

The node is faster than a composition of modules. It norms and scores x in one read, norms the chosen tokens while it
gathers them, adds the heavy branch's output and gradient in place, casts all weights together, and computes weight
gradients directly in the weights' dtype. torch computes the matrix products; all kernels between two products are one
call for `core.launch.replay`, so that the host does little more than launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.core.eager import fast_apply, node_backward
from onepass.core.launch import replayed
from onepass.core.products import weight_gradient
from onepass.ops.routing.op import add_rows, scatter_backward

from . import branch
from .choice import choose, choose_backward
from .norms import Chosen, norm_chosen, score_tokens, through_norms
from .plans import FeedForwardPlan as Plan

# how many of the saved tensors `backward_tokens` takes
TOKENS = 12


@replayed
def _before_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, plan: Plan,
    *weights: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Norm and score, choose, norm the chosen tokens; copy the weights."""
    y, tokens, scores, stats, *copies = score_tokens(x, vectors.view(-1), light_norm, mask, plan, *weights)
    gates, indices, state, starts = choose(scores, mask, plan.choice)
    chosen, chosen_stats = norm_chosen(x, indices, heavy_norm, plan.heavy_eps, plan.dtype)
    return y, tokens, scores, stats, indices, gates, state, starts, chosen, chosen_stats, *copies


_add_chosen = replayed(add_rows)


@replayed
def _before_backward_products(
    dy: Tensor, update: Tensor, gates: Tensor, indices: Tensor, mask: Tensor | None, plan: Plan,
    widths: tuple[int, ...], offsets: tuple[int, ...], need_update: bool, need_gates: bool, need_explore: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dy in the branches' dtype, the partials, gradients of the heavy output and the gates, and explore_grad.

    dy is None where it had that dtype.
    """
    d, copy = dy.shape[-1], None
    partials = branch.new_partials(dy, dy.numel() // d, sum(widths))
    if partials is not None and widths[1]:
        rows = branch.column_sums(dy.view(-1, d), partials, offsets[1], plan.dtype)
        dy, copy = (dy, None) if dy.dtype == plan.dtype else (rows.view(dy.shape), rows)
    update = update.view(*indices.shape, d)
    d_update, d_gates = scatter_backward(dy, update, gates, indices, need_update, need_gates)
    d_update = None if d_update is None else d_update.view(-1, d)
    if partials is not None and widths[3] and d_update is not None:
        branch.column_sums(d_update, partials, offsets[3])
    explore_grad = (
        branch.explore_gradient(dy, mask, plan.explore_stride, -plan.explore_weight * plan.explore_stride)
        if need_explore
        else None
    )
    return copy, partials, d_update, d_gates, explore_grad


@replayed
def _gelu_backward(
    u: Tensor, dh: Tensor | None, heavy_u: Tensor, heavy_dh: Tensor | None, partials: Tensor | None,
    widths: tuple[int, ...], offsets: tuple[int, ...],
) -> tuple[Tensor | None]:  # fmt: skip
    """Overwrite the gradient of each GELU's output with that of its input; return the sums of all partials."""
    if heavy_dh is not None:
        branch.gelu_backward(heavy_dh, heavy_u, partials if widths[2] else None, offsets[2])
    if dh is not None:
        branch.gelu_backward(dh, u, partials if widths[0] else None, offsets[0])
    return (None if partials is None else branch.total(partials),)


@replayed
def _after_backward_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, plan: Plan,
    indices: Tensor, gates: Tensor, scores: Tensor, stats: Tensor, state: Tensor | None, starts: Tensor | None,
    chosen_stats: Tensor, d_normed: Tensor | None, d_chosen: Tensor | None, d_gates: Tensor | None,
    d_scores: Tensor | None, explore_grad: Tensor | None, residual: Tensor | None, need_x: bool, need_sums: bool,
    need_heavy_norm: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx through all norms, the choice and the scores, and sums: light norm, vectors, heavy norm."""
    if d_gates is not None:
        ds = choose_backward(d_gates, scores, mask, plan.choice, indices, gates, state, starts)
        d_scores = ds if d_scores is None else ds + d_scores
    elif explore_grad is not None and d_scores is None:
        d_scores = torch.zeros_like(scores)
    lists: list[Chosen] = [(d_chosen, indices, heavy_norm, chosen_stats, need_heavy_norm)]
    return through_norms(
        x, light_norm, vectors.view(-1), mask, stats, scores, d_normed, d_scores, lists, explore_grad,
        plan.explore_stride, residual, need_x, need_sums,
    )  # fmt: skip


@lru_cache(256)
def _columns(sizes: tuple[int, ...], wanted: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the widths of the sums over rows (0: not wanted) and where each begins in their common buffer."""
    widths = tuple(size if need else 0 for size, need in zip(sizes, wanted, strict=True))
    return widths, (0, *accumulate(widths[:-1]))


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def forward(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, plan: Plan,
    *weights: Tensor | None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Return (y, indices, gates, scores), what backward needs of the activations, and the weights as multiplied.

    The last are copies in the branches' dtype, and empty where the weights have it.
    """
    y, tokens, scores, stats, indices, gates, state, starts, chosen, chosen_stats, *copies = _before_products(
        x, vectors, light_norm, heavy_norm, mask, plan, *weights
    )
    cast: Any = copies or weights
    up, up_bias, down, down_bias, heavy_up, heavy_up_bias, heavy_down, heavy_down_bias = cast
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
        _add_chosen(rows, update, gates, indices)
    kept = [stats, state, starts, chosen_stats, tokens, u, h, chosen, heavy_u, heavy_h, update]
    return (y, indices, gates, scores), kept, [up, down, heavy_up, heavy_down] if copies else []


def backward_products(
    saved: list[Any], plan: Plan, dtypes: Sequence[Any], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the normed tokens, of all and of the chosen, the gates', explore_grad, and the weights'.

    `saved` holds mask, indices, gates, then tokens to update as :func:`forward` kept them, and the four matrices as
    multiplied. This function empties the list, so that each tensor is freed after its last use if the caller holds no
    other reference: fewer tensors of the tokens' size then exist at once. `needs` as in :func:`backward_tokens`, then
    of the eight weights; a gradient is None where it is False.
    """
    (
        mask, indices, gates, tokens, u, h, chosen, heavy_u, heavy_h, update, up, down, heavy_up, heavy_down
    ) = saved  # fmt: skip
    saved.clear()
    need_x, need_v, need_light_norm, need_heavy_norm, *need_weights = needs
    grads: list[Tensor | None] = [None] * 8
    d = dy.shape[-1]
    need_chosen = need_x or need_heavy_norm
    need_normed, need_update = need_x or need_light_norm, need_chosen or True in need_weights[4:]
    widths, offsets = _columns((u.shape[1], d, heavy_u.shape[1], d), tuple(need_weights[1::2]))
    # one pass over dy rounds it and sums its rows; without a bias there are no sums
    dy = (dy if widths[1] else _as(dy, plan.dtype)).contiguous()
    rounded, partials, d_update, d_gates, explore_grad = _before_backward_products(
        dy, update, gates, indices, mask, plan, widths, offsets, need_update, need_x or need_v,
        plan.explore_stride > 0 and need_v,
    )  # fmt: skip
    dy = (dy if rounded is None else rounded).view(-1, d)
    del rounded
    dh, heavy_dh, update, d_normed, d_chosen = None, None, None, None, None
    if d_update is not None:
        if need_weights[6]:
            grads[6] = weight_gradient(d_update, heavy_h, dtypes[6])
        if need_chosen or need_weights[4] or need_weights[5]:
            heavy_dh = torch.mm(d_update, heavy_down)
        d_update = heavy_h = None
    if need_weights[2]:
        grads[2] = weight_gradient(dy, h, dtypes[2])
    h = None
    if need_normed or need_weights[0] or need_weights[1]:
        dh = torch.mm(dy, down)
    del dy
    (sums,) = _gelu_backward(u, dh, heavy_u, heavy_dh, partials, widths, offsets)
    u = heavy_u = None
    if heavy_dh is not None:
        if need_weights[4]:
            grads[4] = weight_gradient(heavy_dh, chosen, dtypes[4])
        if need_chosen:
            d_chosen = torch.mm(heavy_dh, heavy_up)
    heavy_dh = chosen = None
    if dh is not None:
        if need_weights[0]:
            grads[0] = weight_gradient(dh, tokens, dtypes[0])
        tokens = None
        if need_normed:
            d_normed = torch.mm(dh, up)
    if sums is not None:
        for i, total in zip((1, 3, 5, 7), sums.split_with_sizes(widths), strict=True):
            if need_weights[i]:
                grads[i] = _as(total, dtypes[i])
    return d_normed, d_chosen, d_gates, explore_grad, *grads


def backward_tokens(
    saved: Sequence[Any], plan: Plan, needs: Sequence[bool], products: Sequence[Tensor | None], dy: Tensor | None,
    g_gates: Tensor | None, g_scores: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, vectors and both norms, None where `needs` is False.

    `saved` holds x, vectors, both norms, mask, indices, gates, scores, and the first four that :func:`forward` kept.
    `products` are the first four results of :func:`backward_products`, None without dy, the gradient of y.
    """
    x, vectors, light_norm, heavy_norm, *_ = saved
    need_x, need_v, need_light_norm, need_heavy_norm = needs
    d_normed, d_chosen, d_gates, explore_grad = products
    need_light_norm, need_heavy_norm = (
        need_light_norm and d_normed is not None,
        need_heavy_norm and d_chosen is not None,
    )
    need_gates = need_x or need_v
    if g_gates is not None and need_gates:
        d_gates = g_gates if d_gates is None else d_gates + g_gates
    dx, sums = _after_backward_products(
        *saved[:5], plan, *saved[5:], d_normed, d_chosen, d_gates, g_scores if need_gates else None, explore_grad,
        dy.contiguous() if plan.residual and dy is not None else None, need_x, need_v or need_light_norm,
        need_heavy_norm,
    )  # fmt: skip
    d_vectors = d_light_norm = d_heavy_norm = None
    if sums is not None:
        d = x.shape[-1]
        totals = sums.split_with_sizes((d,) * (len(sums) // d))
        if need_light_norm:
            d_light_norm = _as(totals[0], light_norm.dtype)
        if need_v and len(totals) > 1 + need_heavy_norm:
            d_vectors = _as(totals[1].view(vectors.shape), vectors.dtype)
        if need_heavy_norm:
            d_heavy_norm = _as(totals[-1], heavy_norm.dtype)
    return dx, d_vectors, d_light_norm, d_heavy_norm


class _RoutedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None,
        mask: Tensor | None, plan: Plan, *weights: Tensor | None,
    ) -> Any:  # fmt: skip
        public, kept, matrices = forward(x, vectors, light_norm, heavy_norm, mask, plan, *weights)
        ctx.save_for_backward(
            x, vectors, light_norm, heavy_norm, mask, *public[1:], *kept, *(matrices or weights[::2])
        )  # fmt: skip
        ctx.plan, ctx.dtypes = plan, [None if w is None else w.dtype for w in weights]
        ctx.mark_non_differentiable(public[1])
        ctx.set_materialize_grads(False)
        return public

    @staticmethod
    @node_backward("RoutedFeedForward")
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        dy, _, g_gates, g_scores = grads_out
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # `saved` is now the only owner, unless the graph is retained
        needs, plan = ctx.needs_input_grad, ctx.plan
        inputs, activations = saved[:TOKENS], [*saved[4:7], *saved[TOKENS:]]
        del saved
        products: tuple[Tensor | None, ...] = (None,) * 12
        if dy is not None:
            products = backward_products(activations, plan, ctx.dtypes, (*needs[:4], *needs[6:]), dy)
        grads = backward_tokens(inputs, plan, needs[:4], products[:4], dy, g_gates, g_scores)
        return *grads, None, None, *products[4:]


_apply: Callable[..., Any] = fast_apply(_RoutedFeedForward)


def routed_feed_forward(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, plan: Plan,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y, in the shape of x and the branches' dtype, indices, gates and scores; see the module's docstring.

    With ``plan.residual`` y is x + y, in the wider dtype of the two.

    `weights`: for the light, then the heavy branch, weight and bias (or None) of the first linear layer, then of the
    second; `vectors` (1, dim): the score vector. Gradients of gates and scores flow to x and the vectors. The gradient
    of y reaches the gates inside the node, so autograd finds no path from y to the gates returned here.
    Callers guarantee that `core.eager.plain` and `fits_one_program` hold, that the arguments are checked, and that
    there are tokens and k ≥ 1.
    """
    return _apply(x, vectors, light_norm, heavy_norm, mask, plan, *weights)  # type: ignore[no-any-return]
