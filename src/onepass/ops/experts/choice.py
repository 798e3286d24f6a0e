"""The router of experts as one operator: logits in fp32, the choice, weights and counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import uses_triton
from onepass.core.operator import operator
from onepass.core.sharding import PARTIAL, REPLICATE, Way

from . import definition


def _forward(
    u: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, k: int, score_func: str, norm_topk: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights (T, k), logits (T, E), indices (T, k) and counts (E,) of tokens u (T, dim); mask is (T,) bool."""
    if uses_triton(u) and u.shape[0] and weight.shape[0] <= 1 << 16:  # the kernel has 16 bits for an expert
        from . import kernels_choice as kernels

        # products of bf16 parts on tensor cores: as exact as fp32, and faster
        if u.is_cuda and u.dtype == torch.bfloat16:
            logits = torch.mm(u, kernels.parts(weight, 3).t(), out_dtype=torch.float32)
        else:
            logits = torch.mm(u.float(), weight.float().t())
        mask = None if mask is None else mask.contiguous().view(torch.uint8)
        softmax, norm = score_func == "softmax", norm_topk and k > 1
        return kernels.choose(logits, bias, mask, weight.shape[0], k, softmax, norm)  # type: ignore[no-any-return]
    wide = torch.promote_types(u.dtype, torch.float32)
    logits = torch.mm(u.to(wide), weight.to(wide).t())
    weights, indices, counts = definition.choose(logits, bias, mask, k, score_func, norm_topk)
    return weights, logits, indices, counts


def _backward(
    d_weights: Tensor | None, d_logits: Tensor | None, u: Tensor, weight: Tensor, logits: Tensor, indices: Tensor,
    weights: Tensor, score_func: str, norm_topk: bool, need_u: bool, need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    softmax, norm, (n_experts, dim) = score_func == "softmax", norm_topk and indices.shape[1] > 1, weight.shape
    if uses_triton(u) and u.shape[0]:
        from . import kernels_choice as kernels

        tensors = [None if t is None else t.contiguous() for t in (logits, indices, weights, d_weights, d_logits)]
        in_parts = u.is_cuda and u.dtype == torch.bfloat16
        d = kernels.choose_backward(*tensors, softmax, norm, in_parts)
        if in_parts:
            # (high + low)·(high + low) without low·low
            du = torch.mm(d, kernels.parts(weight, 2)) if need_u else None
            if not need_weight:
                return du, None
            d_parts = torch.mm(d[:, : 2 * n_experts].t(), u, out_dtype=torch.float32)
            return du, d_parts.view(2, n_experts, dim).sum(0).to(weight.dtype)
    elif d_weights is None:
        d = d_logits
    else:
        s = logits.softmax(-1) if softmax else logits.sigmoid()
        chosen, up = indices.clamp(min=0), d_weights.masked_fill(indices < 0, 0.0)
        if norm:
            total = s.gather(-1, chosen).sum(-1, keepdim=True).clamp(min=1e-20)
            up = (up - (up * weights).sum(-1, keepdim=True)) / total
        d = torch.zeros_like(s).scatter(-1, chosen, up.masked_fill(indices < 0, 0.0)) * s
        d = d - s * d.sum(-1, keepdim=True) if softmax else d * (1 - s)
        d = d if d_logits is None else d + d_logits
    du = torch.mm(d, weight.to(d.dtype)).to(u.dtype) if need_u else None
    return du, torch.mm(d.t(), u.to(d.dtype)).to(weight.dtype) if need_weight else None


def _ways(u: Any, weight: Any, bias: Any, mask: Any, *rest: Any) -> list[Way]:
    return [((0, 0, 0, PARTIAL), (0, REPLICATE, None if bias is None else REPLICATE, None if mask is None else 0))]


def _fake(u: Tensor, weight: Tensor, bias: Any, mask: Any, k: int, *rest: Any) -> tuple[Tensor, ...]:
    (tokens, _), (n_experts, _), wide = u.shape, weight.shape, torch.promote_types(u.dtype, torch.float32)
    shapes = ((tokens, k), wide), ((tokens, n_experts), wide), ((tokens, k), torch.int64), (n_experts, torch.int32)
    return tuple(u.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


choose_experts, forward_op, backward_op = operator(
    "Experts", _forward, _backward, ("weights", "logits", "indices", "counts"), fake=_fake, ways=_ways,
    registered="expert_choice", n_public=4,
)  # fmt: skip
