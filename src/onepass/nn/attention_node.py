"""`near_and_far`: both branches of routed attention as one autograd node, for plain eager PyTorch.

    y = out(attention(normed)) + ν        y_i += g_i·(out'(attention'(norm_q(x_i), norm_kv(x_K))) − ν)

What the node saves over their composition: the chosen tokens are normed as they are gathered, their gradients are added
in place to those of all tokens (through the slot of `fork`), weights are cast together, their gradients leave the
product in their own dtype, and the host starts its kernels without an autograd node and a dispatch for each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from onepass.core.products import cast, weight_gradient
from onepass.ops.routing.norms import norm_backward, norm_forward
from onepass.ops.routing.op import scatter_add
from onepass.ops.routing.op_fork import Fork
from onepass.ops.routing.rows import scatter_backward
from onepass.ops.span_attention import op as span
from onepass.ops.span_attention.op_rotary import BASE, packed_backward, split, turn


class Plan(NamedTuple):
    """What does not change with the weights: who sees whom, and the sizes."""

    mask: Tensor | None  # (batch, n) bool: tokens that the near branch may see
    near_first: Tensor  # (1, n) int32
    near_last: Tensor
    far_mask: Tensor | None  # (batch, k_kv) bool: chosen keys that are there
    far_last: Tensor  # (1 or batch, k_q) int32: how many of the chosen keys a chosen query sees
    near_heads: int
    far_heads: int
    width: int
    eps: float  # of the norms of the chosen tokens


class _NearAndFar(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, slot: Tensor, gates_q: Tensor, gates_kv: Tensor, norm_q: Tensor, norm_kv: Tensor,
        null: Tensor, qkv_w: Tensor, near_out_w: Tensor, q_w: Tensor, kv_w: Tensor, far_out_w: Tensor,
        x: Tensor, at_q: Tensor, at_kv: Tensor, plan: Plan,
    ) -> Tensor:  # fmt: skip
        batch, n, dim = normed.shape
        heads, width, dtype, scale = plan.far_heads, plan.width, normed.dtype, 1 / math.sqrt(plan.width)
        weights = null, qkv_w, near_out_w, q_w, kv_w, far_out_w
        ctx.dtypes = tuple(w.dtype for w in weights)
        bias, qkv_c, near_out_c, q_c, kv_c, far_out_c = cast(weights, dtype)
        tokens = normed.view(-1, dim)
        qkv = torch.mm(tokens, qkv_c.t()).view(batch, n, 3, plan.near_heads, width)
        # queries and keys are turned where they lie: nobody else has them
        near_qk, near_v = split(qkv)
        turn(near_qk, None, BASE, False, near_qk)
        near_q, near_k = near_qk.chunk(2, dim=2)
        near, near_lse = span.forward(near_q, near_k, near_v, plan.near_first, plan.near_last, plan.mask, scale)
        y = torch.addmm(bias, near.view(batch * n, -1), near_out_c.t())

        chosen_q, *_ = norm_forward(x, at_q, norm_q, None, plan.eps, 0.0, dtype)
        chosen_kv, *_ = norm_forward(x, at_kv, norm_kv, None, plan.eps, 0.0, dtype)
        q = torch.mm(chosen_q.view(-1, dim), q_c.t()).view(batch, -1, heads, width)
        kv = torch.mm(chosen_kv.view(-1, dim), kv_c.t()).view(batch, -1, 2, heads, width)
        k, v = kv.unbind(2)
        turn(q, at_q, BASE, False, q)
        turn(k, at_kv, BASE, False, k)
        gated = v * gates_kv.to(dtype)[..., None, None]
        first = torch.zeros_like(plan.far_last)
        far, far_lse = span.forward(q, k, gated, first, plan.far_last, plan.far_mask, scale)
        update = torch.addmm(-bias, far.view(q.shape[0] * q.shape[1], -1), far_out_c.t()).view(batch, -1, dim)
        y = scatter_add(y, update, gates_q, at_q, inplace=True)

        ctx.plan = plan
        ctx.save_for_backward(
            tokens, qkv, near, near_lse, q, kv, far, far_lse,
            update, gates_q, gates_kv, norm_q, norm_kv, qkv_c, near_out_c, q_c, kv_c, far_out_c, x, at_q, at_kv,
            plan.mask, plan.near_first, plan.near_last, plan.far_mask, plan.far_last,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_autocast_enabled(dy.device.type):
            # the dtypes of forward decide, not where backward is called from
            with torch.autocast(dy.device.type, enabled=False):
                return _NearAndFar._backward(ctx, dy)
        return _NearAndFar._backward(ctx, dy)

    @staticmethod
    def _backward(ctx: Any, dy: Tensor) -> Any:
        (
            tokens, qkv, near, near_lse, q, kv, far, far_lse,
            update, gates_q, gates_kv, norm_q, norm_kv, qkv_c, near_out_c, q_c, kv_c, far_out_c, x, at_q, at_kv,
            mask, near_first, near_last, far_mask, far_last,
        ) = ctx.saved_tensors  # fmt: skip
        needs, dtypes, scale = ctx.needs_input_grad, ctx.dtypes, 1 / math.sqrt(ctx.plan.width)
        batch, n, dim = x.shape
        d_weights: list[Tensor | None] = [None] * 5
        # cheaper to make again than to keep
        chosen_q, _, stats_q = norm_forward(x, at_q, norm_q, None, ctx.plan.eps, 0.0, tokens.dtype)
        chosen_kv, _, stats_kv = norm_forward(x, at_kv, norm_kv, None, ctx.plan.eps, 0.0, tokens.dtype)
        gated = kv[:, :, 1] * gates_kv.to(kv.dtype)[..., None, None]

        def gradient(which: int, dy: Tensor, x: Tensor) -> None:
            if needs[7 + which]:
                d_weights[which] = weight_gradient(dy, x, dtypes[1 + which])

        d_update, d_gates_q = scatter_backward(dy.view(x.shape), update, gates_q, at_q, True, needs[2])
        assert d_update is not None
        du = d_update.to(tokens.dtype).view(-1, dim)
        flat = far.view(len(du), -1)
        gradient(4, du, flat)
        d_far = torch.mm(du, far_out_c).view(far.shape)
        dq, dkv, (k, v) = torch.empty_like(q), torch.empty_like(kv), kv.unbind(2)
        dk, dv = dkv.unbind(2)
        first = torch.zeros_like(far_last)
        span.backward_into((dq, dk, dv), d_far, q, k, gated, far, far_lse, first, far_last, far_mask, scale)
        turn(dq, at_q, BASE, True, dq)
        turn(dk, at_kv, BASE, True, dk)
        d_gates_kv = torch.linalg.vecdot(dv.flatten(2).to(gates_kv.dtype), v.flatten(2).to(gates_kv.dtype))
        dv.mul_(gates_kv.to(dv.dtype)[..., None, None])
        dq, dkv = dq.view(len(du), -1), dkv.view(batch * kv.shape[1], -1)
        gradient(2, dq, chosen_q.view(-1, dim))
        gradient(3, dkv, chosen_kv.view(-1, dim))
        d_chosen = torch.mm(dq, q_c).view(chosen_q.shape), torch.mm(dkv, kv_c).view(chosen_kv.shape)
        d_slot = x.new_empty(batch, 2, max(q.shape[1], kv.shape[1]), dim) if needs[1] else None
        d_norms: list[Tensor | None] = []
        for part, (at, norm, stats) in enumerate(((at_q, norm_q, stats_q), (at_kv, norm_kv, stats_kv))):
            need = needs[4 + part]
            rows, grads = norm_backward(d_chosen[part], x, at, norm, None, stats, None, None, needs[1], need)
            if d_slot is not None and rows is not None:
                d_slot[:, part, : at.shape[1]] = rows
            d_norms.append(grads[0].to(norm.dtype) if need and grads is not None else None)

        dy = dy.to(tokens.dtype)
        flat = near.view(batch * n, -1)
        gradient(1, dy, flat)
        d_null = (dy.sum(0, dtype=dtypes[0]) - du.sum(0, dtype=dtypes[0])) if needs[6] else None
        d_near = torch.mm(dy, near_out_c).view(near.shape)
        d_qkv = packed_backward(d_near, qkv, near, near_lse, split(qkv)[0], near_first, near_last, mask, BASE, scale)
        d_qkv = d_qkv.view(batch * n, -1)
        gradient(0, d_qkv, tokens)
        d_normed = torch.mm(d_qkv, qkv_c).view(x.shape) if needs[0] else None
        d_slot = None if d_slot is None else d_slot.flatten(1, 2)
        return (
            d_normed, d_slot, d_gates_q if needs[2] else None, d_gates_kv, *d_norms, d_null, *d_weights,
            None, None, None, None,
        )  # fmt: skip


# what Function.apply does beyond this concerns torch.func, which never gets here
_near_and_far = super(torch.autograd.Function, _NearAndFar).apply


def near_and_far(
    forked: Fork, x: Tensor, gates: tuple[Tensor, Tensor], indices: tuple[Tensor, Tensor], weights: tuple[Tensor, ...],
    plan: Plan,
) -> Tensor:  # fmt: skip
    """Both branches and their gated sum, rows (batch·n, dim) of the dtype of `forked.normed`; see the module.

    `gates` and `indices` are those of the queries and of the keys, ``(batch, k)`` each, k ≥ 1; `forked` is a `fork` of
    x with room for twice the longer list. `weights`: of the norms of chosen queries and keys, ν, then of the linear
    layers qkv and out of the near branch, q, kv and out of the far one. For calls that `fork` takes.
    """
    longest = max(i.shape[1] for i in indices)
    # a token may be in both lists, and their gradients must not meet: one route each
    forked.choice.indices = torch.stack([F.pad(i, (0, longest - i.shape[1]), value=-1) for i in indices], 1)
    return _near_and_far(  # type: ignore[no-any-return, no-untyped-call]
        forked.normed, forked.slot, *gates, *weights, x.detach(), *indices, plan
    )


__all__ = ["Plan", "near_and_far"]
