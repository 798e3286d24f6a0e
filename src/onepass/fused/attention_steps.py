"""The kernels of routed attention before, between and after its matrix products: each function is one replayed call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import replayed
from onepass.ops.routing.op import add_rows, scatter_backward
from onepass.ops.span_attention import op as span
from onepass.ops.span_attention.op import BASE, apply_rotary, split

from . import branch
from .choice import choose, choose_backward, choose_keys, choose_keys_backward
from .norms import Chosen, norm_chosen, score_tokens, through_norms
from .plans import AttentionPlan as Plan


def _heads(plan: Plan, rows: Tensor, batch: int, parts: int, heads: int) -> Tensor:
    """Return the rows (batch·n, parts·heads·width) of a product as (batch, n, parts, heads, width)."""
    return rows.view(batch, len(rows) // batch, parts, heads, plan.width)


def _choose_both(scores: Tensor, mask: Tensor | None, plan: Plan) -> tuple[Any, ...]:
    """Choose queries and keys by the scores (2, batch, n): gates, indices and state of each, as `choose_keys` says."""
    gates_q, at_q, state_q, starts = choose(scores[0], mask, plan.queries)
    gates_kv, at_kv, state_kv, within, seen = choose_keys(
        scores[1], mask, plan.keys, at_q, plan.window if plan.causal else 0
    )
    return gates_q, at_q, state_q, starts, gates_kv.view(at_kv.shape), at_kv, state_kv, within, seen


def _norm_both(
    x: Tensor, at_q: Tensor, at_kv: Tensor, norm_q: Tensor, norm_kv: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normed queries and keys as rows, each with its statistics."""
    return *norm_chosen(x, at_q, norm_q, plan.eps, plan.dtype), *norm_chosen(x, at_kv, norm_kv, plan.eps, plan.dtype)


@replayed
def before_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor, plan: Plan,
    *weights: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Norm and score, choose twice, norm the chosen tokens; copy the weights."""
    y, tokens, scores, stats, *copies = score_tokens(x, vectors, light_norm, mask, plan, *weights)
    choice = _choose_both(scores, mask, plan)
    return y, tokens, scores, stats, *choice, *_norm_both(x, choice[1], choice[5], norm_q, norm_kv, plan), *copies


def _attend_light(
    qkv: Tensor, batch: int, plan: Plan, mask: Tensor | None, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of qkv (batch·n, 3·inner) in place; return the attention's rows and denominators."""
    qk, v = split(_heads(plan, qkv, batch, 3, plan.light_heads))
    apply_rotary(qk, None, BASE, False, qk)
    q, k = qk.chunk(2, dim=2)
    light, lse = span.forward(q, k, v, first, last, mask, 1 / math.sqrt(plan.width))
    return light.view(len(qkv), -1), lse


def _attend_heavy(
    q: Tensor, kv: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan, mask: Tensor | None,
    first: Tensor, last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query = _heads(plan, q, len(at_q), 1, plan.heavy_heads).select(2, 0)
    k, v = _heads(plan, kv, len(at_q), 2, plan.heavy_heads).unbind(2)
    apply_rotary(query, at_q, BASE, False, query)
    apply_rotary(k, at_kv, BASE, False, k)
    gated = branch.gate(v, gates_kv)
    heavy, lse = span.forward(query, k, gated, first, last, mask, 1 / math.sqrt(plan.width))
    return gated, heavy.view(len(q), -1), lse


@replayed
def attend(
    qkv: Tensor, q: Tensor, kv: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan, precision: str,
    light_mask: Tensor | None, light_first: Tensor, light_last: Tensor, heavy_mask: Tensor | None,
    heavy_first: Tensor, heavy_last: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotate queries and keys in place (the node alone holds them), gate the values, compute both attentions.

    qkv, q and kv are rows of products, and so are the attentions' results. `precision` is that of fp32 products, which
    decides the kernels' tiles (torch.get_float32_matmul_precision); it is part of what a replay is known by.
    """
    light = _attend_light(qkv, len(at_q), plan, light_mask, light_first, light_last)
    heavy = _attend_heavy(q, kv, gates_kv, at_q, at_kv, plan, heavy_mask, heavy_first, heavy_last)
    return *light, *heavy


add_chosen = replayed(add_rows)


@replayed
def before_backward_products(
    dy: Tensor, update: Tensor, gates: Tensor, at_q: Tensor, null: Tensor, mask: Tensor | None, plan: Plan,
    need_gates: bool, need_null: bool, need_explore: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dy in the branches' dtype, gradients of the heavy output and the queries' gates, explore_grad, and sums.

    These are of both outputs; dy is None where it had that dtype.
    """
    d, copy, partials = dy.shape[-1], None, None
    if need_null:
        partials = branch.new_partials(dy, dy.numel() // d, 2 * d)
        assert partials is not None
        rows = branch.column_sums(dy.view(-1, d), partials, 0, plan.dtype)
        dy, copy = (dy, None) if dy.dtype == plan.dtype else (rows.view(dy.shape), rows)
    d_update, d_gates = scatter_backward(dy, update.view(*at_q.shape, d), gates, at_q, True, need_gates, null)
    assert d_update is not None
    d_update = d_update.view(-1, d)
    explore_grad = sums = None
    if need_explore:
        scale = -plan.explore_weight * plan.explore_stride
        explore_grad = branch.explore_gradient(dy, mask, plan.explore_stride, scale)
    if partials is not None:
        branch.column_sums(d_update, partials, d)
        sums = branch.total(partials)
    return copy, d_update, d_gates, explore_grad, sums


@replayed
def attend_backward(
    d_light: Tensor, qkv: Tensor, light: Tensor, light_lse: Tensor, d_heavy: Tensor, q: Tensor, kv: Tensor,
    gated: Tensor, heavy: Tensor, heavy_lse: Tensor, gates_kv: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    precision: str, light_mask: Tensor | None, light_first: Tensor, light_last: Tensor,
    light_begin: Tensor | None, light_end: Tensor | None, heavy_mask: Tensor | None, heavy_first: Tensor,
    heavy_last: Tensor, heavy_begin: Tensor | None, heavy_end: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of qkv, q, kv and the keys' gates through attention, rotary and gating; rows as in `attend`."""
    scale, batch = 1 / math.sqrt(plan.width), len(at_q)

    def light_rows(rows: Tensor, parts: int) -> Tensor:
        return _heads(plan, rows, batch, parts, plan.light_heads)

    def heavy_rows(rows: Tensor, parts: int) -> Tensor:
        return _heads(plan, rows, batch, parts, plan.heavy_heads)

    d_qkv = torch.empty_like(qkv)
    (qk, light_v), (d_qk, d_light_v) = split(light_rows(qkv, 3)), split(light_rows(d_qkv, 3))
    (light_q, light_k), (d_light_q, d_light_k) = qk.chunk(2, dim=2), d_qk.chunk(2, dim=2)
    span.backward(
        light_rows(d_light, 1).select(2, 0), light_q, light_k, light_v, light_rows(light, 1).select(2, 0),
        light_lse, light_first, light_last, light_mask, scale, (d_light_q, d_light_k, d_light_v),
        None if light_begin is None or light_end is None else (light_begin, light_end),
    )  # fmt: skip
    apply_rotary(d_qk, None, BASE, True, d_qk)
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    (k, v), (dk, dv), d_query = (
        heavy_rows(kv, 2).unbind(2),
        heavy_rows(dkv, 2).unbind(2),
        heavy_rows(dq, 1).select(2, 0),
    )
    span.backward(
        heavy_rows(d_heavy, 1).select(2, 0), heavy_rows(q, 1).select(2, 0), k, gated,
        heavy_rows(heavy, 1).select(2, 0), heavy_lse, heavy_first, heavy_last, heavy_mask, scale, (d_query, dk, dv),
        None if heavy_begin is None or heavy_end is None else (heavy_begin, heavy_end),
    )  # fmt: skip
    apply_rotary(d_query, at_q, BASE, True, d_query)
    apply_rotary(dk, at_kv, BASE, True, dk)
    return d_qkv, dq, dkv, branch.gate_backward(dv, v, gates_kv)


def _choose_both_backward(
    d_gates_q: Tensor, d_gates_kv: Tensor, scores: Tensor, mask: Tensor | None, plan: Plan, at_q: Tensor,
    gates_q: Tensor, at_kv: Tensor, gates_kv: Tensor, state_q: Tensor | None, starts: Tensor | None,
    state_kv: Tensor | None, within: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the scores (2, batch, n) from those of both gates."""
    ds = torch.empty_like(scores)
    choose_backward(d_gates_q, scores[0], mask, plan.queries, at_q, gates_q, state_q, starts, ds[0])
    choose_keys_backward(
        d_gates_kv, scores[1], mask, plan.keys, at_kv if within is None else within, gates_kv, state_kv,
        plan.window if plan.causal else 0, ds[1],
    )  # fmt: skip
    return ds


@replayed
def after_backward_products(
    x: Tensor, vectors: Tensor, light_norm: Tensor, norm_q: Tensor, norm_kv: Tensor, mask: Tensor | None, plan: Plan,
    at_q: Tensor, gates_q: Tensor, at_kv: Tensor, gates_kv: Tensor, scores: Tensor, stats: Tensor,
    state_q: Tensor | None, starts: Tensor | None, state_kv: Tensor | None, within: Tensor | None,
    stats_q: Tensor, stats_kv: Tensor, d_normed: Tensor | None, d_q: Tensor | None, d_kv: Tensor | None,
    d_gates_q: Tensor | None, d_gates_kv: Tensor | None, g_scores: Tensor | None,
    explore_grad: Tensor | None, residual: Tensor | None,
    need_x: bool, need_sums: bool, need_q: bool, need_kv: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx through all norms, choices and scores, and sums: light norm, vectors, then the chosen tokens'."""
    ds = None
    if d_gates_q is not None and d_gates_kv is not None:
        ds = _choose_both_backward(
            d_gates_q, d_gates_kv, scores, mask, plan, at_q, gates_q, at_kv, gates_kv, state_q, starts, state_kv, within
        )  # fmt: skip
    if g_scores is not None:
        ds = g_scores if ds is None else ds + g_scores
    lists: list[Chosen] = [(d_q, at_q, norm_q, stats_q, need_q), (d_kv, at_kv, norm_kv, stats_kv, need_kv)]
    return through_norms(
        x, light_norm, vectors, mask, stats, scores, d_normed, ds, lists, explore_grad, plan.explore_stride, residual,
        need_x, need_sums,
    )  # fmt: skip
