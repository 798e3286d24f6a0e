"""All of routed attention as forward and backward functions, and as one autograd node for plain eager.

    y = out(attention(norm(x))) + ν        y_i += g_i·(out'(attention'(norm_q(x_i), norm_kv(x_K))) − ν)

The node is faster than a composition of modules. It norms and scores x in one read, norms the chosen tokens while it
gathers them, adds their gradients in place to those of all tokens, casts all weights together, and computes weight
gradients directly in the weights' dtype. torch computes the matrix products; all kernels between two products are one
call for `core.launch.replay`, so that the host does little more than launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.core.eager import fast_apply, node_backward
from onepass.core.products import weight_gradient
from onepass.ops.span_attention import op as span

from . import attention_steps as steps
from . import branch
from .plans import AttentionPlan as Plan
from .runs import Runs, whole_runs, window_runs

# tensors among the arguments, of which MASK may be None; how many of the saved ones `backward_tokens` takes
TENSORS, MASK, TOKENS = 13, 4, 18
# where `forward` keeps keys and values of the chosen, as multiplied and as attended to
KV = 16


def _light_runs(x: Tensor, mask: Tensor | None, plan: Plan, precision: str) -> Runs:
    """Return the runs of the local attention."""
    queries = x.device, plan.dtype, plan.width, precision
    return window_runs(x.shape[1], plan.window, plan.causal, queries)._replace(mask=mask)


def _heavy_runs(
    x: Tensor, mask: Tensor | None, at_q: Tensor, at_kv: Tensor, seen: Tensor | None, plan: Plan, precision: str
) -> Runs:
    """Return the runs of the chosen queries."""
    exist = mask is None and not (plan.causal and x.shape[1] % plan.window)
    there = None if exist else at_kv >= 0
    if seen is None:
        queries = x.device, plan.dtype, plan.width, precision
        return whole_runs(at_q.shape[1], at_kv.shape[1], queries)._replace(mask=there)
    first, last = seen.unbind()
    return Runs(there, first, last, None, None)


def _with_edges(runs: Runs, like: Tensor, keys: int) -> Runs:
    if runs.begin is not None:
        return runs
    begin, end = span.edges(like, runs.first, runs.last, keys) or (None, None)
    return runs._replace(begin=begin, end=end)


def forward(
    x: Tensor, vector_q: Tensor, vector_kv: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor,
    norm_kv: Tensor, weights: Sequence[Tensor], plan: Plan,
) -> tuple[tuple[Tensor, ...], list[Any], list[Tensor]]:  # fmt: skip
    """Return (y, queries, their gates, keys, their gates, scores (2, batch, n)), what backward needs, and the matrices.

    The last are copies of the weights in the branches' dtype, and empty where they have it. `weights`: ν, then qkv and
    out of the light branch, q, kv and out of the heavy one.
    """
    precision = torch.get_float32_matmul_precision()
    vectors = torch.cat((vector_q, vector_kv))
    (
        y, tokens, scores, stats, gates_q, at_q, state_q, starts, gates_kv, at_kv, state_kv, within, seen, chosen_q,
        stats_q, chosen_kv, stats_kv, *copies,
    ) = steps.before_products(x, vectors, light_norm, mask, norm_q, norm_kv, plan, *weights)  # fmt: skip
    null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w = copies or weights
    qkv = torch.mm(tokens, qkv_w.t())
    heavy_runs = _heavy_runs(x, mask, at_q, at_kv, seen, plan, precision)
    q, kv = torch.mm(chosen_q, q_w.t()), torch.mm(chosen_kv, kv_w.t())
    light_runs = _light_runs(x, mask, plan, precision)
    light, light_lse, gated, heavy, heavy_lse = steps.attend(
        qkv, q, kv, gates_kv, at_q, at_kv, plan, precision, *light_runs[:3], *heavy_runs[:3]
    )
    rows = torch.addmm(null, light, light_out_w.t(), out=None if y is None else y.view(tokens.shape))
    update = torch.mm(heavy, heavy_out_w.t())
    if y is None:
        y = branch.add_residual(x, rows, update, gates_q, at_q, null)
    else:
        steps.add_chosen(rows, update, gates_q, at_q, null)
    kept = [
        vectors, stats, state_q, starts, state_kv, within, stats_q, stats_kv, seen, tokens, qkv, light, light_lse,
        chosen_q, chosen_kv, q, kv, gated, heavy, heavy_lse, update,
    ]  # fmt: skip
    return (y, at_q, gates_q, at_kv, gates_kv, scores), kept, copies


def backward_products(
    saved: list[Any], plan: Plan, dtypes: Sequence[torch.dtype], needs: Sequence[bool], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the normed tokens, queries and keys, of both gates, explore_grad, ν's and the matrices'.

    `saved` holds x, mask, queries, their gates, keys, their gates, then seen to update as :func:`forward` kept them,
    and ν and the matrices as multiplied. This function empties the list: each tensor is freed after its last use if the
    caller holds no other reference. `needs` as in :func:`backward_tokens`, then of ν and the matrices; a gradient is
    None where it is False.
    """
    (
        x, mask, at_q, gates_q, at_kv, gates_kv, seen, tokens, qkv, light, light_lse, chosen_q, chosen_kv, q, kv, gated,
        heavy, heavy_lse, update, null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w,
    ) = saved  # fmt: skip
    saved.clear()
    need_x, need_v, need_light_norm, need_norm_q, need_norm_kv, need_null, *need_weights = needs
    need_gates, dim, precision = need_x or need_v, x.shape[-1], torch.get_float32_matmul_precision()
    light_runs = _light_runs(x, mask, plan, precision)
    heavy_runs = _heavy_runs(x, mask, at_q, at_kv, seen, plan, precision)
    grads: list[Tensor | None] = [None] * 5

    def gradient(which: int, dy: Tensor, x: Tensor) -> None:
        if need_weights[which]:
            grads[which] = weight_gradient(dy, x, dtypes[1 + which])

    # one pass over dy rounds it and sums its rows
    dy = (dy if need_null else dy.to(plan.dtype)).contiguous()
    rounded, du, d_gates_q, explore_grad, sums = steps.before_backward_products(
        dy, update, gates_q, at_q, null, mask, plan, need_gates, need_null, plan.explore_stride > 0 and need_v
    )
    dy = (dy if rounded is None else rounded).view(-1, dim)
    del rounded
    gradient(1, dy, light)
    gradient(4, du, heavy)
    d_null = None
    if sums is not None:
        of_dy, of_du = sums.split_with_sizes((dim, dim))
        d_null = (of_dy - of_du).to(dtypes[0])
    d_light, d_heavy = torch.mm(dy, light_out_w), torch.mm(du, heavy_out_w)
    del dy, du, update
    light_runs = _with_edges(light_runs, gated, x.shape[1])
    heavy_runs = _with_edges(heavy_runs, gated, at_kv.shape[1])
    d_qkv, dq, dkv, d_gates_kv = steps.attend_backward(
        d_light, qkv, light, light_lse, d_heavy, q, kv, gated, heavy, heavy_lse, gates_kv, at_q, at_kv, plan, precision,
        *light_runs, *heavy_runs,
    )  # fmt: skip
    del qkv, light, d_light
    gradient(2, dq, chosen_q)
    d_q = torch.mm(dq, q_w) if need_x or need_norm_q else None
    gradient(0, d_qkv, tokens)
    del tokens
    d_normed = torch.mm(d_qkv, qkv_w) if need_x or need_light_norm else None
    gradient(3, dkv, chosen_kv)
    d_kv = torch.mm(dkv, kv_w) if need_x or need_norm_kv else None
    return d_normed, d_q, d_kv, d_gates_q, d_gates_kv if need_gates else None, explore_grad, d_null, *grads


def backward_tokens(
    saved: Sequence[Any], plan: Plan, needs: Sequence[bool], products: Sequence[Tensor | None], dy: Tensor | None,
    g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, both vectors (2, dim), and the norms of tokens, queries and keys; None if not needed.

    `saved` holds x, vectors, the three norms, mask, queries, their gates, keys, their gates, scores, and stats to
    stats_kv as :func:`forward` kept them. `products` are the first six results of :func:`backward_products`, None
    without dy, the gradient of y.
    """
    x, vectors, *norms = saved[:5]
    need_x, need_v, *need_norms = needs
    d_normed, d_q, d_kv, d_gates_q, d_gates_kv, explore_grad = products
    gates_q, gates_kv = saved[7], saved[9]
    if need_x or need_v:
        # without any gradient of the gates, zeros: the choices' backward then gives zeros
        d_gates_q, d_gates_kv = (
            torch.zeros_like(like) if own is None and g is None else g if own is None else own if g is None else own + g
            for own, g, like in ((d_gates_q, g_gates_q, gates_q), (d_gates_kv, g_gates_kv, gates_kv))
        )
    needed = [need and d is not None for need, d in zip(need_norms, (d_normed, d_q, d_kv), strict=True)]
    dx, sums = steps.after_backward_products(
        x, *saved[1:6], plan, *saved[6:], d_normed, d_q, d_kv, d_gates_q, d_gates_kv, g_scores, explore_grad,
        dy.contiguous() if plan.residual and dy is not None else None, need_x,
        need_v or needed[0], *needed[1:],
    )  # fmt: skip
    d_vectors, d_norms = None, [None] * 3
    if sums is not None:
        d = x.shape[-1]
        totals = list(sums.split_with_sizes((d,) * (len(sums) // d)))
        for i in (2, 1):
            if needed[i]:
                d_norms[i] = totals.pop().to(norms[i].dtype)
        if needed[0]:
            d_norms[0] = totals[0].to(norms[0].dtype)
        if need_v:
            d_vectors = [t.view(1, d).to(vectors.dtype) for t in totals[1:3]]
    return dx, *(d_vectors or (None, None)), *d_norms


class _RoutedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Any:
        x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, *weights = tensors
        public, kept, matrices = forward(x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, weights, plan)
        ctx.save_for_backward(
            x, kept[0], light_norm, norm_q, norm_kv, mask, *public[1:], *kept[1:], *(matrices or weights)
        )
        ctx.plan, ctx.dtypes = plan, [w.dtype for w in weights]  # type: ignore[union-attr]
        ctx.mark_non_differentiable(public[1], public[3])
        ctx.set_materialize_grads(False)
        return public

    @staticmethod
    @node_backward("RoutedAttention")
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        dy, _, g_gates_q, _, g_gates_kv, g_scores = grads_out
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # `saved` is now the only owner, unless the graph is retained
        tokens, activations = saved[:TOKENS], [saved[0], saved[5], *saved[6:10], *saved[TOKENS:]]
        del saved
        needs = [need for i, need in enumerate(ctx.needs_input_grad[1:]) if i != MASK]
        # both vectors' gradients come from one sum
        needs = [needs[0], needs[1] or needs[2], *needs[3:]]
        products: tuple[Tensor | None, ...] = (None,) * 12
        if dy is not None:
            products = backward_products(activations, ctx.plan, ctx.dtypes, needs, dy)
        dx, dv_q, dv_kv, *d_norms = backward_tokens(
            tokens, ctx.plan, needs[:5], products[:6], dy, g_gates_q, g_gates_kv, g_scores
        )
        return None, dx, dv_q, dv_kv, d_norms[0], None, *d_norms[1:], *products[6:]


_apply: Callable[..., Any] = fast_apply(_RoutedAttention)


def routed_attention(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return y like x in the branches' dtype, indices and gates of queries and of keys, and scores (2, batch, n).

    With ``plan.residual`` y is x + y, in the wider dtype of the two.

    `tensors`: x, the routers' vectors (1, dim) of queries and of keys, the norm's weight of all tokens, the mask or
    None, the norms' weights of queries and of keys, ν, then qkv and out of the light branch, q, kv and out of the heavy
    one. Callers guarantee that `core.eager.plain` and `fits_one_program` hold, that the arguments are checked, and that
    there are tokens and k ≥ 1.
    """
    return _apply(plan, *tensors)  # type: ignore[no-any-return]


def with_keys(plan: Plan, *tensors: Any) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the same without gradients, and the chosen rotated keys and gated values (batch, k, heads, width)."""
    x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, *weights = tensors
    public, kept, _ = forward(x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, weights, plan)
    kv, values = kept[KV : KV + 2]
    return public, kv.view(*values.shape[:2], 2, *values.shape[2:])[:, :, 0], values
