"""The routed feed-forward as two operators, forward and backward, for calls that go through torch's dispatcher.

torch.compile, export, FakeTensor and dispatch modes see one operator where the composition of modules has dozens, and
run what plain eager runs: the products inside are the same calls of cuBLAS, the kernels between them are the same.
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

from . import feed_forward as node
from .choice import empty_choice
from .plans import FeedForwardPlan as Plan

# the outputs of forward that belong to the caller: y, indices, gates, scores
PUBLIC = 4


def _forward(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None,
    up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
    heavy_up: Tensor, heavy_up_bias: Tensor | None, heavy_down: Tensor, heavy_down_bias: Tensor | None,
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Return y, indices, gates, scores, what backward needs, and the four matrices as cast; empty: there is none."""
    plan = Plan.of(dtype, ints, floats)
    # the caller's autocast has become `dtype`
    with outside_autocast(x.device):
        public, kept, matrices = node.forward(
            x, vectors, light_norm, heavy_norm, mask, plan, up, up_bias, down, down_bias, heavy_up, heavy_up_bias,
            heavy_down, heavy_down_bias,
        )  # fmt: skip
    there = (x.new_empty(0) if t is None else t for t in (*kept, *(matrices or [None] * 4)))
    return *public, *there  # type: ignore[return-value]


def _products_backward(
    dy: Tensor, mask: Tensor | None, indices: Tensor, gates: Tensor, weights: Sequence[Tensor | None],
    kept: Sequence[Tensor], needs: Sequence[bool],
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Call `node.backward_products`; a gradient that is not needed is an empty tensor."""
    plan = Plan.of(dtype, ints, floats)
    *activations, up, down, heavy_up, heavy_down = kept
    saved: list[Any] = [mask, indices, gates, *activations]
    for cast, weight in zip((up, down, heavy_up, heavy_down), weights[::2], strict=True):
        saved.append(cast if cast.numel() else weight)
    with outside_autocast(dy.device):
        grads = node.backward_products(saved, plan, [None if w is None else w.dtype for w in weights], needs, dy)
    return tuple(dy.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


def _tokens_backward(
    products: Sequence[Tensor], dy: Tensor | None, g_gates: Tensor | None, g_scores: Tensor | None, x: Tensor,
    vectors: Tensor,
    light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, kept: Sequence[Tensor],
    needs: Sequence[bool],
    dtype: torch.dtype, ints: Sequence[int], floats: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Call `node.backward_tokens`; an empty tensor stands for None in `products`, `kept` and the result."""
    plan = Plan.of(dtype, ints, floats)
    there = [t if t.numel() else None for t in (*kept, *products)]
    saved = (x, vectors, light_norm, heavy_norm, mask, *there[: len(kept)])
    found = there[len(kept) :] or [None] * 4
    with outside_autocast(x.device):
        grads = node.backward_tokens(saved, plan, needs, found, dy, g_gates, g_scores)
    return tuple(x.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


forward_op = register("routed_feed_forward", _forward)
products_backward_op = register("routed_feed_forward_products_backward", _products_backward)
tokens_backward_op = register("routed_feed_forward_tokens_backward", _tokens_backward)


@register_fake(forward_op)
def _(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    up, _, down, _, heavy_up, _, heavy_down, _, *numbers = rest
    plan = Plan.of(*numbers)
    (batch, n, d), k = x.shape, plan.choice.k
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.new_empty((batch, n), dtype=wide)
    gates, indices, state, starts = empty_choice(scores, plan.choice, mask is not None)

    def new(*shape: Any) -> Tensor:
        return x.new_empty(shape, dtype=plan.dtype)

    weights = up, down, heavy_up, heavy_down
    cast = any(w is not None and w.dtype != plan.dtype for w in rest[:8])
    return (
        new(batch, n, d) if not plan.residual else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, plan.dtype)),
        indices, gates, scores, x.new_empty((2, batch * n), dtype=wide), state, starts,
        x.new_empty((1, batch * k), dtype=wide), new(batch * n, d), new(batch * n, len(up)), new(batch * n, len(up)),
        new(batch * k, d), new(batch * k, len(heavy_up)), new(batch * k, len(heavy_up)), new(batch * k, d),
        *(new(*w.shape) if cast else x.new_empty(0) for w in weights),
    )  # fmt: skip


@register_fake(products_backward_op)
def _(
    dy: Tensor, mask: Tensor | None, indices: Tensor, gates: Tensor, weights: Sequence[Tensor | None],
    kept: Sequence[Tensor], needs: Sequence[bool], *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    plan, (need_x, need_v, need_light_norm, need_heavy_norm, *need_weights) = Plan.of(*numbers), needs
    batch, n, _ = dy.shape
    explores = plan.explore_stride > 0 and need_v
    shapes = (
        (plan.dtype, kept[0].shape if need_x or need_light_norm else (0,)),
        (plan.dtype, kept[3].shape if need_x or need_heavy_norm else (0,)),
        (gates.dtype, gates.shape if need_x or need_v else (0,)),
        (gates.dtype, (batch, (n + plan.explore_stride - 1) // plan.explore_stride) if explores else (0,)),
    )
    return *(dy.new_empty(shape, dtype=dtype) for dtype, shape in shapes), *(
        w.new_empty(w.shape) if w is not None and need else dy.new_empty(0)
        for w, need in zip(weights, need_weights, strict=True)
    )


@register_fake(tokens_backward_op)
def _(
    products: Sequence[Tensor], dy: Tensor | None, g_gates: Tensor | None, g_scores: Tensor | None, x: Tensor,
    vectors: Tensor,
    light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, kept: Sequence[Tensor],
    needs: Sequence[bool], *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    # without a gradient of y, those of gates and scores reach x and the vectors alone
    reached = True, True, bool(products), bool(products)
    return tuple(
        t.new_empty(t.shape) if t is not None and need and some else x.new_empty(0)
        for t, need, some in zip((x, vectors, light_norm, heavy_norm), needs, reached, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.numbers = inputs[:13], inputs[13:]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(output[1], *output[PUBLIC:])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dy: Tensor | None, _: None, g_gates: Tensor | None, g_scores: Tensor | None, *rest: Any
) -> Any:
    nothing = (None,) * (13 + len(ctx.numbers))
    if dy is None and g_gates is None and g_scores is None:
        return nothing
    x, vectors, light_norm, heavy_norm, mask, *saved = ctx.saved_tensors
    weights, choice, of_tokens, of_products = saved[:8], saved[8:11], saved[8:15], saved[15:]
    needs = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[5:13]]
    # two operators, so that what the first needs is free when the second allocates the gradient of x
    products: tuple[Tensor, ...] = ()
    if dy is not None:
        products = products_backward_op(dy, mask, *choice[:2], weights, of_products, needs, *ctx.numbers)
    grads = tokens_backward_op(
        products[:4], dy if Plan.of(*ctx.numbers).residual else None, g_gates, g_scores, x, vectors, light_norm,
        heavy_norm, mask, of_tokens, needs[:4], *ctx.numbers,
    )  # fmt: skip
    reached = True, True, *(dy is not None,) * 10
    found = [
        g if need and some else None
        for g, need, some in zip((*grads, *(products[4:] or nothing[:8])), needs, reached, strict=True)
    ]
    return *found[:4], None, *found[4:], *nothing[13:]


register_autograd(forward_op, _gradients, setup_context=_save)
refuse_second("RoutedFeedForward", products_backward_op, tokens_backward_op)


def _products(x: Any, up: Any, heavy_up: Any, k: int) -> int:
    """Return the multiplications and additions of one pass over the four matrices."""
    batch, n, d = x
    total: int = 4 * batch * d * (n * up[0] + k * heavy_up[0])
    return total


@flop_formula(forward_op)
def _(x: Any, vectors: Any, light_norm: Any, heavy_norm: Any, mask: Any, *rest: Any, **_: Any) -> int:
    return _products(x, rest[0], rest[4], Plan.of(*rest[8:]).choice.k)


@flop_formula(products_backward_op)
def _(
    dy: Any, mask: Any, indices: Any, gates: Any, weights: Any, kept: Any, needs: Any, *numbers: Any, **_: Any
) -> int:
    both = _products(dy, weights[0], weights[4], Plan.of(*numbers).choice.k)
    return both * (any(needs[:4]) + any(needs[4:]))


def routed_feed_forward(
    x: Tensor, vectors: Tensor, light_norm: Tensor | None, heavy_norm: Tensor | None, mask: Tensor | None, plan: Plan,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Do as `feed_forward.routed_feed_forward` through the dispatcher, where callers need not be plain eager."""
    register_formulas()
    y, indices, gates, scores, *_ = forward_op(
        x, vectors, light_norm, heavy_norm, mask, *weights, *plan.numbers()
    )  # fmt: skip
    return y, indices, gates, scores
