"""`topk` without autograd and the dispatcher: kernels or torch, forward and backward, and soft_topk's solution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.core.launch import as_rows, uses_triton
from onepass.ops._shared import arguments
from onepass.ops.soft_topk.op import backward_chosen
from onepass.ops.soft_topk.op import forward as soft_forward

from . import definition


def index_dtype(narrow: bool) -> torch.dtype:
    """Return the indices' dtype."""
    return torch.int32 if narrow else torch.int64


def rows_of(scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, largest: bool) -> Any:
    """Return the arguments of the kernels: rows of scores, with mask and ranges beside them."""
    from . import kernels_select

    starts, ends = arguments.per_row(start, scores), arguments.per_row(lengths, scores)
    return kernels_select.Rows(as_rows(scores), arguments.mask_rows(mask, scores), starts, ends, largest)


def forward(
    scores: Tensor, eps: Tensor | None, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, k: int,
    eps_value: float, kind: int, hard: bool, largest: bool, is_sorted: bool, narrow: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return (values, gates, indices, solution of soft_topk); k ≥ 1, n ≥ 1.

    Hard gates are 1 and need no solution: backward solves, if it is ever called.
    """
    soft = state = None
    if not hard:
        valid = definition.allowed(scores, mask, start, lengths)
        soft, state = soft_forward(scores if largest else -scores, None, eps, valid, float(k), eps_value, kind)
    if uses_triton(scores):
        from . import kernels_select

        found = kernels_select.select(
            rows_of(scores, mask, start, lengths, largest), k, is_sorted,
            None if soft is None else soft.view(-1, scores.shape[-1]), index_dtype(narrow), tuple(scores.shape[:-1]),
        )  # fmt: skip
        return found.values, found.gates, found.indices, state
    values, indices = definition.select(
        scores, mask, start, lengths, k, largest, is_sorted, index_dtype(narrow)
    )  # fmt: skip
    if soft is None:
        return values, definition.hard_gates(values, indices), indices, None
    chosen = soft.gather(-1, indices.clamp(min=0).long())
    return values, torch.where(indices >= 0, chosen, 0.0), indices, state


def backward(
    scores: Tensor, g_values: Tensor | None, g_gates: Tensor | None, indices: Tensor, state: Tensor | None,
    eps: Tensor | None, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, eps_value: float, kind: int,
    largest: bool, need_scores: bool, need_eps: bool, into: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of scores and eps, None where not needed; a missing upstream gradient is None.

    A state that is None is solved for. With `into`, contiguous and like scores, the gradient of the scores is written
    there. (Scores come first: torch 2.11 reads the mesh of DTensors from the first argument.)
    """
    if not largest:
        # the gradients of the largest of -scores
        ds, deps = backward(
            -scores, None if g_values is None else -g_values, g_gates, indices, state, eps, mask, start, lengths,
            eps_value, kind, True, need_scores, need_eps,
        )  # fmt: skip
        if ds is not None:
            ds = ds.neg_() if into is None else torch.neg(ds, out=into)
        return ds, deps
    need_eps = need_eps and eps is not None
    ds = of_eps = None
    if g_gates is not None:
        mask = definition.allowed(scores, mask, start, lengths)
        if state is None:
            _, state = soft_forward(scores, None, eps, mask, float(indices.shape[-1]), eps_value, kind)
        ds, of_eps = backward_chosen(
            g_gates, indices, scores, state, eps, mask, eps_value, kind, need_scores, need_eps, into
        )  # fmt: skip
    elif need_eps:
        of_eps = torch.zeros_like(eps)  # type: ignore[arg-type]
    if need_scores and g_values is not None:
        if ds is None:
            ds = scores.new_zeros(scores.shape) if into is None else into.zero_()
        if uses_triton(ds):
            from . import kernels_select

            rows = (-1, indices.shape[-1])
            kernels_select.add(ds.view(-1, ds.shape[-1]), indices.contiguous().view(rows), g_values.reshape(rows))
        else:
            present = torch.where(indices >= 0, g_values, 0.0).to(ds.dtype)
            ds.scatter_add_(-1, indices.clamp(min=0).long(), present)
    return ds, of_eps


__all__ = ["backward", "forward", "index_dtype", "rows_of"]
