"""`routed_attention`: both branches of routed attention as one autograd node, for plain eager PyTorch.

    y = out(attention(normed)) + ν        y_i += g_i·(out'(attention'(norm_q(x_i), norm_kv(x_K))) − ν)

The node is faster than a composition of modules. It norms the chosen tokens while it gathers them, adds their gradients
in place to those of all tokens (through the slots of `fork`), casts all weights together, and computes weight gradients
directly in the weights' dtype. torch computes the matrix products; all kernels between two products are one call for
`core.launch.replay`, so that the host does little more than launch them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.core.eager import fast_apply
from onepass.core.launch import replayed
from onepass.core.products import weight_gradient
from onepass.ops.routing.rows import add_rows, scatter_backward
from onepass.ops.span_attention import op as span
from onepass.ops.span_attention.op_rotary import BASE, apply_rotary, packed_gradient, split

from . import branch
from .fork import Fork, as_forward_did
from .norms import norm_backward_into, norm_forward, norm_partials
from .runs import Runs


class Plan(NamedTuple):
    """Settings of the node that are not tensors."""

    dtype: torch.dtype  # of the branches
    light_heads: int
    heavy_heads: int
    width: int
    eps: float  # of the norms of the chosen tokens
    precision: str  # of fp32 matrix products (torch.get_float32_matmul_precision); kernels are compiled for it


@replayed
def _before_products(
    x: Tensor, at_q: Tensor, at_kv: Tensor, norm_q: Tensor, norm_kv: Tensor, plan: Plan, *weights: Tensor
) -> tuple[Any, ...]:
    """Norm the chosen tokens; copy the weights to the branches' dtype where theirs differs."""
    chosen_q, *_ = norm_forward(x, at_q, norm_q, None, plan.eps, 0.0, plan.dtype)
    chosen_kv, *_ = norm_forward(x, at_kv, norm_kv, None, plan.eps, 0.0, plan.dtype)
    other = any(w.dtype != plan.dtype for w in weights)
    copies = branch.cast((*weights, None, None), plan.dtype)[:6] if other else ()
    return chosen_q, chosen_kv, *copies


@replayed
def _attend(
    qkv: Tensor, q: Tensor, kv: Tensor, gated: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    light_mask: Tensor | None, light_first: Tensor, light_last: Tensor,
    heavy_mask: Tensor | None, heavy_first: Tensor, heavy_last: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotate queries and keys in place (this node alone holds them), then compute both attentions."""
    scale = 1 / math.sqrt(plan.width)
    light_qk, light_v = split(qkv)
    apply_rotary(light_qk, None, BASE, False, light_qk)
    light_q, light_k = light_qk.chunk(2, dim=2)
    light, light_lse = span.forward(light_q, light_k, light_v, light_first, light_last, light_mask, scale)
    k = kv.select(2, 0)
    apply_rotary(q, at_q, BASE, False, q)
    apply_rotary(k, at_kv, BASE, False, k)
    heavy, heavy_lse = span.forward(q, k, gated, heavy_first, heavy_last, heavy_mask, scale)
    return light, light_lse, heavy, heavy_lse


_add_chosen = replayed(add_rows)


@replayed
def _before_backward_products(
    dy: Tensor, update: Tensor, gates: Tensor, x: Tensor, at_q: Tensor, at_kv: Tensor, norm_q: Tensor,
    norm_kv: Tensor, plan: Plan, need_gates: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients of the heavy output and the queries' gates; recompute the norms, cheaper than to keep them."""
    d_update, d_gates = scatter_backward(dy, update, gates, at_q, True, need_gates)
    chosen_q, _, stats_q = norm_forward(x, at_q, norm_q, None, plan.eps, 0.0, plan.dtype)
    chosen_kv, _, stats_kv = norm_forward(x, at_kv, norm_kv, None, plan.eps, 0.0, plan.dtype)
    return d_update, d_gates, chosen_q, stats_q, chosen_kv, stats_kv


@replayed
def _attend_backward(
    d_light: Tensor, qkv: Tensor, light: Tensor, light_lse: Tensor, d_heavy: Tensor, q: Tensor, kv: Tensor,
    gated: Tensor, heavy: Tensor, heavy_lse: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    light_mask: Tensor | None, light_first: Tensor, light_last: Tensor, light_begin: Tensor | None,
    light_end: Tensor | None, heavy_mask: Tensor | None, heavy_first: Tensor, heavy_last: Tensor,
    heavy_begin: Tensor | None, heavy_end: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of qkv, q and kv through attention and rotary; for kv's values, that of the gated values."""
    scale = 1 / math.sqrt(plan.width)
    d_qkv = packed_gradient(
        d_light, qkv, light, light_lse, split(qkv)[0], light_first, light_last, light_mask, BASE, scale,
        None if light_begin is None or light_end is None else (light_begin, light_end),
    )  # fmt: skip
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    dk = dkv.select(2, 0)
    span.backward_into(
        (dq, dk, dkv.select(2, 1)), d_heavy, q, kv.select(2, 0), gated, heavy, heavy_lse, heavy_first, heavy_last,
        heavy_mask, scale, None if heavy_begin is None or heavy_end is None else (heavy_begin, heavy_end),
    )  # fmt: skip
    apply_rotary(dq, at_q, BASE, True, dq)
    apply_rotary(dk, at_kv, BASE, True, dk)
    return d_qkv, dq, dkv


@replayed
def _after_backward_products(
    d_q: Tensor, d_kv: Tensor, x: Tensor, at_q: Tensor, at_kv: Tensor, norm_q: Tensor, norm_kv: Tensor,
    stats_q: Tensor, stats_kv: Tensor, need_x: bool, need_q: bool, need_kv: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return gradients of the chosen tokens through their norms, and partials of the norm weights' gradients."""
    partials_q = norm_partials(x, at_q.numel(), norm_q, None) if need_q else None
    partials_kv = norm_partials(x, at_kv.numel(), norm_kv, None) if need_kv else None
    rows_q = rows_kv = None
    if need_x or need_q:
        rows_q = norm_backward_into(partials_q, d_q, x, at_q, norm_q, None, stats_q, None, None, need_x)
    if need_x or need_kv:
        rows_kv = norm_backward_into(partials_kv, d_kv, x, at_kv, norm_kv, None, stats_kv, None, None, need_x)
    return rows_q, partials_q, rows_kv, partials_kv


def _gated(v: Tensor, gates: Tensor) -> Tensor:
    return v * gates.to(v.dtype)[..., None, None]


def forward(
    normed: Tensor, x: Tensor, at_q: Tensor, at_kv: Tensor, gates_q: Tensor, gates_kv: Tensor, norm_q: Tensor,
    norm_kv: Tensor, weights: Sequence[Tensor], light_runs: Runs, heavy_runs: Runs, plan: Plan,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Return y (batch·n, dim), what backward needs of the activations, and the five matrices as multiplied.

    The last are copies in the branches' dtype, and empty where the weights have it. `weights`: ν, then the matrices.
    """
    batch, n, dim = normed.shape
    chosen_q, chosen_kv, *copies = _before_products(x, at_q, at_kv, norm_q, norm_kv, plan, *weights)
    bias, qkv_c, light_out_c, q_c, kv_c, heavy_out_c = copies or weights
    tokens = normed.view(-1, dim)
    qkv = torch.mm(tokens, qkv_c.t()).view(batch, n, 3, plan.light_heads, plan.width)
    q = torch.mm(chosen_q.view(-1, dim), q_c.t()).view(batch, -1, plan.heavy_heads, plan.width)
    kv = torch.mm(chosen_kv.view(-1, dim), kv_c.t()).view(batch, -1, 2, plan.heavy_heads, plan.width)
    gated = _gated(kv.select(2, 1), gates_kv)
    light, light_lse, heavy, heavy_lse = _attend(
        qkv, q, kv, gated, at_q, at_kv, plan, *light_runs[:3], *heavy_runs[:3]
    )  # fmt: skip
    y = torch.addmm(bias, light.view(batch * n, -1), light_out_c.t())
    update = torch.addmm(-bias, heavy.view(batch * q.shape[1], -1), heavy_out_c.t()).view(chosen_q.shape)
    _add_chosen(y, update, gates_q, at_q)
    return y, [tokens, qkv, light, light_lse, q, kv, heavy, heavy_lse, update], copies[1:]


def backward(
    saved: list[Any], light_runs: Runs, heavy_runs: Runs, plan: Plan, dtypes: Sequence[torch.dtype],
    needs: Sequence[bool], dy: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of what :func:`forward` takes, for dy (batch·n, dim); None where `needs` is False.

    In order: normed tokens, chosen queries and keys of x as rows, gates of both, norms of both, ν, the matrices.
    `saved` holds x, both indices, both gates, both norms, what :func:`forward` kept, and the matrices as multiplied.
    This function empties the list: each tensor is freed after its last use if the caller holds no other reference.
    """
    (
        x, at_q, at_kv, gates_q, gates_kv, norm_q, norm_kv, tokens, qkv, light, light_lse, q, kv, heavy, heavy_lse,
        update, qkv_c, light_out_c, q_c, kv_c, heavy_out_c,
    ) = saved  # fmt: skip
    saved.clear()
    need_normed, need_x, _, need_gates, need_gates_kv, need_norm_q, need_norm_kv, need_null, *need_weights = needs
    dim = x.shape[-1]
    grads: list[Tensor | None] = [None] * 5

    def gradient(which: int, dy: Tensor, x: Tensor) -> None:
        if need_weights[which]:
            grads[which] = weight_gradient(dy, x.view(len(dy), -1), dtypes[1 + which])

    dy = dy.to(plan.dtype).contiguous()
    d_update, d_gates_q, chosen_q, stats_q, chosen_kv, stats_kv = _before_backward_products(
        dy.view(x.shape), update, gates_q, x, at_q, at_kv, norm_q, norm_kv, plan, need_gates
    )
    du, v = d_update.view(-1, dim), kv.select(2, 1)
    gradient(1, dy, light)
    gradient(4, du, heavy)
    d_null = (dy.sum(0, dtype=dtypes[0]) - du.sum(0, dtype=dtypes[0])) if need_null else None
    d_light, d_heavy = torch.mm(dy, light_out_c).view(light.shape), torch.mm(du, heavy_out_c).view(heavy.shape)
    if heavy_runs.begin is None:
        begin, end = span.edges(q, heavy_runs.first, heavy_runs.last, kv.shape[1]) or (None, None)
        heavy_runs = heavy_runs._replace(begin=begin, end=end)
    d_qkv, dq, dkv = _attend_backward(
        d_light, qkv, light, light_lse, d_heavy, q, kv, _gated(v, gates_kv), heavy, heavy_lse, at_q, at_kv, plan,
        *light_runs, *heavy_runs,
    )  # fmt: skip
    del qkv, light, d_light
    dv, d_gates_kv = dkv.select(2, 1), None
    if need_gates_kv:
        d_gates_kv = torch.linalg.vecdot(dv.flatten(2).to(gates_kv.dtype), v.flatten(2).to(gates_kv.dtype))
    dv.mul_(gates_kv.to(dv.dtype)[..., None, None])
    d_qkv, dq, dkv = d_qkv.view(len(dy), -1), dq.view(len(du), -1), dkv.view(at_kv.numel(), -1)
    gradient(0, d_qkv, tokens)
    del tokens
    gradient(2, dq, chosen_q)
    gradient(3, dkv, chosen_kv)
    d_normed = torch.mm(d_qkv, qkv_c).view(x.shape) if need_normed else None
    del d_qkv
    rows_q, partials_q, rows_kv, partials_kv = _after_backward_products(
        torch.mm(dq, q_c).view(chosen_q.shape), torch.mm(dkv, kv_c).view(chosen_kv.shape), x, at_q, at_kv,
        norm_q, norm_kv, stats_q, stats_kv, need_x, need_norm_q, need_norm_kv,
    )  # fmt: skip
    d_norms = [None if p is None else p.sum(0).to(w.dtype) for p, w in ((partials_q, norm_q), (partials_kv, norm_kv))]
    return d_normed, rows_q, rows_kv, d_gates_q, d_gates_kv, *d_norms, d_null, *grads


class _RoutedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, slot_q: Tensor, slot_kv: Tensor, gates_q: Tensor, gates_kv: Tensor, norm_q: Tensor,
        norm_kv: Tensor, null: Tensor, qkv_w: Tensor, light_out_w: Tensor, q_w: Tensor, kv_w: Tensor,
        heavy_out_w: Tensor, x: Tensor, at_q: Tensor, at_kv: Tensor, light_runs: Runs, heavy_runs: Runs, plan: Plan,
    ) -> Tensor:  # fmt: skip
        weights = null, qkv_w, light_out_w, q_w, kv_w, heavy_out_w
        y, kept, matrices = forward(
            normed, x, at_q, at_kv, gates_q, gates_kv, norm_q, norm_kv, weights, light_runs, heavy_runs, plan
        )  # fmt: skip
        ctx.save_for_backward(
            x, at_q, at_kv, gates_q, gates_kv, norm_q, norm_kv, *kept, *(matrices or weights[1:]), *light_runs,
            *heavy_runs,
        )  # fmt: skip
        ctx.plan, ctx.dtypes = plan, [w.dtype for w in weights]
        return y

    @staticmethod
    @as_forward_did("RoutedAttention")
    def backward(ctx: Any, grads_out: tuple[Tensor | None, ...]) -> Any:
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # `saved` is now the only owner, unless the graph is retained
        light_runs, heavy_runs = Runs(*saved[-10:-5]), Runs(*saved[-5:])
        del saved[-10:]
        plan, precision = ctx.plan, torch.get_float32_matmul_precision()
        if precision != plan.precision:
            # the precision changed since forward: other kernels, with other tiles of keys
            plan = plan._replace(precision=precision)
            light_runs, heavy_runs = (r._replace(begin=None, end=None) for r in (light_runs, heavy_runs))
        grads = backward(saved, light_runs, heavy_runs, plan, ctx.dtypes, ctx.needs_input_grad[:13], grads_out[0])  # type: ignore[arg-type]
        return *grads, None, None, None, None, None, None


_apply = fast_apply(_RoutedAttention)


def routed_attention(
    forked: Fork, x: Tensor, gates: tuple[Tensor, Tensor], indices: tuple[Tensor, Tensor], weights: tuple[Tensor, ...],
    runs: tuple[Runs, Runs], plan: Plan,
) -> Tensor:  # fmt: skip
    """Return both branches' gated sum as rows (batch·n, dim) in the dtype of `forked.normed`; see the module.

    `gates` and `indices` are those of the queries and of the keys, ``(batch, k)`` each, k ≥ 1; `forked` is a `fork` of
    x with a slot for each of the two. `weights`: of the norms of chosen queries and keys, ν, then of the linear layers
    qkv and out of the light branch, q, kv and out of the heavy one. Callers guarantee the same as for `fork`.
    """
    # one slot per list: a token may be in both, and its two gradients must be added one after the other
    forked.choice.indices = indices
    return _apply(  # type: ignore[no-any-return, no-untyped-call]
        forked.normed, *forked.slots, *gates, *weights, x.detach(), *indices, *runs, plan
    )


__all__ = ["Plan", "routed_attention"]
