"""All of routed attention as one autograd node, or as operators: see `node`.

y = out(attention(norm(x))) + ν        y_i += g_i·(out'(attention'(norm_q(x_i), norm_kv(x_K))) − ν)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import is_fake
from onepass.core.launch import replayed
from onepass.ops.span_attention import op as span
from onepass.ops.span_attention.op import apply_rotary, split

from . import branch
from .branch import add_chosen, begin_backward, steps, to, weight_gradient
from .choice import Choice
from .node import fused
from .runs import Runs, neighbours, runs_of, whole
from .tokens import backward, before_products, gates_gradient


class Plan(NamedTuple):
    """Settings that are not tensors."""

    dtype: torch.dtype  # of the branches
    light_heads: int
    heavy_heads: int
    width: int  # of a head
    window: int
    causal: bool  # attention looks back only, and each window gives `keys.k` keys
    queries: Choice
    keys: Choice  # never causal: of the whole sequence, or of a whole window
    explore_stride: int  # as in `feed_forward`, for the queries' router
    explore_weight: float
    residual: bool  # return x + y, and take its gradient
    eps: float  # of the norms
    score_eps: float

    @property
    def choices(self) -> tuple[tuple[Choice, int], tuple[Choice, int]]:
        """Each router's choice, and the tokens of a window that it chooses from (0: the whole sequence)."""
        return (self.queries, 0), (self.keys, self.window if self.causal else 0)


class Public(NamedTuple):
    """What the caller gets: y (with ``plan.residual`` x + y, in the wider dtype), and the routing."""

    y: Tensor
    at_q: Tensor
    gates_q: Tensor
    at_kv: Tensor
    gates_kv: Tensor
    scores: Tensor  # (2, batch, n)


@dataclass(slots=True)
class Saved:
    """What forward keeps for backward; rows are tokens. ν and the matrices have the branches' dtype."""

    vectors: Tensor  # of both routers
    stats: Tensor
    state_q: Tensor | None  # of the choice of queries, with its `starts`
    starts: Tensor | None
    state_kv: Tensor | None
    within: Tensor | None  # indices in windows, and the keys that each query sees: see `choose_within`
    runs: Tensor | None
    stats_q: Tensor
    stats_kv: Tensor
    tokens: Tensor  # normed; so are the chosen
    qkv: Tensor  # queries and keys are rotated
    light: Tensor
    light_lse: Tensor
    chosen_q: Tensor
    chosen_kv: Tensor
    q: Tensor
    kv: Tensor
    gated: Tensor
    heavy: Tensor
    heavy_lse: Tensor
    update: Tensor
    null: Tensor
    qkv_w: Tensor
    light_out_w: Tensor
    q_w: Tensor
    kv_w: Tensor
    heavy_out_w: Tensor


def _runs(
    tokens: Tensor, mask: Tensor | None, at_q: Tensor, at_kv: Tensor, runs: Tensor | None, plan: Plan
) -> tuple[Runs, Runs]:
    """Return the keys that each token of (batch, n, dim) sees in local attention, each chosen query in the heavy."""
    n = tokens.shape[1]
    if is_fake(tokens):
        # on FakeTensors attention reads no runs, and a symbolic size can't be a key of their cache
        no_runs = Runs(None, at_q, at_q)
        return no_runs, no_runs
    light = runs_of(neighbours, (n, plan.window, plan.causal), tokens.device)._replace(mask=mask)
    no_missing = mask is None and not (plan.causal and n % plan.window)
    present = None if no_missing else at_kv >= 0
    if runs is None:
        return light, runs_of(whole, (at_q.shape[1], at_kv.shape[1]), tokens.device)._replace(mask=present)
    first, last = runs.unbind()
    return light, Runs(present, first, last)


def _heads(rows: Tensor, batch: int, parts: int, heads: int) -> Tensor:
    """Return the rows (batch·n, parts·heads·width) of a product as (batch, n, parts, heads, width)."""
    total, columns = rows.shape
    return rows.view(batch, total // batch, parts, heads, columns // (parts * heads))


def _attention(q: Tensor, k: Tensor, v: Tensor, runs: Any) -> tuple[Tensor, Tensor]:
    mask, first, last = runs
    return (span.forward_op if is_fake(q) else span.forward)(q, k, v, first, last, mask)  # type: ignore[no-any-return]


def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, runs: Any, into: Any
) -> None:
    if not is_fake(dy):
        mask, first, last = runs
        span.backward(dy, q, k, v, y, lse, first, last, mask, into)


# the precision of fp32 products decides the tiles of attention
@partial(replayed, state=torch.get_float32_matmul_precision)
def _attend(
    qkv: Tensor, q: Tensor, kv: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan, *runs: Tensor | None
) -> tuple[Tensor, ...]:
    """Rotate queries and keys in place (the node alone holds them), gate the values, compute both attentions.

    qkv, q, kv and the results are rows as products have them. `runs`: the fields of the light `Runs`, then the heavy.
    """
    batch = at_q.shape[0]
    qk, light_v = split(_heads(qkv, batch, 3, plan.light_heads))
    apply_rotary(qk, None, False, qk)
    light_q, light_k = qk.chunk(2, dim=2)
    light, light_lse = _attention(light_q, light_k, light_v, runs[:3])
    query = _heads(q, batch, 1, plan.heavy_heads).select(2, 0)
    k, v = _heads(kv, batch, 2, plan.heavy_heads).unbind(2)
    apply_rotary(query, at_q, False, query)
    apply_rotary(k, at_kv, False, k)
    gated = steps(v).gate(v, gates_kv)
    heavy, heavy_lse = _attention(query, k, gated, runs[3:])
    return light.view(qkv.shape[0], plan.light_heads * plan.width), light_lse, gated, heavy.view(q.shape), heavy_lse


@partial(replayed, state=torch.get_float32_matmul_precision)
def _attend_backward(
    d_light: Tensor, qkv: Tensor, light: Tensor, light_lse: Tensor, d_heavy: Tensor, q: Tensor, kv: Tensor,
    gated: Tensor, heavy: Tensor, heavy_lse: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    *runs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of qkv, q, kv and the keys' gates through attention, rotary and gating; rows as in `_attend`."""
    batch, light_heads, heavy_heads = at_q.shape[0], plan.light_heads, plan.heavy_heads
    d_qkv, dq, dkv = (torch.empty_like(t) for t in (qkv, q, kv))
    (qk, light_v), (d_qk, d_light_v) = (split(_heads(t, batch, 3, light_heads)) for t in (qkv, d_qkv))
    (light_q, light_k), (d_light_q, d_light_k) = qk.chunk(2, dim=2), d_qk.chunk(2, dim=2)
    dy, y = (_heads(t, batch, 1, light_heads).select(2, 0) for t in (d_light, light))
    into = d_light_q, d_light_k, d_light_v
    _attention_backward(dy, light_q, light_k, light_v, y, light_lse, runs[:3], into)
    apply_rotary(d_qk, None, True, d_qk)
    (k, v), (dk, dv) = (_heads(t, batch, 2, heavy_heads).unbind(2) for t in (kv, dkv))
    dy, y, query, d_query = (_heads(t, batch, 1, heavy_heads).select(2, 0) for t in (d_heavy, heavy, q, dq))
    _attention_backward(dy, query, k, gated, y, heavy_lse, runs[3:], (d_query, dk, dv))
    apply_rotary(d_query, at_q, True, d_query)
    apply_rotary(dk, at_kv, True, dk)
    return d_qkv, dq, dkv, steps(v).gate_backward(dv, v, gates_kv)


def forward(
    plan: Plan, x: Tensor, vector_q: Tensor, vector_kv: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor,
    norm_kv: Tensor, null: Tensor, qkv_w: Tensor, light_out_w: Tensor, q_w: Tensor, kv_w: Tensor, heavy_out_w: Tensor,
) -> tuple[Public, Saved]:  # fmt: skip
    """Return the results, and what backward needs."""
    vectors = torch.cat((vector_q, vector_kv))
    weights = null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w
    (
        y, tokens, scores, stats, gates_q, at_q, state_q, starts, _, gates_kv, at_kv, state_kv, within, runs, chosen_q,
        stats_q, chosen_kv, stats_kv, *copies,
    ) = before_products(x, vectors, light_norm, mask, plan, norm_q, norm_kv, *weights)  # fmt: skip
    null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w = copies or weights
    qkv = torch.mm(tokens, qkv_w.t())
    light_runs, heavy_runs = _runs(x, mask, at_q, at_kv, runs, plan)
    q, kv = torch.mm(chosen_q, q_w.t()), torch.mm(chosen_kv, kv_w.t())
    light, light_lse, gated, heavy, heavy_lse = _attend(
        qkv, q, kv, gates_kv, at_q, at_kv, plan, *light_runs, *heavy_runs
    )
    rows = torch.addmm(null, light, light_out_w.t(), out=None if y is None else y.view(tokens.shape))
    update = torch.mm(heavy, heavy_out_w.t())
    if y is None:
        y = branch.add_residual(x, rows, update, gates_q, at_q, null)
    else:
        add_chosen(rows, update, gates_q, at_q, null)
    return Public(y, at_q, gates_q, at_kv, gates_kv, scores), Saved(
        vectors, stats, state_q, starts, state_kv, within, runs, stats_q, stats_kv, tokens, qkv, light, light_lse,
        chosen_q, chosen_kv, q, kv, gated, heavy, heavy_lse, update, null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w,
    )  # fmt: skip


def backward_products(
    saved: Saved, plan: Plan, needs: Sequence[bool], dtypes: Sequence[torch.dtype], dy: Tensor, mask: Tensor | None,
    at_q: Tensor, gates_q: Tensor, at_kv: Tensor, gates_kv: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of normed tokens, queries, keys, of both gates, explore_grad, and those of the weights."""
    need_x, need_vector_q, need_vector_kv, need_light_norm, need_norm_q, need_norm_kv, need_null, *need_weights = needs
    need_v, dim = need_vector_q or need_vector_kv, dy.shape[-1]
    need_gates = need_x or need_v
    light_runs, heavy_runs = _runs(dy, mask, at_q, at_kv, saved.runs, plan)
    grads: list[Tensor | None] = [None] * 6

    def gradient(i: int, dy: Tensor, x: Tensor) -> None:
        if need_weights[i]:
            grads[1 + i] = weight_gradient(dy, x, dtypes[1 + i])

    dy = (dy if need_null else to(dy, plan.dtype)).contiguous()
    # ν is in both branches' outputs: its gradient is the difference of their sums
    widths = (0, dim, 0, dim) if need_null else (0, 0, 0, 0)
    rounded, sums, du, d_gates_q, explore_grad = begin_backward(
        dy, saved.update, gates_q, at_q, saved.null, mask, plan, widths, True, need_gates, need_v
    )
    assert du is not None
    dy = (dy if rounded is None else rounded).view(-1, dim)
    del rounded, saved.update
    gradient(1, dy, saved.light)
    gradient(4, du, saved.heavy)
    if sums is not None:
        dy_sum, du_sum = sums.split_with_sizes((dim, dim))
        grads[0] = (dy_sum - du_sum).to(dtypes[0])
    d_light, d_heavy = torch.mm(dy, saved.light_out_w), torch.mm(du, saved.heavy_out_w)
    del dy, du
    d_qkv, dq, dkv, d_gates_kv = _attend_backward(
        d_light, saved.qkv, saved.light, saved.light_lse, d_heavy, saved.q, saved.kv, saved.gated, saved.heavy,
        saved.heavy_lse, gates_kv, at_q, at_kv, plan, *light_runs, *heavy_runs,
    )  # fmt: skip
    del saved.qkv, saved.light, d_light
    gradient(2, dq, saved.chosen_q)
    d_q = torch.mm(dq, saved.q_w) if need_x or need_norm_q else None
    gradient(0, d_qkv, saved.tokens)
    del saved.tokens
    d_normed = torch.mm(d_qkv, saved.qkv_w) if need_x or need_light_norm else None
    gradient(3, dkv, saved.chosen_kv)
    d_kv = torch.mm(dkv, saved.kv_w) if need_x or need_norm_kv else None
    return d_normed, d_q, d_kv, d_gates_q, d_gates_kv if need_gates else None, explore_grad, *grads


def backward_tokens(
    plan: Plan, needs: Sequence[bool], d_normed: Tensor | None, d_q: Tensor | None, d_kv: Tensor | None,
    d_gates_q: Tensor | None, d_gates_kv: Tensor | None, d_explore: Tensor | None, residual: Tensor | None,
    g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
    x: Tensor, vectors: Tensor, light_norm: Tensor, norm_q: Tensor, norm_kv: Tensor, mask: Tensor | None,
    at_q: Tensor, gates_q: Tensor, at_kv: Tensor, gates_kv: Tensor, scores: Tensor, stats: Tensor,
    state_q: Tensor | None, starts: Tensor | None, state_kv: Tensor | None, within: Tensor | None, stats_q: Tensor,
    stats_kv: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, the routers' vectors and the norms: through norms, choices and scores."""
    need_x, need_vector_q, need_vector_kv, need_light_norm, need_norm_q, need_norm_kv, *_ = needs
    need = need_x, need_vector_q or need_vector_kv, need_light_norm and d_normed is not None
    return backward(
        plan, need, x, vectors, light_norm, mask, scores, stats, d_normed, g_scores, d_explore, residual,
        d_q, gates_gradient(need, d_gates_q, g_gates_q), norm_q, need_norm_q and d_q is not None, stats_q,
        gates_q, at_q, state_q, starts,
        d_kv, gates_gradient(need, d_gates_kv, g_gates_kv), norm_kv, need_norm_kv and d_kv is not None, stats_kv,
        gates_kv, at_kv, state_kv, within,
    )  # fmt: skip


def _multiplications(plan: Plan, x: Any, null: Any, *matrices: Any) -> int:
    batch, n, _ = x
    keys = -(-n // plan.window) * plan.keys.k if plan.causal else plan.keys.k
    rows = n, n, plan.queries.k, keys, plan.queries.k
    total: int = 2 * batch * sum(m * w[0] * w[1] for m, w in zip(rows, matrices, strict=True))
    return total


routed_attention, forward_op = fused(
    "RoutedAttention", Plan, forward, backward_products, backward_tokens, _multiplications, 6
)


def with_keys(plan: Plan, *tensors: Any) -> tuple[Public, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Compute without gradients; return also rotated keys and values (batch, n, heads, width), light, then heavy."""
    public, saved = forward(plan, *tensors)
    batch = len(public.y)
    _, k, v = _heads(saved.qkv, batch, 3, plan.light_heads).unbind(2)
    return public, (k, v), (_heads(saved.kv, batch, 2, plan.heavy_heads).select(2, 0), saved.gated)
