"""The router of experts as one operator: logits in fp32, the choice, weights and counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.bind import bind
from onepass.core.launch import uses_triton
from onepass.core.register import register, register_backward, register_fake
from onepass.core.sharding import PARTIAL, REPLICATE, Way, gradient

from . import definition


def _in_parts(u: Tensor) -> bool:
    """Return whether products of u are those of 16-bit parts, on the matrix units: as exact as fp32, and faster."""
    return u.is_cuda and u.dtype == torch.bfloat16 and uses_triton(u)


def _forward(
    u: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, k: int, score_func: str, norm_topk: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights (T, k), indices (T, k), counts (E,) and logits (T, E) of tokens u (T, dim); mask is (T,) bool."""
    if uses_triton(u) and u.shape[0]:
        from . import kernels_choice as kernels

        if _in_parts(u):
            logits = torch.mm(u, kernels.parts(weight, 3).t(), out_dtype=torch.float32)
        else:
            logits = torch.mm(u.float(), weight.float().t())
        mask = None if mask is None else mask.contiguous().view(torch.uint8)
        softmax, norm = score_func == "softmax", norm_topk and k > 1
        return kernels.choose(logits, bias, mask, weight.shape[0], k, softmax, norm)  # type: ignore[no-any-return]
    wide = torch.promote_types(u.dtype, torch.float32)
    logits = torch.mm(u.to(wide), weight.to(wide).t())
    return *definition.choose(logits, bias, mask, k, score_func, norm_topk), logits


def _backward(
    d_weights: Tensor | None, d_logits: Tensor | None, u: Tensor, weight: Tensor, logits: Tensor, indices: Tensor,
    weights: Tensor, score_func: str, norm_topk: bool, need_u: bool, need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    softmax, norm, (n_experts, dim) = score_func == "softmax", norm_topk and indices.shape[1] > 1, weight.shape
    if not u.shape[0] or (d_weights is None and d_logits is None):
        return u.new_zeros(u.shape) if need_u else None, weight.new_zeros(weight.shape) if need_weight else None
    if uses_triton(u):
        from . import kernels_choice as kernels

        given = (None if t is None else t.contiguous() for t in (d_weights, d_logits))
        d = kernels.choose_backward(logits, indices, weights, *given, softmax, norm, _in_parts(u))
        if _in_parts(u):
            # (high + low)·(high + low) but for low·low
            du = torch.mm(d, kernels.parts(weight, 2)) if need_u else None
            if need_weight:
                d_weight = (
                    torch.mm(d[:, : 2 * n_experts].t(), u, out_dtype=torch.float32).view(2, n_experts, dim).sum(0)
                )
            return du, d_weight.to(weight.dtype) if need_weight else None
    elif d_weights is None:
        d = d_logits
    else:
        s = logits.softmax(-1) if softmax else logits.sigmoid()
        found, up = indices.clamp(min=0), d_weights.masked_fill(indices < 0, 0.0)
        if norm:
            up = (up - (up * weights).sum(-1, keepdim=True)) / s.gather(-1, found).sum(-1, keepdim=True).clamp(
                min=1e-20
            )
        d = torch.zeros_like(s).scatter(-1, found, up.masked_fill(indices < 0, 0.0)) * s
        d = d - s * d.sum(-1, keepdim=True) if softmax else d * (1 - s)
        d = d if d_logits is None else d + d_logits
    du = torch.mm(d, weight.to(d.dtype)).to(u.dtype) if need_u else None
    return du, torch.mm(d.t(), u.to(d.dtype)).to(weight.dtype) if need_weight else None


def _ways(u: Any, weight: Any, bias: Any, mask: Any, *rest: Any) -> list[Way]:
    none = [REPLICATE if bias is not None else None, 0 if mask is not None else None]
    return [((0, 0, PARTIAL, 0), (0, REPLICATE, *none))]


def _ways_back(d_weights: Any, d_logits: Any, *rest: Any) -> list[Way]:
    given = [0 if d is not None else None for d in (d_weights, d_logits)]
    return [((gradient(0, rest[-2]), gradient(REPLICATE, rest[-1])), (*given, 0, REPLICATE, 0, 0, 0))]


forward_op = register("expert_choice", _forward, _ways)
backward_op = register_backward("expert_choice_backward", _backward, _ways_back, of=("u", "weight"))


@register_fake(forward_op)
def _(
    u: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, k: int, score_func: str, norm_topk: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(u.dtype, torch.float32)
    return (
        u.new_empty((u.shape[0], k), dtype=wide), u.new_empty((u.shape[0], k), dtype=torch.int64),
        u.new_empty(weight.shape[0], dtype=torch.int32), u.new_empty((u.shape[0], weight.shape[0]), dtype=wide),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, weight, _, _, _, ctx.score_func, ctx.norm_topk = inputs
    weights, indices, counts, logits = output
    ctx.save_for_backward(u, weight, logits, indices, weights)
    ctx.mark_non_differentiable(indices, counts)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, run: Any, d_weights: Any, _: Any, __: Any, d_logits: Any) -> tuple[Tensor | None, ...]:
    need_u, need_w = ctx.needs_input_grad[:2]
    du, dw = run(d_weights, d_logits, *ctx.saved_tensors, ctx.score_func, ctx.norm_topk, need_u, need_w)
    return du if need_u else None, dw if need_w else None, None, None, None, None, None


choose_experts = bind(
    name="Experts", forward=_forward, forward_op=forward_op, backward=_backward, backward_op=backward_op, save=_save,
    gradients=_gradients, n_public=4,
)  # fmt: skip
