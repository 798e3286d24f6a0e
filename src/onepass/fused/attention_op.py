"""Routed attention as operators, one forward and two backward, for calls that go through torch's dispatcher.

They run the functions of the eager node: torch.compile, export, FakeTensor and dispatch modes see one operator where
the composition of modules has dozens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd

from onepass.core.eager import outside_autocast
from onepass.core.flops import flop_formula, register_formulas
from onepass.core.register import refuse_second, register, register_fake

from . import attention as node
from .attention import MASK, TENSORS, TOKENS
from .choice import empty_choice
from .plans import AttentionPlan as Plan

# the outputs of forward that belong to the caller: y, indices and gates of queries and of keys, scores
PUBLIC = 6


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return the tensors with an empty one for each None, as an operator's outputs can't be None."""
    return [like.new_empty(0) if t is None else t for t in tensors]


def _there(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [t if t.numel() else None for t in tensors]


def _forward(
    x: Tensor, vector_q: Tensor, vector_kv: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor,
    norm_kv: Tensor, null: Tensor, qkv: Tensor, light_out: Tensor, q: Tensor, kv: Tensor, heavy_out: Tensor,
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Return y, the routing, what backward needs, and ν and the matrices as cast; empty: there is none."""
    plan = Plan.of(dtype, ints, floats)
    weights = null, qkv, light_out, q, kv, heavy_out
    # the caller's autocast has become `dtype`
    with outside_autocast(x.device):
        public, kept, matrices = node.forward(x, vector_q, vector_kv, light_norm, mask, norm_q, norm_kv, weights, plan)
    return *public, *_filled([*kept, *(matrices or (None,) * 6)], x)  # type: ignore[return-value]


def _products_backward(
    dy: Tensor, x: Tensor, mask: Tensor | None, weights: Sequence[Tensor], kept: Sequence[Tensor],
    needs: Sequence[bool],
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Call `node.backward_products`; a gradient that is not needed is an empty tensor."""
    plan = Plan.of(dtype, ints, floats)
    activations, cast = _there(kept[: -len(weights)]), kept[-len(weights) :]
    matrices = [c if c.numel() else w for c, w in zip(cast, weights, strict=True)]
    with outside_autocast(dy.device):
        grads = node.backward_products([x, mask, *activations, *matrices], plan, [w.dtype for w in weights], needs, dy)
    return tuple(_filled(grads, dy))  # type: ignore[return-value]


def _tokens_backward(
    products: Sequence[Tensor], dy: Tensor | None, g_gates_q: Tensor | None, g_gates_kv: Tensor | None,
    g_scores: Tensor | None, x: Tensor, vectors: Tensor, light_norm: Tensor, norm_q: Tensor, norm_kv: Tensor,
    mask: Tensor | None, kept: Sequence[Tensor], needs: Sequence[bool],
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Call `node.backward_tokens`; an empty tensor stands for None in `products`, `kept` and the result."""
    plan = Plan.of(dtype, ints, floats)
    saved = x, vectors, light_norm, norm_q, norm_kv, mask, *_there(kept)
    found = _there(products) or [None] * 6
    with outside_autocast(x.device):
        grads = node.backward_tokens(saved, plan, needs, found, dy, g_gates_q, g_gates_kv, g_scores)
    return tuple(_filled(grads, x))  # type: ignore[return-value]


forward_op = register("routed_attention", _forward)
products_backward_op = register("routed_attention_products_backward", _products_backward)
tokens_backward_op = register("routed_attention_tokens_backward", _tokens_backward)


@register_fake(forward_op)
def _(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mask, weights, plan = rest[MASK - 1], rest[6 : TENSORS - 1], Plan.of(*rest[TENSORS - 1 :])
    (batch, n, dim), wide = x.shape, torch.promote_types(x.dtype, torch.float32)
    scores, keys = x.new_empty((2, batch, n), dtype=wide), plan.keys.k
    gates_q, at_q, state_q, starts = empty_choice(scores[0], plan.queries, mask is not None)
    of_kv, within, seen = scores[1], x.new_empty(0), x.new_empty(0)
    if plan.causal:
        windows = (n + plan.window - 1) // plan.window
        of_kv, keys = scores.new_empty((batch * windows, plan.window)), windows * plan.keys.k
        seen = x.new_empty((2, batch, plan.queries.k), dtype=torch.int32)
    # only hard gates ask about the last window: the question ties a graph to some lengths
    masked = mask is not None or bool(plan.keys.hard and plan.causal and n % plan.window)
    gates_kv, at_kv, state_kv, _ = empty_choice(of_kv, plan.keys, masked)
    if plan.causal:
        within, at_kv, gates_kv = at_kv, at_kv.new_empty((batch, keys)), gates_kv.new_empty((batch, keys))

    def new(*shape: Any, dtype: torch.dtype = plan.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    def attention(tokens: Any, heads: int) -> tuple[Tensor, Tensor]:
        accumulated = torch.promote_types(plan.dtype, torch.float32)
        return new(batch * tokens, heads * plan.width), new(batch, heads, tokens, dtype=accumulated)

    cast = any(w.dtype != plan.dtype for w in weights)
    y = new(batch, n, dim, dtype=torch.promote_types(x.dtype, plan.dtype) if plan.residual else plan.dtype)
    return (
        y, at_q, gates_q, at_kv, gates_kv, scores, new(2, dim, dtype=rest[0].dtype),
        new(2, batch * n, dtype=wide), state_q, starts, state_kv, within, new(1, batch * plan.queries.k, dtype=wide),
        new(1, batch * keys, dtype=wide), seen, new(batch * n, dim), new(batch * n, len(weights[1])),
        *attention(n, plan.light_heads), new(batch * plan.queries.k, dim), new(batch * keys, dim),
        new(batch * plan.queries.k, len(weights[3])), new(batch * keys, len(weights[4])),
        new(batch, keys, plan.heavy_heads, plan.width), *attention(plan.queries.k, plan.heavy_heads),
        new(batch * plan.queries.k, dim), *(new(*w.shape) if cast else x.new_empty(0) for w in weights),
    )  # fmt: skip


@register_fake(products_backward_op)
def _(
    dy: Tensor, x: Tensor, mask: Tensor | None, weights: Sequence[Tensor], kept: Sequence[Tensor],
    needs: Sequence[bool], *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    plan, (need_x, need_v, *need_norms) = Plan.of(*numbers), needs[:5]
    (batch, n, _), gates_q, gates_kv, tokens, chosen = x.shape, kept[1], kept[3], kept[5], kept[9:11]
    stride, explores = plan.explore_stride, plan.explore_stride > 0 and need_v
    shapes = (
        *((plan.dtype, t.shape, need_x or need) for t, need in zip((tokens, *chosen), need_norms, strict=True)),
        *((t.dtype, t.shape, need_x or need_v) for t in (gates_q, gates_kv)),
        (gates_q.dtype, (batch, (n + stride - 1) // stride if explores else 0), explores),
        *((w.dtype, w.shape, need) for w, need in zip(weights, needs[5:], strict=True)),
    )
    return tuple(x.new_empty(shape if need else (0,), dtype=dtype) for dtype, shape, need in shapes)


@register_fake(tokens_backward_op)
def _(
    products: Sequence[Tensor], dy: Tensor | None, g_gates_q: Tensor | None, g_gates_kv: Tensor | None,
    g_scores: Tensor | None, x: Tensor, vectors: Tensor, light_norm: Tensor, norm_q: Tensor, norm_kv: Tensor,
    mask: Tensor | None, kept: Sequence[Tensor], needs: Sequence[bool], *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    # without a gradient of y, those of gates and scores reach x and the vectors alone
    (need_x, need_v), need_norms = needs[:2], [need and bool(products) for need in needs[2:]]
    vector = vectors.new_empty((1, vectors.shape[1]) if need_v else (0,))
    norms = (
        t.new_empty(t.shape if need else (0,))
        for t, need in zip((light_norm, norm_q, norm_kv), need_norms, strict=True)
    )
    return x.new_empty(x.shape if need_x else (0,)), vector, torch.empty_like(vector), *norms


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = inputs[TENSORS:]
    ctx.save_for_backward(*inputs[:TENSORS], *output[1:])
    ctx.mark_non_differentiable(output[1], output[3], *output[PUBLIC:])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dy: Tensor | None, _: None, g_gates_q: Tensor | None, __: None, g_gates_kv: Tensor | None,
    g_scores: Tensor | None, *rest: None,
) -> tuple[Any, ...]:  # fmt: skip
    nothing = (None,) * (TENSORS + len(ctx.numbers))
    if dy is None and g_gates_q is None and g_gates_kv is None and g_scores is None:
        return nothing
    x, _, _, light_norm, mask, norm_q, norm_kv, *saved = ctx.saved_tensors
    weights, (*choice, scores, vectors), kept = saved[:6], saved[6:12], saved[12:]
    need = ctx.needs_input_grad
    needs = [need[0], need[1] or need[2], need[3], *need[MASK + 1 : TENSORS]]
    of_tokens = TOKENS - 6 - len(choice) - 1
    # two operators, so that what the first needs is free when the second allocates the gradient of x
    products: tuple[Tensor, ...] = ()
    if dy is not None:
        of_products = [*choice, *kept[of_tokens:]]
        products = products_backward_op(dy, x, mask, weights, of_products, needs, *ctx.numbers)
    grads = tokens_backward_op(
        products[:6], dy if Plan.of(*ctx.numbers).residual else None, g_gates_q, g_gates_kv, g_scores, x, vectors,
        light_norm, norm_q, norm_kv, mask, [*choice, scores, *kept[:of_tokens]], needs[:5], *ctx.numbers,
    )  # fmt: skip
    wanted = [needs[0], need[1], need[2], *(bool(products) and n for n in needs[2:])]
    found = [g if n else None for g, n in zip((*grads, *(products[6:] or nothing[:6])), wanted, strict=True)]
    return *found[:4], None, *found[4:], *nothing[TENSORS:]


register_autograd(forward_op, _gradients, setup_context=_save)
refuse_second("RoutedAttention", products_backward_op, tokens_backward_op)


def _products(x: Any, matrices: Any, plan: Plan) -> int:
    """Return the multiplications and additions of one pass over the five matrices."""
    batch, n, _ = x
    keys = -(-n // plan.window) * plan.keys.k if plan.causal else plan.keys.k
    rows = n, n, plan.queries.k, keys, plan.queries.k
    total: int = 2 * batch * sum(m * w[0] * w[1] for m, w in zip(rows, matrices, strict=True))
    return total


@flop_formula(forward_op)
def _(x: Any, *rest: Any, **_: Any) -> int:
    return _products(x, rest[7 : TENSORS - 1], Plan.of(*rest[TENSORS - 1 :]))


@flop_formula(products_backward_op)
def _(dy: Any, x: Any, mask: Any, weights: Any, kept: Any, needs: Any, *numbers: Any, **_: Any) -> int:
    return 2 * _products(x, weights[1:], Plan.of(*numbers))


def routed_attention(plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Do as `attention.routed_attention` through the dispatcher, where callers need not be plain eager."""
    register_formulas()
    return tuple(forward_op(*tensors, *plan.numbers())[:PUBLIC])
