"""All of routed attention as forward and backward functions, and as one autograd node for plain eager.

    y = out(attention(norm(x))) + ν        y_i += g_i·(out'(attention'(norm_q(x_i), norm_kv(x_K))) − ν)

The node is faster than a composition of modules. It norms and scores x in one read, norms the chosen tokens while it
gathers them, adds their gradients in place to those of all tokens, casts all weights together, and computes weight
gradients directly in the weights' dtype. torch computes the matrix products; all kernels between two products are one
call for `core.launch.replay`, so that the host does little more than launch them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import fast_apply, node_backward
from onepass.core.launch import replayed
from onepass.core.products import weight_gradient
from onepass.ops.routing.rows import add_rows, scatter_backward
from onepass.ops.span_attention import op as span
from onepass.ops.span_attention.op_rotary import BASE, apply_rotary, packed_gradient, split

from . import branch
from .choice import Choice, choose, choose_backward, choose_keys, choose_keys_backward
from .norms import norm_backward_into, norm_forward, norm_partials
from .runs import Runs, whole_runs, window_runs

# tensors among the arguments, of which MASK may be None; how many of the saved ones `backward_tokens` takes
TENSORS, MASK, TOKENS = 13, 4, 18


class Plan(NamedTuple):
    """Settings that are not tensors."""

    dtype: torch.dtype  # of the branches
    light_heads: int
    heavy_heads: int
    width: int  # of a head
    window: int
    causal: bool  # attention looks back only, and each window gives k_kv keys
    eps: float  # of the norms
    score_eps: float
    k_q: int
    k_kv: int  # of the sequence; causal: of each window
    q_eps: float  # temperature of the gates
    q_kind: int  # of the gates: index in KINDS
    q_hard: bool  # straight-through: gates are 1
    q_block: int  # of a causal choice of queries; 0: choose the best of all tokens
    q_memory: int
    kv_eps: float
    kv_kind: int
    kv_hard: bool
    explore_stride: int  # every so many tokens, one gives the queries' router a gradient (`nn.explore`); 0: none does
    explore_weight: float

    def queries(self) -> Choice:
        """Return how queries are chosen."""
        causal = (self.q_block, self.q_memory) if self.q_block else None
        return Choice(self.k_q, self.q_eps, self.q_kind, self.q_hard, causal)

    def keys(self) -> Choice:
        """Return how keys are chosen, of the sequence or of a window."""
        return Choice(self.k_kv, self.kv_eps, self.kv_kind, self.kv_hard)


@replayed
def _before_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor, plan: Plan,
    *weights: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Norm and score, choose twice, norm the chosen tokens; copy weights of another dtype to the branches'."""
    normed, scores, stats = norm_forward(x, None, light_norm, vectors, plan.eps, plan.score_eps, plan.dtype, mask)
    assert scores is not None
    gates_q, at_q, state_q, starts = choose(scores[0], mask, plan.queries())
    gates_kv, at_kv, state_kv, within, seen = choose_keys(
        scores[1], mask, plan.keys(), at_q, plan.window if plan.causal else 0
    )
    chosen_q, _, stats_q = norm_forward(x, at_q, norm_q, None, plan.eps, 0.0, plan.dtype)
    chosen_kv, _, stats_kv = norm_forward(x, at_kv, norm_kv, None, plan.eps, 0.0, plan.dtype)
    other = any(w.dtype != plan.dtype for w in weights)
    copies = branch.cast((*weights, None, None), plan.dtype)[:6] if other else ()
    return (
        normed, scores, stats, gates_q, at_q, state_q, starts, gates_kv, at_kv, state_kv, within, seen, chosen_q,
        stats_q, chosen_kv, stats_kv, *copies,
    )  # fmt: skip


@replayed
def _attend(
    qkv: Tensor, q: Tensor, kv: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan, precision: str,
    light_mask: Tensor | None, light_first: Tensor, light_last: Tensor,
    heavy_mask: Tensor | None, heavy_first: Tensor, heavy_last: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotate queries and keys in place (this node alone holds them), gate the values, compute both attentions."""
    scale = 1 / math.sqrt(plan.width)
    light_qk, light_v = split(qkv)
    apply_rotary(light_qk, None, BASE, False, light_qk)
    light_q, light_k = light_qk.chunk(2, dim=2)
    light, light_lse = span.forward(light_q, light_k, light_v, light_first, light_last, light_mask, scale)
    k = kv.select(2, 0)
    apply_rotary(q, at_q, BASE, False, q)
    apply_rotary(k, at_kv, BASE, False, k)
    gated = branch.gate(kv.select(2, 1), gates_kv)
    heavy, heavy_lse = span.forward(q, k, gated, heavy_first, heavy_last, heavy_mask, scale)
    return light, light_lse, gated, heavy, heavy_lse


_add_chosen = replayed(add_rows)


@replayed
def _before_backward_products(
    dy: Tensor, update: Tensor, gates: Tensor, at_q: Tensor, null: Tensor, mask: Tensor | None, plan: Plan,
    need_gates: bool, need_null: bool, need_explore: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients of the heavy output and the queries' gates, explore_grad, partials of both outputs' sums."""
    d_update, d_gates = scatter_backward(dy, update, gates, at_q, True, need_gates, null)
    explore_grad = partials = None
    if need_explore:
        scale = -plan.explore_weight * plan.explore_stride
        explore_grad = branch.explore_gradient(dy, mask, plan.explore_stride, scale)
    if need_null:
        d = dy.shape[-1]
        partials = branch.new_partials(dy, dy.numel() // d, 2 * d)
        assert partials is not None
        assert d_update is not None
        branch.column_sums(dy.view(-1, d), partials, 0)
        branch.column_sums(d_update.view(-1, d), partials, d)
    return d_update, d_gates, explore_grad, partials


@replayed
def _attend_backward(
    d_light: Tensor, qkv: Tensor, light: Tensor, light_lse: Tensor, d_heavy: Tensor, q: Tensor, kv: Tensor,
    gated: Tensor, heavy: Tensor, heavy_lse: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    precision: str, light_mask: Tensor | None, light_first: Tensor, light_last: Tensor, light_begin: Tensor | None,
    light_end: Tensor | None, heavy_mask: Tensor | None, heavy_first: Tensor, heavy_last: Tensor,
    heavy_begin: Tensor | None, heavy_end: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of qkv, q, kv and the keys' gates through attention, rotary and gating."""
    scale = 1 / math.sqrt(plan.width)
    d_qkv = packed_gradient(
        d_light, qkv, light, light_lse, split(qkv)[0], light_first, light_last, light_mask, BASE, scale,
        None if light_begin is None or light_end is None else (light_begin, light_end),
    )  # fmt: skip
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    dk, dv = dkv.select(2, 0), dkv.select(2, 1)
    span.backward_into(
        (dq, dk, dv), d_heavy, q, kv.select(2, 0), gated, heavy, heavy_lse, heavy_first, heavy_last, heavy_mask, scale,
        None if heavy_begin is None or heavy_end is None else (heavy_begin, heavy_end),
    )  # fmt: skip
    apply_rotary(dq, at_q, BASE, True, dq)
    apply_rotary(dk, at_kv, BASE, True, dk)
    return d_qkv, dq, dkv, branch.gate_backward(dv, kv.select(2, 1), gates_kv)


@replayed
def _after_backward_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor, norm_q: Tensor, norm_kv: Tensor, mask: Tensor | None, plan: Plan,
    at_q: Tensor, gates_q: Tensor, at_kv: Tensor, gates_kv: Tensor, scores: Tensor, stats: Tensor, state_q: Tensor,
    starts: Tensor | None, state_kv: Tensor, within: Tensor | None, stats_q: Tensor, stats_kv: Tensor,
    d_normed: Tensor | None, d_q: Tensor | None, d_kv: Tensor | None, d_gates_q: Tensor | None,
    d_gates_kv: Tensor | None, g_scores: Tensor | None, explore_grad: Tensor | None, need_x: bool, need_sums: bool,
    need_q: bool, need_kv: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx through all norms, choices and scores, and partials: light norm, vectors, then the chosen tokens'."""
    d, tokens = x.shape[-1], x.numel() // x.shape[-1]
    ds, vector = None, None
    if d_gates_q is not None and d_gates_kv is not None:
        ds, vector = torch.empty_like(scores), vectors
        choose_backward(d_gates_q, scores[0], mask, plan.queries(), at_q, gates_q, state_q, starts, ds[0])
        choose_keys_backward(
            d_gates_kv, scores[1], mask, plan.keys(), at_kv if within is None else within, gates_kv, state_kv,
            plan.window if plan.causal else 0, ds[1],
        )  # fmt: skip
        ds = ds if g_scores is None else ds + g_scores
    own = (d + (0 if vector is None else vector.numel())) if need_sums else 0
    partials = None
    if need_sums:
        partials = norm_partials(x, tokens, light_norm, vector, d * (need_q + need_kv))
    elif need_q or need_kv:
        partials = norm_partials(x, tokens, norm_q, None, d * (need_q + need_kv - 1))
    rows = []
    for dy, at, norm, of_rows, need in (
        (d_q, at_q, norm_q, stats_q, need_q),
        (d_kv, at_kv, norm_kv, stats_kv, need_kv),
    ):
        if dy is not None:
            into = None if partials is None or not need else partials[:, own:]
            rows.append((norm_backward_into(into, dy, x, at, norm, None, of_rows, None, None, need_x), at))
            own += d * need
    if not (need_x or need_sums):
        return None, partials
    dx = norm_backward_into(
        partials if need_sums else None, torch.zeros_like(x) if d_normed is None else d_normed, x, None, light_norm,
        vector, stats, None if vector is None else scores, ds, need_x, explore_grad, max(1, plan.explore_stride), mask,
    )  # fmt: skip
    if dx is not None:
        # one after the other: a token may be in both lists
        for update, at in rows:
            if update is not None:
                add_rows(dx.view(tokens, d), update, None, at)
    return dx, partials


def _runs(
    x: Tensor, mask: Tensor | None, at_kv: Tensor, seen: Tensor | None, plan: Plan, precision: str
) -> tuple[Runs, Runs]:
    """Return the runs of the local attention and of the chosen queries."""
    n, queries = x.shape[1], (x.device, plan.dtype, plan.width, precision)
    light = window_runs(n, plan.window, plan.causal, queries)._replace(mask=mask)
    there = None if mask is None and not (plan.causal and n % plan.window) else at_kv >= 0
    if seen is None:
        return light, whole_runs(plan.k_q, at_kv.shape[1], queries)._replace(mask=there)
    return light, Runs(there, seen[0], seen[1], None, None)


def forward(
    x: Tensor, vector_q: Tensor, vector_kv: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor,
    norm_kv: Tensor, weights: Sequence[Tensor], plan: Plan,
) -> tuple[tuple[Tensor, ...], list[Any], list[Tensor]]:  # fmt: skip
    """Return (y, queries, their gates, keys, their gates, scores (2, batch, n)), what backward needs, and the matrices.

    The last are copies of the weights in the branches' dtype, and empty where they have it. `weights`: ν, then qkv and
    out of the light branch, q, kv and out of the heavy one.
    """
    (batch, n, dim), precision = x.shape, torch.get_float32_matmul_precision()
    vectors = torch.cat((vector_q, vector_kv))
    (
        normed, scores, stats, gates_q, at_q, state_q, starts, gates_kv, at_kv, state_kv, within, seen, chosen_q,
        stats_q, chosen_kv, stats_kv, *copies,
    ) = _before_products(x, vectors, light_norm, mask, norm_q, norm_kv, plan, *weights)  # fmt: skip
    null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w = copies or weights
    gates_kv = gates_kv.view(at_kv.shape)
    light_runs, heavy_runs = _runs(x, mask, at_kv, seen, plan, precision)
    tokens = normed.view(-1, dim)
    qkv = torch.mm(tokens, qkv_w.t()).view(batch, n, 3, plan.light_heads, plan.width)
    q = torch.mm(chosen_q.view(-1, dim), q_w.t()).view(batch, -1, plan.heavy_heads, plan.width)
    kv = torch.mm(chosen_kv.view(-1, dim), kv_w.t()).view(batch, -1, 2, plan.heavy_heads, plan.width)
    light, light_lse, gated, heavy, heavy_lse = _attend(
        qkv, q, kv, gates_kv, at_q, at_kv, plan, precision, *light_runs[:3], *heavy_runs[:3]
    )  # fmt: skip
    # y has the shape of x from the start: autograd forbids in-place writes to a view that a Function returned
    y = torch.empty(x.shape, dtype=plan.dtype, device=x.device)
    rows = y.view(-1, dim)
    torch.addmm(null, light.view(batch * n, -1), light_out_w.t(), out=rows)
    update = torch.mm(heavy.view(batch * plan.k_q, -1), heavy_out_w.t()).view(chosen_q.shape)
    _add_chosen(rows, update, gates_q, at_q, null)
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
    light_runs, heavy_runs = _runs(x, mask, at_kv, seen, plan, precision)
    grads: list[Tensor | None] = [None] * 5

    def gradient(which: int, dy: Tensor, x: Tensor) -> None:
        if need_weights[which]:
            grads[which] = weight_gradient(dy, x.view(len(dy), -1), dtypes[1 + which])

    dy = dy.to(plan.dtype).contiguous()
    d_update, d_gates_q, explore_grad, partials = _before_backward_products(
        dy, update, gates_q, at_q, null, mask, plan, need_gates, need_null, plan.explore_stride > 0 and need_v
    )
    dy, du = dy.view(-1, dim), d_update.view(-1, dim)
    gradient(1, dy, light)
    gradient(4, du, heavy)
    d_null = None
    if partials is not None:
        of_dy, of_du = partials.sum(0).split_with_sizes((dim, dim))
        d_null = (of_dy - of_du).to(dtypes[0])
    d_light, d_heavy = torch.mm(dy, light_out_w).view(light.shape), torch.mm(du, heavy_out_w).view(heavy.shape)
    del dy, du, d_update, update
    if heavy_runs.begin is None:
        begin, end = span.edges(q, heavy_runs.first, heavy_runs.last, kv.shape[1]) or (None, None)
        heavy_runs = heavy_runs._replace(begin=begin, end=end)
    d_qkv, dq, dkv, d_gates_kv = _attend_backward(
        d_light, qkv, light, light_lse, d_heavy, q, kv, gated, heavy, heavy_lse, gates_kv, at_q, at_kv, plan, precision,
        *light_runs, *heavy_runs,
    )  # fmt: skip
    del qkv, light, d_light
    d_qkv, dq, dkv = d_qkv.view(len(tokens), -1), dq.view(at_q.numel(), -1), dkv.view(at_kv.numel(), -1)
    gradient(0, d_qkv, tokens)
    del tokens
    gradient(2, dq, chosen_q)
    gradient(3, dkv, chosen_kv)
    d_normed = torch.mm(d_qkv, qkv_w).view(x.shape) if need_x or need_light_norm else None
    d_q = torch.mm(dq, q_w).view(chosen_q.shape) if need_x or need_norm_q else None
    d_kv = torch.mm(dkv, kv_w).view(chosen_kv.shape) if need_x or need_norm_kv else None
    return d_normed, d_q, d_kv, d_gates_q, d_gates_kv if need_gates else None, explore_grad, d_null, *grads


def backward_tokens(
    saved: Sequence[Any], plan: Plan, needs: Sequence[bool], products: Sequence[Tensor | None],
    g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, both vectors (2, dim), and the norms of tokens, queries and keys; None if not needed.

    `saved` holds x, vectors, the three norms, mask, queries, their gates, keys, their gates, scores, and stats to
    stats_kv as :func:`forward` kept them. `products` are the first six results of :func:`backward_products`.
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
    dx, partials = _after_backward_products(
        x, *saved[1:6], plan, *saved[6:], d_normed, d_q, d_kv, d_gates_q, d_gates_kv, g_scores, explore_grad, need_x,
        need_v or needed[0], *needed[1:],
    )  # fmt: skip
    d_vectors, d_norms = None, [None] * 3
    if partials is not None:
        d = x.shape[-1]
        totals = list(partials.sum(0).split_with_sizes((d,) * (partials.shape[1] // d)))
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
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> Any:
        x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, *weights = tensors
        public, kept, matrices = forward(
            x,
            vector_q,
            vector_kv,
            light_norm,
            mask,
            norm_q,
            norm_kv,
            weights,
            plan,  # type: ignore[arg-type]
        )
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
            tokens, ctx.plan, needs[:5], products[:6], g_gates_q, g_gates_kv, g_scores
        )
        return None, dx, dv_q, dv_kv, d_norms[0], None, *d_norms[1:], *products[6:]


_apply: Callable[..., Any] = fast_apply(_RoutedAttention)


def routed_attention(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return y like x in the branches' dtype, indices and gates of queries and of keys, and scores (2, batch, n).

    `tensors`: x, the routers' vectors (1, dim) of queries and of keys, the norm's weight of all tokens, the mask or
    None, the norms' weights of queries and of keys, ν, then qkv and out of the light branch, q, kv and out of the heavy
    one. Callers guarantee that `core.eager.plain` and `fits_one_program` hold, that the arguments are checked, and that
    there are tokens and k ≥ 1.
    """
    return _apply(plan, *tensors)  # type: ignore[no-any-return]


__all__ = ["Plan", "routed_attention"]
