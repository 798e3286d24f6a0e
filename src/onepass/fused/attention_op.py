"""Routed attention as two operators, forward and backward, for calls that go through torch's dispatcher.

They hold the choice of queries and keys as well: norm and scores of all tokens, both choices, both attentions. Plain
eager runs the same functions as separate autograd nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_autograd

from onepass.core.eager import no_second
from onepass.core.flops import flop_formula, register_formulas
from onepass.core.register import register, register_fake
from onepass.ops.causal_choice import op as causal_choice
from onepass.ops.routing.rows import add_rows
from onepass.ops.topk import op as op_topk

from . import attention as node
from .choice import Choice, choose, choose_backward, of_sequence, windows
from .norms import norm_backward, norm_forward
from .runs import Runs, whole_runs, window_runs

# the outputs of forward that belong to the caller: y, and indices and gates of queries and keys, and both scores
PUBLIC = 6
# tensors among the arguments of forward; numbers follow
TENSORS = 12


class Settings(NamedTuple):
    """The numbers among the arguments of both operators."""

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
    q_eps: float
    q_kind: int
    q_hard: bool
    q_block: int  # of a causal choice of queries; 0: choose the best of all tokens
    q_memory: int
    kv_eps: float
    kv_kind: int
    kv_hard: bool

    def queries(self) -> Choice:
        """Return how queries are chosen."""
        causal = (self.q_block, self.q_memory) if self.q_block else None
        return Choice(self.k_q, self.q_eps, self.q_kind, self.q_hard, causal)

    def keys(self) -> Choice:
        """Return how keys are chosen, of the sequence or of a window."""
        return Choice(self.k_kv, self.kv_eps, self.kv_kind, self.kv_hard)

    def plan(self) -> node.Plan:
        """Return the settings of the node; kernels follow the precision of this moment."""
        precision = torch.get_float32_matmul_precision()
        return node.Plan(self.dtype, self.light_heads, self.heavy_heads, self.width, self.eps, precision)


def _runs(x: Tensor, mask: Tensor | None, at_q: Tensor, at_kv: Tensor, own: Settings) -> tuple[Runs, Runs]:
    """Return the runs of the local attention and of the chosen queries."""
    n, queries = x.shape[1], (x.device, own.dtype, own.width)
    light = window_runs(n, own.window, own.causal, queries)._replace(mask=mask)
    there = None if mask is None and not (own.causal and n % own.window) else at_kv >= 0
    if not own.causal:
        return light, whole_runs(at_q.shape[1], at_kv.shape[1], queries)._replace(mask=there)
    # missing queries come last and see every key, so that `last` never decreases
    last = torch.where(at_q >= 0, at_q // own.window * own.k_kv, at_kv.shape[1]).to(torch.int32)
    return light, Runs(there, torch.zeros_like(last), last, None, None)


def _choose_keys(scores: Tensor, mask: Tensor | None, own: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return gates and indices (batch, keys), and the state of the choice."""
    if not own.causal:
        gates, indices, state, _ = choose(scores, mask, own.keys())
        return gates, indices, state
    gates, within, state, _ = choose(*windows(scores, mask, own.window), own.keys())
    indices = of_sequence(within, len(scores), own.window)
    return gates.view(indices.shape), indices, state


def _choose_keys_backward(
    d_gates: Tensor, scores: Tensor, mask: Tensor | None, own: Settings, indices: Tensor, gates: Tensor, state: Tensor
) -> Tensor:
    if not own.causal:
        ds = choose_backward(d_gates, scores, mask, own.keys(), indices, gates, state, None)
        assert ds is not None
        return ds
    batch, n = scores.shape
    parts, real = windows(scores, mask, own.window)
    within = torch.where(indices >= 0, indices % own.window, -1).view(len(parts), own.k_kv)
    ds = choose_backward(
        d_gates.reshape(within.shape), parts, real, own.keys(), within, gates.reshape(within.shape), state, None
    )  # fmt: skip
    assert ds is not None
    return ds.view(batch, -1)[:, :n]


def _forward(
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor, null: Tensor,
    qkv: Tensor, light_out: Tensor, q: Tensor, kv: Tensor, heavy_out: Tensor,
    dtype: torch.dtype, light_heads: int, heavy_heads: int, width: int, window: int, causal: bool, eps: float,
    score_eps: float, k_q: int, k_kv: int, q_eps: float, q_kind: int, q_hard: bool, q_block: int, q_memory: int,
    kv_eps: float, kv_kind: int, kv_hard: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Return y, the routing, what backward needs, and the five matrices as cast; empty: there is none."""
    own = Settings(
        dtype, light_heads, heavy_heads, width, window, causal, eps, score_eps, k_q, k_kv, q_eps, q_kind, q_hard,
        q_block, q_memory, kv_eps, kv_kind, kv_hard,
    )  # fmt: skip
    # the caller's autocast has become `dtype`
    with torch.autocast(x.device.type, enabled=False):
        normed, scores, stats = norm_forward(x, None, light_norm, vectors, eps, score_eps, dtype, mask)
        assert scores is not None
        gates_q, at_q, state_q, starts = choose(scores[:, 0], mask, own.queries())
        gates_kv, at_kv, state_kv = _choose_keys(scores[:, 1], mask, own)
        y, kept, matrices = node.forward(
            normed, x, at_q, at_kv, gates_q, gates_kv, norm_q, norm_kv, (null, qkv, light_out, q, kv, heavy_out),
            *_runs(x, mask, at_q, at_kv, own), own.plan(),
        )  # fmt: skip
    empty = [x.new_empty(0) for _ in range(6)]
    return (  # type: ignore[return-value]
        y.view(x.shape), at_q, gates_q, at_kv, gates_kv, scores, stats, state_q, starts if own.q_block else empty[5],
        state_kv, *kept, *(matrices or empty[:5]),
    )  # fmt: skip


def _backward(
    dy: Tensor | None, g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor,
    weights: Sequence[Tensor], kept: Sequence[Tensor], needs: Sequence[bool],
    dtype: torch.dtype, light_heads: int, heavy_heads: int, width: int, window: int, causal: bool, eps: float,
    score_eps: float, k_q: int, k_kv: int, q_eps: float, q_kind: int, q_hard: bool, q_block: int, q_memory: int,
    kv_eps: float, kv_kind: int, kv_hard: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, vectors, norms and weights; empty where `needs` is False."""
    own = Settings(
        dtype, light_heads, heavy_heads, width, window, causal, eps, score_eps, k_q, k_kv, q_eps, q_kind, q_hard,
        q_block, q_memory, kv_eps, kv_kind, kv_hard,
    )  # fmt: skip
    at_q, gates_q, at_kv, gates_kv, scores, stats, state_q, starts, state_kv, *activations = kept
    matrices = [c if c.numel() else w for c, w in zip(activations[9:], weights[1:], strict=True)]
    saved = [x, at_q, at_kv, gates_q, gates_kv, norm_q, norm_kv, *activations[:9], *matrices]
    need_x, need_v, need_light_norm, *rest = needs
    need_gates = need_x or need_v
    flags = need_x or need_light_norm, need_x, need_x, need_gates, need_gates, *rest
    dtypes = [w.dtype for w in weights]
    with torch.autocast(x.device.type, enabled=False):
        if dy is None:
            dy = torch.zeros(x.shape, dtype=dtype, device=x.device)
        d_normed, rows_q, rows_kv, d_gates_q, d_gates_kv, *grads = node.backward(
            saved, *_runs(x, mask, at_q, at_kv, own), own.plan(), dtypes, flags, dy.reshape(-1, x.shape[-1])
        )
        dx = sums = None
        if need_gates or need_light_norm:
            if d_normed is None:
                d_normed = torch.zeros(x.shape, dtype=dtype, device=x.device)
            ds = None
            if need_gates:
                assert d_gates_q is not None
                assert d_gates_kv is not None
                d_gates_q = d_gates_q if g_gates_q is None else d_gates_q + g_gates_q
                d_gates_kv = d_gates_kv if g_gates_kv is None else d_gates_kv + g_gates_kv
                ds_q = choose_backward(
                    d_gates_q, scores[:, 0], mask, own.queries(), at_q, gates_q, state_q, starts if q_block else None
                )
                ds_kv = _choose_keys_backward(d_gates_kv, scores[:, 1], mask, own, at_kv, gates_kv, state_kv)
                assert ds_q is not None
                ds = torch.stack((ds_q, ds_kv), 1)
                ds = ds if g_scores is None else ds + g_scores
            dx, sums = norm_backward(
                d_normed.contiguous(), x, None, light_norm, None if ds is None else vectors, stats,
                None if ds is None else scores, ds, need_x, need_v or need_light_norm, mask,
            )  # fmt: skip
            if dx is not None:
                # one after the other: a token may be in both lists
                for rows, at in ((rows_q, at_q), (rows_kv, at_kv)):
                    if rows is not None:
                        add_rows(dx.view(-1, x.shape[-1]), rows, None, at)
    d_light_norm = None if sums is None or not need_light_norm else sums[0].to(light_norm.dtype)
    dv = None if sums is None or not need_v else sums[1:].to(vectors.dtype)
    return tuple(x.new_empty(0) if g is None else g for g in (dx, dv, d_light_norm, *grads))  # type: ignore[return-value]


forward_op = register("routed_attention", _forward)
backward_op = register("routed_attention_backward", _backward)


@register_fake(forward_op)
def _(
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor, null: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    matrices, own = rest[:5], Settings(*rest[5:])
    (batch, n, dim), wide = x.shape, torch.promote_types(x.dtype, torch.float32)
    scores = x.new_empty((batch, 2, n), dtype=wide)
    starts = x.new_empty(0)
    how = own.queries()
    if how.causal is None:
        _, at_q, gates_q, state_q = op_topk.forward_op(scores[:, 0], None, mask, how.k, how.eps, how.kind, how.hard)
    else:
        gates_q, at_q, state_q, starts = causal_choice.forward_op(scores[:, 0], mask, how.k, how.eps, *how.causal)
    of_kv, keys, how = scores[:, 1], own.k_kv, own.keys()
    if own.causal:
        count = (n + own.window - 1) // own.window
        of_kv, keys = scores.new_empty((batch * count, own.window)), count * own.k_kv
    _, at_kv, gates_kv, state_kv = op_topk.forward_op(of_kv, None, None, how.k, how.eps, how.kind, how.hard)

    def new(*shape: Any, dtype: torch.dtype = own.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    def attention(tokens: Any, heads: int) -> tuple[Tensor, Tensor]:
        return new(batch, tokens, heads, own.width), new(batch, heads, tokens, dtype=wide_branch)

    wide_branch = torch.promote_types(own.dtype, torch.float32)
    light, heavy = attention(n, own.light_heads), attention(own.k_q, own.heavy_heads)
    cast = any(w.dtype != own.dtype for w in (null, *matrices))
    return (
        new(batch, n, dim), at_q, gates_q, at_kv.new_empty((batch, keys)), gates_kv.new_empty((batch, keys)), scores,
        x.new_empty((2, batch * n), dtype=wide), state_q, starts, state_kv, new(batch * n, dim),
        new(batch, n, 3, own.light_heads, own.width), *light, new(batch, own.k_q, own.heavy_heads, own.width),
        new(batch, keys, 2, own.heavy_heads, own.width), *heavy, new(batch, own.k_q, dim),
        *(new(*w.shape) if cast else x.new_empty(0) for w in matrices),
    )  # fmt: skip


@register_fake(backward_op)
def _(
    dy: Tensor | None, g_gates_q: Tensor | None, g_gates_kv: Tensor | None, g_scores: Tensor | None,
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor,
    weights: Sequence[Tensor], kept: Sequence[Tensor], needs: Sequence[bool], *numbers: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = x, vectors, light_norm, norm_q, norm_kv, *weights
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(inputs, needs, strict=True))


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
    tensors, kept = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    need = ctx.needs_input_grad
    needs = [*need[:3], *need[4:TENSORS]]
    grads = backward_op(
        dy, g_gates_q, g_gates_kv, g_scores, *tensors[:6], tensors[6:], kept, needs, *ctx.numbers
    )  # fmt: skip
    found = [g if wanted else None for g, wanted in zip(grads, needs, strict=True)]
    return *found[:3], None, *found[3:], *nothing[TENSORS:]


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(no_second("RoutedAttention"))


register_autograd(forward_op, _gradients, setup_context=_save)
register_autograd(backward_op, _refuse, setup_context=lambda ctx, inputs, output: None)


def _products(x: Any, matrices: Any, own: Settings) -> int:
    """Return the multiplications and additions of one pass over the five matrices."""
    batch, n, _ = x
    keys = -(-n // own.window) * own.k_kv if own.causal else own.k_kv
    rows = n, n, own.k_q, keys, own.k_q
    total: int = 2 * batch * sum(m * w[0] * w[1] for m, w in zip(rows, matrices, strict=True))
    return total


@flop_formula(forward_op)
def _(x: Any, *rest: Any, **_: Any) -> int:
    return _products(x, rest[6 : TENSORS - 1], Settings(*rest[TENSORS - 1 :]))


@flop_formula(backward_op)
def _(*args: Any, **_: Any) -> int:
    return 2 * _products(args[4], args[10][1:], Settings(*args[13:]))


def routed_attention(
    x: Tensor, vectors: Tensor, light_norm: Tensor, mask: Tensor | None, norm_q: Tensor, norm_kv: Tensor, null: Tensor,
    matrices: Sequence[Tensor], own: Settings,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y like x in the branches' dtype, indices and gates of queries and of keys, and scores (batch, 2, n).

    `vectors` (2, dim): the routers'; `matrices`: qkv and out of the light branch, q, kv and out of the heavy one.
    Callers check the arguments, and there are tokens and k ≥ 1.
    """
    register_formulas()
    found = forward_op(x, vectors, light_norm, mask, norm_q, norm_kv, null, *matrices, *own)
    return tuple(found[:PUBLIC])


__all__ = ["Settings", "backward_op", "forward_op", "routed_attention"]
