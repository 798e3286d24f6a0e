"""`topk`: hard selection of the k largest scores, with gates that carry the gradient of soft_topk."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import register_vmap

from onepass.core.bind import bind
from onepass.core.launch import as_rows, uses_triton
from onepass.core.register import register, register_fake
from onepass.ops._shared import arguments
from onepass.ops.soft_topk.op import KINDS
from onepass.ops.soft_topk.op import backward as soft_backward
from onepass.ops.soft_topk.op import forward as soft_forward

from . import sharding


class TopK(NamedTuple):
    """The result of :func:`topk`; every tensor is ``(..., k)``."""

    values: Tensor
    indices: Tensor
    gates: Tensor


def _select(scores: Tensor, mask: Tensor | None, k: int) -> Tensor:
    """Return the indices of the k largest valid scores, largest first, ties by lowest index, padded with -1.

    A threshold selects: all scores above the k-th largest, then the first columns equal to it until there are k. Only
    these k survivors are sorted, which is cheaper than sorting the row.
    """
    if uses_triton(scores):
        from . import kernels_select

        found = kernels_select.select(as_rows(scores), arguments.mask_rows(mask, scores), k)
        return found.indices.view(*scores.shape[:-1], k)
    keys = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    n = keys.shape[-1]
    kept = min(k, n)
    out = torch.full((*keys.shape[:-1], k), -1, dtype=torch.int64, device=keys.device)
    if not kept or not keys.numel():
        return out
    threshold = keys.topk(kept, dim=-1, sorted=True).values[..., -1:]
    # NaN of either sign is above all other scores and equal to NaN
    nan, nothing_above = keys.isnan(), threshold.isnan()
    above = (keys > threshold) | (nan & ~nothing_above)
    level = (keys == threshold) | (nan & nothing_above)
    room = kept - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room))
    # survivors' columns in ascending order: the slot is the number of survivors before; all others share a spare slot
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, kept)
    columns = torch.arange(n, device=keys.device).expand(keys.shape)
    indices = out.new_empty((*keys.shape[:-1], kept + 1)).scatter_(-1, slot, columns)[..., :kept]
    chosen_keys = keys.gather(-1, indices)
    # use one NaN for all: sorting on a GPU orders NaNs by their sign
    ordered, order = torch.where(chosen_keys.isnan(), math.nan, chosen_keys).sort(dim=-1, descending=True, stable=True)
    out[..., :kept] = torch.where(ordered == -math.inf, -1, indices.gather(-1, order))
    return out


select_op = register("topk_select", _select, sharding.select)


@register_fake(select_op)
def _(scores: Tensor, mask: Tensor | None, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


def _select_batched(
    info: Any, in_dims: tuple[int | None, ...], scores: Tensor, mask: Tensor | None, k: int
) -> tuple[Tensor, int]:
    """Rows are independent: a mapped dimension is one more leading dimension."""
    scores_dim, mask_dim, _ = in_dims
    rows = scores.movedim(scores_dim, 0) if scores_dim is not None else scores.expand(info.batch_size, *scores.shape)
    if mask is not None and mask_dim is not None:
        mask = mask.movedim(mask_dim, 0)
        mask = mask.reshape(mask.shape[0], *(1,) * (rows.dim() - mask.dim()), *mask.shape[1:])
    return select_op(rows, mask, k), 0


register_vmap(select_op, _select_batched)


def select(scores: Tensor, k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (values, indices) of the k largest valid scores; see :func:`topk`."""
    arguments.whole("topk", "k", k, 0)
    arguments.mask("topk", mask, scores)
    indices = select_op(scores.detach(), mask, k)
    if k == 0 or scores.shape[-1] == 0:
        return scores.new_full(indices.shape, -math.inf), indices
    return torch.where(indices >= 0, scores.gather(-1, indices.clamp(min=0)), -math.inf), indices


def gates(soft: Tensor, indices: Tensor) -> Tensor:
    """Return 1 with the gradient of the soft gate at each index, and 0 where the index is -1."""
    chosen = soft.gather(-1, indices.clamp(min=0))
    return torch.where(indices >= 0, 1 + (chosen - chosen.detach()), 0.0)


def forward(
    scores: Tensor, eps: Tensor | None, mask: Tensor | None, k: int, eps_value: float, kind: int, hard: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (values, indices, gates, solution of soft_topk); hard replaces soft gates by 1.

    No checks and no autograd, for callers that have their own; k ≥ 1, n ≥ 1.
    """
    soft, state = soft_forward(scores, None, eps, mask, float(k), eps_value, kind)
    if uses_triton(scores):
        from . import kernels_select

        rows, soft_rows = as_rows(scores), soft.view(-1, scores.shape[-1])
        found = kernels_select.select(
            rows, arguments.mask_rows(mask, scores), k, soft_rows, hard, tuple(scores.shape[:-1])
        )
        return found.values, found.indices, found.gates, state
    indices = _select(scores, mask, k)
    columns, present = indices.clamp(min=0), indices >= 0
    chosen = soft.gather(-1, columns)
    gates = torch.where(present, 1 + (chosen - chosen) if hard else chosen, 0.0)
    return torch.where(present, scores.gather(-1, columns), -math.inf), indices, gates, state


def backward(
    g_values: Tensor | None,
    g_gates: Tensor | None,
    scores: Tensor,
    indices: Tensor,
    state: Tensor,
    eps: Tensor | None,
    mask: Tensor | None,
    eps_value: float,
    kind: int,
    need_scores: bool,
    need_eps: bool,
    into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of scores and eps, None where not needed; a missing upstream gradient is None.

    With `into`, contiguous and like scores, the gradient of the scores is written there.
    """
    need_eps = need_eps and eps is not None
    if uses_triton(scores):
        from . import kernels_backward

        rows_of_k = (-1, indices.shape[-1])
        ds, deps = kernels_backward.backward(
            None if g_gates is None else g_gates.reshape(rows_of_k),
            None if g_values is None else g_values.reshape(rows_of_k), indices.contiguous().view(rows_of_k),
            as_rows(scores), state.contiguous(), arguments.per_row(eps, scores), arguments.mask_rows(mask, scores),
            eps_value, kind, need_scores, need_eps, tuple(scores.shape), into,
        )  # fmt: skip
        return (
            ds if need_scores else None,
            arguments.to_shape(deps, eps, scores) if need_eps and eps is not None else None,
        )
    columns, present = indices.clamp(min=0), indices >= 0
    ds = scores.new_zeros(scores.shape)
    of_eps = None if eps is None else torch.zeros_like(eps)
    if g_gates is not None:
        gy = scores.new_zeros(scores.shape).scatter_add_(
            -1, columns, torch.where(present, g_gates, 0.0).to(scores.dtype)
        )
        ds, _, of_eps = soft_backward(gy, scores, state, None, eps, mask, eps_value, kind, need_scores, False, need_eps)
    if need_scores and g_values is not None:
        ds.scatter_add_(-1, columns, torch.where(present, g_values, 0.0).to(scores.dtype))
    if need_scores and into is not None:
        ds = into.copy_(ds)
    return ds if need_scores else None, of_eps if need_eps else None


def _backward_all(
    g_values: Tensor | None,
    g_gates: Tensor | None,
    scores: Tensor,
    indices: Tensor,
    state: Tensor,
    eps: Tensor | None,
    mask: Tensor | None,
    eps_value: float,
    kind: int,
    need_scores: bool,
    need_eps: bool,
) -> tuple[Tensor, Tensor]:
    """`backward` for the dispatcher: an op returns tensors only, so unneeded gradients are empty."""
    ds, deps = backward(
        g_values, g_gates, scores, indices, state, eps, mask, eps_value, kind, need_scores, need_eps
    )  # fmt: skip
    return (
        scores.new_empty(0) if ds is None else ds,
        (scores if eps is None else eps).new_empty(0) if deps is None else deps,
    )


forward_op = register("topk", forward, sharding.forward)
backward_op = register("topk_backward", _backward_all, sharding.backward)


@register_fake(forward_op)
def _(
    scores: Tensor, eps: Tensor | None, mask: Tensor | None, k: int, eps_value: float, kind: int, hard: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    state = scores.new_empty((*scores.shape[:-1], 2), dtype=arguments.accumulator(scores))
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape), state


@register_fake(backward_op)
def _(
    g_values: Tensor | None,
    g_gates: Tensor | None,
    scores: Tensor,
    indices: Tensor,
    state: Tensor,
    eps: Tensor | None,
    mask: Tensor | None,
    eps_value: float,
    kind: int,
    need_scores: bool,
    need_eps: bool,
) -> tuple[Tensor, Tensor]:
    deps = eps.new_empty(eps.shape) if need_eps and eps is not None else (scores if eps is None else eps).new_empty(0)
    return scores.new_empty(scores.shape if need_scores else (0,)), deps


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    scores, eps, mask, _, eps_value, kind, _ = inputs
    ctx.save_for_backward(scores, output[1], output[3], eps, mask)
    ctx.options = eps_value, kind
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, run: Any, g_values: Tensor | None, _indices: Any, g_gates: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if g_values is None and g_gates is None:
        return (None,) * 7
    scores, indices, state, eps, mask = ctx.saved_tensors
    needs = ctx.needs_input_grad[0], eps is not None and ctx.needs_input_grad[1]
    grads = run(g_values, g_gates, scores, indices, state, eps, mask, *ctx.options, *needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None, None)


_call = bind(
    name="topk", forward=forward, forward_op=forward_op, backward=backward, backward_op=backward_op,
    save=_save, gradients=_gradients, n_public=3, replay=True,
)  # fmt: skip


def choose(scores: Tensor, k: int, eps: Tensor | float, mask: Tensor | None, kind: str, hard: bool) -> TopK:
    """`topk` for checked arguments, k ≥ 1, n ≥ 1; without `hard` the gates are those of soft_topk."""
    eps_tensor, eps_value = arguments.split(eps)
    return TopK(*_call(scores, eps_tensor, mask, k, eps_value, KINDS.index(kind), hard))


def topk(
    scores: Tensor,
    k: int,
    *,
    eps: Tensor | float = 0.1,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> TopK:
    r"""Return the k largest scores of each row with straight-through gates: 1 forward, soft_topk's gradient backward.

    Scores decide the selection, because soft gates tie at exactly 1. Multiply the output of the chosen tokens by the
    gates to train the scores:

    .. math:: g_j = 1 \quad\text{forward}, \qquad \mathrm{d}g_j = \mathrm{d}\,\text{soft\_topk}(s, k)_{i_j}
              \quad\text{backward.}

    Args:
        scores: ``(..., n)``, fp32, fp16, bf16 or fp64, any strides.
        k: how many to choose, an int ≥ 0. k = 0 gives empty tensors; k > n is allowed.
        eps: temperature of the gates' gradient, see :func:`onepass.soft_topk`.
        mask: bool, broadcasts to ``scores``; masked entries are never selected.
        kind: gate function of the gradient, see :func:`onepass.soft_topk`.

    Returns:
        ``TopK(values, indices, gates)``, each ``(..., k)``: the selected scores in descending order (ties by lowest
        index; NaN before +inf), their int64 indices, the gates. A row with fewer than k valid entries is padded with
        value -inf, index -1, gate 0. Values have the gradient of a gather, gates that of soft_topk.

    Raises:
        TypeError: scores is not a floating-point tensor, k is not an int, or mask is not bool.
        ValueError: k < 0, shapes don't broadcast, devices differ, eps is not > 0, or kind is unknown.
        NotImplementedError: for second derivatives and forward-mode derivatives.

    Source: CoLT5 (arXiv 2303.09752).

    Example:
        >>> import torch, onepass
        >>> top = onepass.topk(torch.tensor([3.0, 1.0, 2.0, -1.0]), 2)
        >>> top.values.tolist(), top.indices.tolist(), top.gates.tolist()
        ([3.0, 2.0], [0, 2], [1.0, 1.0])
    """
    arguments.scores("topk", scores)
    arguments.positive("topk", "eps", eps, scores)
    if kind not in KINDS:
        raise ValueError(f"topk: kind must be one of {', '.join(KINDS)}; got {kind!r}")
    arguments.whole("topk", "k", k, 0)
    arguments.mask("topk", mask, scores)
    if k == 0 or scores.shape[-1] == 0:
        values, indices = select(scores, k, mask)
        return TopK(values, indices, torch.zeros_like(values))
    return choose(scores, k, eps, mask, kind, True)


__all__ = ["TopK", "backward", "choose", "forward", "gates", "select", "select_op", "topk"]
