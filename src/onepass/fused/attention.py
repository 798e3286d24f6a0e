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
from .row import Row
from .runs import Runs, part_runs, whole_runs, window_runs

# tensors among the arguments, of which MASK may be None; how many of the saved ones `backward_tokens` takes
TENSORS, MASK, TOKENS = 13, 4, 18
# where `forward` keeps keys and values of the chosen, as multiplied and as attended to
KV = 16


def _light_runs(x: Tensor, mask: Tensor | None, plan: Plan, precision: str, row: Row | None) -> Runs:
    """Return the runs of the local attention."""
    n, queries = x.shape[1], (x.device, plan.dtype, plan.width, precision)
    if row is None:
        return window_runs(n, plan.window, plan.causal, queries)._replace(mask=mask)
    left, right, *_ = row.edges(plan.window, plan.causal)
    keys = left + n + right
    if row.packing is not None:
        first, last = row.packing.windows(plan.window, plan.causal, n, row.begin - left)
        return Runs(None, first, last, None, None)
    runs = part_runs(row.n, plan.window, plan.causal, row.begin, n, row.begin - left, keys, queries)
    return runs._replace(mask=None if row.mask is None else row.here(row.mask, keys, left, right))


def _heavy_runs(
    x: Tensor, mask: Tensor | None, at_q: Tensor, at_kv: Tensor, seen: Tensor | None, plan: Plan, precision: str,
    row: Row | None,
) -> Runs:  # fmt: skip
    """Return the runs of the chosen queries."""
    n, mask = (x.shape[1], mask) if row is None else (row.n, row.mask)
    exist = (mask is None and not (plan.causal and n % plan.window)) or (row is not None and row.packing is not None)
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
    norm_kv: Tensor, weights: Sequence[Tensor], plan: Plan, row: Row | None = None,
) -> tuple[tuple[Tensor, ...], list[Any], list[Tensor]]:  # fmt: skip
    """Return (y, queries, their gates, keys, their gates, scores (2, batch, n)), what backward needs, and the matrices.

    The last are copies of the weights in the branches' dtype, and empty where they have it. `weights`: ν, then qkv and
    out of the light branch, q, kv and out of the heavy one. With a `row`, x and mask are those of this device's tokens;
    choices and scores are those of the row, and `row` keeps what is here of them.
    """
    precision = torch.get_float32_matmul_precision()
    vectors = torch.cat((vector_q, vector_kv))
    left, here = 0, x.shape[1]
    if row is None:
        (
            y, tokens, scores, stats, gates_q, at_q, state_q, starts, gates_kv, at_kv, state_kv, within, seen, chosen_q,
            stats_q, chosen_kv, stats_kv, *copies,
        ) = steps.before_products(x, vectors, light_norm, mask, norm_q, norm_kv, plan, *weights)  # fmt: skip
        null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w = copies or weights
        qkv, at, at_gates, to, to_gates = torch.mm(tokens, qkv_w.t()), at_q, gates_q, at_kv, gates_kv
    else:
        y, tokens, scores, stats, *copies = steps.score(x, vectors, light_norm, mask, plan, *weights)
        null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w = copies or weights
        # edges of windows travel while queries and keys are chosen
        left, qkv, arrive = row.project(tokens, qkv_w, len(x), plan.window, plan.causal)
        scores = row.whole(scores, mask)
        gates_q, at_q, state_q, starts, gates_kv, at_kv, state_kv, within, seen = steps.choose_both(
            scores, row.mask, plan
        )
        of_q, of_kv = row.sort(at_q), row.sort(at_kv)
        counts = row.ask(of_q, of_kv)
        arrive()
        light_runs = _light_runs(x, mask, plan, precision, row)
        light, light_lse = steps.attend_light(qkv, len(x), plan, precision, left, here, *light_runs[:3])
        # the host waits here, when all of the light attention is on its way
        starts_q, starts_kv = counts.read()
        places, at_gates = row.choose(of_q, gates_q, starts_q)
        at = row.at = row.flat(at_q).gather(1, row.own.slots)
        row.keys = row.pick(of_kv, starts_kv, everyone=True).places
        row.sources = row.locate(of_kv, starts_kv, row.keys.shape[1])
        chosen_q, stats_q, chosen_kv, stats_kv = steps.norm_both(x, places, row.keys, norm_q, norm_kv, plan)
        to, to_gates = (row.heard(t) for t in (at_kv, gates_kv))
        if row.packing is not None:
            keys = of_kv.at[:, -to.shape[1] :]
            seen = row.packing.seen(keys, places + row.begin, at, plan.window if plan.causal else 0)
        elif seen is not None:
            # in the order of the tokens, so that the last never decreases
            last = (at // plan.window * plan.keys.k).clamp_min(0).to(torch.int32)
            seen = torch.stack((torch.zeros_like(last), last))
    heavy_runs = _heavy_runs(x, mask, at, to, seen, plan, precision, row)
    q, kv = torch.mm(chosen_q, q_w.t()), torch.mm(chosen_kv, kv_w.t())
    if row is None:
        light_runs = _light_runs(x, mask, plan, precision, row)
        light, light_lse, gated, heavy, heavy_lse = steps.attend(
            qkv, q, kv, to_gates, at, to, plan, precision, here, *light_runs[:3], *heavy_runs[:3]
        )  # fmt: skip
    else:
        gathered = row.gather(kv, row.sources)
    rows = torch.addmm(null, light, light_out_w.t(), out=None if y is None else y.view(tokens.shape))
    if row is not None:
        kv = gathered()
        gated, heavy, heavy_lse = steps.attend_heavy(q, kv, to_gates, at, to, plan, precision, *heavy_runs[:3])
    update = torch.mm(heavy, heavy_out_w.t())
    where = at if row is None else places
    if y is None:
        y = branch.add_residual(x, rows, update, at_gates, where, null)
    else:
        steps.add_chosen(rows, update, at_gates, where, null)
    kept = [
        vectors, stats, state_q, starts, state_kv, within, stats_q, stats_kv, seen, tokens, qkv, light, light_lse,
        chosen_q, chosen_kv, q, kv, gated, heavy, heavy_lse, update,
    ]  # fmt: skip
    return (y, at_q, gates_q, at_kv, gates_kv, scores), kept, copies


def backward_products(
    saved: list[Any], plan: Plan, dtypes: Sequence[torch.dtype], needs: Sequence[bool], dy: Tensor,
    row: Row | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
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
    places, left, here, gates = at_q, 0, x.shape[1], gates_q
    if row is not None:
        places, at_q, gates = row.own.places, row.at, row.gates
        at_kv, gates_kv = row.heard(at_kv), row.heard(gates_kv)
        left = row.edges(plan.window, plan.causal).left
    light_runs = _light_runs(x, mask, plan, precision, row)
    heavy_runs = _heavy_runs(x, mask, at_q, at_kv, seen, plan, precision, row)
    grads: list[Tensor | None] = [None] * 5

    def gradient(which: int, dy: Tensor, x: Tensor) -> None:
        if need_weights[which]:
            grads[which] = weight_gradient(dy, x, dtypes[1 + which])

    # one pass over dy rounds it and sums its rows
    dy = (dy if need_null else dy.to(plan.dtype)).contiguous()
    rounded, du, d_gates_q, explore_grad, sums = steps.before_backward_products(
        dy, update, gates, places, null, mask, plan, need_gates, need_null, plan.explore_stride > 0 and need_v
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
    light_runs = _with_edges(light_runs, gated, len(qkv) // len(x))
    heavy_runs = _with_edges(heavy_runs, gated, at_kv.shape[1])
    d_qkv, dq, dkv, d_gates_kv = steps.attend_backward(
        d_light, qkv, light, light_lse, d_heavy, q, kv, gated, heavy, heavy_lse, gates_kv, at_q, at_kv, plan, precision,
        left, here, *light_runs, *heavy_runs,
    )  # fmt: skip
    if row is not None:
        projected = row.project_backward(d_qkv, len(x), plan.window, plan.causal)
        gathered = row.gather_backward(dkv, row.sources, len(chosen_kv))
    del qkv, light, d_light
    gradient(2, dq, chosen_q)
    d_q = torch.mm(dq, q_w) if need_x or need_norm_q else None
    d_qkv = d_qkv if row is None else projected()
    gradient(0, d_qkv, tokens)
    del tokens
    d_normed = torch.mm(d_qkv, qkv_w) if need_x or need_light_norm else None
    dkv = dkv if row is None else gathered()
    gradient(3, dkv, chosen_kv)
    d_kv = torch.mm(dkv, kv_w) if need_x or need_norm_kv else None
    return d_normed, d_q, d_kv, d_gates_q, d_gates_kv if need_gates else None, explore_grad, d_null, *grads


def backward_tokens(
    saved: Sequence[Any], plan: Plan, needs: Sequence[bool], products: Sequence[Tensor | None], dy: Tensor | None,
    g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None, of_scores: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, both vectors (2, dim), and the norms of tokens, queries and keys; None if not needed.

    `saved` holds x, vectors, the three norms, mask, queries, their gates, keys, their gates, scores, and stats to
    stats_kv as :func:`forward` kept them. `products` are the first six results of :func:`backward_products`, None
    without dy, the gradient of y. `of_scores`: g_scores is all of the scores' gradient, that through gates included.
    """
    x, vectors, *norms = saved[:5]
    need_x, need_v, *need_norms = needs
    d_normed, d_q, d_kv, d_gates_q, d_gates_kv, explore_grad = products
    gates_q, gates_kv = saved[7], saved[9]
    if (need_x or need_v) and not of_scores:
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
    def forward(ctx: Any, plan: Plan, row: Row | None, *tensors: Any) -> Any:
        x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, *weights = tensors
        public, kept, matrices = forward(x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, weights, plan, row)
        ctx.save_for_backward(
            x, kept[0], light_norm, norm_q, norm_kv, mask, *public[1:], *kept[1:], *(matrices or weights)
        )
        ctx.plan, ctx.row, ctx.dtypes = plan, row, [w.dtype for w in weights]  # type: ignore[union-attr]
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
        needs = [need for i, need in enumerate(ctx.needs_input_grad[2:]) if i != MASK]
        # both vectors' gradients come from one sum
        needs = [needs[0], needs[1] or needs[2], *needs[3:]]
        plan, row, d_probed = ctx.plan, ctx.row, None
        if row is not None:
            plan = plan._replace(explore_stride=0)
        products: tuple[Tensor | None, ...] = (None,) * 12
        if dy is not None:
            products = backward_products(activations, plan, ctx.dtypes, needs, dy, row)
        if row is not None:
            g_gates_q, g_gates_kv, g_scores, d_probed = _spread_scores(
                row, tokens, ctx.plan, needs, products, dy, g_gates_q, g_gates_kv, g_scores
            )
            products = (*products[:3], None, None, *products[5:])
        dx, dv_q, dv_kv, *d_norms = backward_tokens(
            tokens, plan, needs[:5], products[:6], dy, g_gates_q, g_gates_kv, g_scores, row is not None
        )
        if d_probed is not None and dv_q is not None:
            dv_q = dv_q + d_probed.to(dv_q.dtype)
        return None, None, dx, dv_q, dv_kv, d_norms[0], None, *d_norms[1:], *products[6:]


def _spread_scores(
    row: Row, tokens: list[Any], plan: Plan, needs: Sequence[bool], products: Sequence[Tensor | None],
    dy: Tensor | None, g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
) -> tuple[None, None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradient of this device's scores in place of those of the row's gates, and that of exploration.

    In `tokens`, what belongs to this device's tokens takes the place of what belongs to the row.
    """
    x, mask, (at_q, gates_q, at_kv, gates_kv, scores, stats, *states) = tokens[0], tokens[5], tokens[6:16]
    tokens[6:11] = row.own.places, row.gates, row.keys, gates_kv, row.scores
    if not (needs[0] or needs[1]):
        return None, None, None, None
    parts = [(gates_q, products[3], row.own.slots), (gates_kv, products[4], row.key_slots)]
    stride = plan.explore_stride if needs[1] else 0
    grads, d_probed = row.backward(dy, x, mask, stats[1], parts, stride, plan.explore_weight)
    d_q, d_kv = (
        own if g is None else g if own is None else own + g
        for own, g in zip(grads, (g_gates_q, g_gates_kv), strict=True)
    )
    if d_q is not None or d_kv is not None:
        d_q, d_kv = (torch.zeros_like(like) if d is None else d for d, like in ((d_q, gates_q), (d_kv, gates_kv)))
        ds = steps.choose_both_backward(d_q, d_kv, scores, row.mask, plan, at_q, gates_q, at_kv, gates_kv, *states)
        g_scores = ds if g_scores is None else ds + g_scores
    return None, None, None if g_scores is None else row.here(g_scores, x.shape[1]), d_probed


_apply: Callable[..., Any] = fast_apply(_RoutedAttention)


def routed_attention(plan: Plan, *tensors: Tensor | None, row: Row | None = None) -> tuple[Tensor, ...]:
    """Return y like x in the branches' dtype, indices and gates of queries and of keys, and scores (2, batch, n).

    With ``plan.residual`` y is x + y, in the wider dtype of the two.

    `tensors`: x, the routers' vectors (1, dim) of queries and of keys, the norm's weight of all tokens, the mask or
    None, the norms' weights of queries and of keys, ν, then qkv and out of the light branch, q, kv and out of the heavy
    one. Callers guarantee that `core.eager.plain` and `fits_one_program` hold, that the arguments are checked, and that
    there are tokens and k ≥ 1. `row`: as `forward`; choices, gates and scores are whole rows on each device, and so are
    gradients of the latter two.
    """
    return _apply(plan, row, *tensors)  # type: ignore[no-any-return]


def with_keys(plan: Plan, *tensors: Any) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return the same without gradients, and the chosen rotated keys and gated values (batch, k, heads, width)."""
    x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, *weights = tensors
    public, kept, _ = forward(x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, weights, plan)
    kv, values = kept[KV : KV + 2]
    return public, kv.view(*values.shape[:2], 2, *values.shape[2:])[:, :, 0], values
