"""The selection in torch: on a CPU, in float64 and without Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ranges import allowed


def select(
    scores: Tensor,
    mask: Tensor | None,
    start: Tensor | None,
    lengths: Tensor | None,
    k: int,
    largest: bool,
    is_sorted: bool,
    index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return values and indices of the k largest valid scores, padded; n ≥ 0."""
    keys = scores if largest else -scores
    valid = allowed(scores, mask, start, lengths)
    if valid is not None:
        keys = keys.masked_fill(~valid, -math.inf)
    n = keys.shape[-1]
    kept = min(k, n)
    if not kept or not keys.numel():
        shape = (*scores.shape[:-1], k)
        missing = -math.inf if largest else math.inf
        return scores.new_full(shape, missing), scores.new_full(shape, -1, dtype=index_dtype)
    # only a CPU's results can be looked at without waiting for a device
    values, indices = (_on_cpu if keys.device.type == "cpu" else _anywhere)(keys, kept, is_sorted)
    if not largest:
        values = -values
    if kept < k:
        pad = torch.nn.functional.pad
        values = pad(values, (0, k - kept), value=-math.inf if largest else math.inf)
        indices = pad(indices, (0, k - kept), value=-1)
    return values, indices.to(index_dtype)


def _on_cpu(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select with torch.topk, which decides ties arbitrarily, and decide these in the rows that have any.

    One value more than k also shows a tie of the last one with what is left.
    """
    n = keys.shape[-1]
    values, indices = keys.topk(min(k + 1, n))
    # falling from each value to the next: no tie, no NaN, and nothing but perhaps the last is -inf
    falls = values.diff()
    clear = n > 1 and falls.amax().item() < 0 and (n > k or values[..., -1].amin().item() > -math.inf)
    beyond = values[..., k:] if clear else values[..., k:].clone()
    if n > k and values.numel() == k + 1:
        shape = (*keys.shape[:-1], k)
        values, indices = values.resize_(shape), indices.resize_(shape)
    elif n > k:
        # copies: a view would keep k + 1 values, and their stride
        layout = torch.contiguous_format
        values, indices = (t[..., :k].clone(memory_format=layout) for t in (values, indices))
    if not clear:
        rows, v, i = keys.reshape(-1, n), values.view(-1, k), indices.view(-1, k)
        odd = v[:, 0].isnan() | (v[:, -1] == -math.inf)
        which = ((falls < 0).all(-1).logical_not_().view(-1) & ~odd).nonzero()[:, 0]
        if len(which):
            _decide_ties(rows, v, i, beyond.reshape(len(rows), -1), which)
        which = odd.nonzero()[:, 0]
        if len(which):
            v[which], i[which] = _anywhere(rows[which], k, True)
    if not is_sorted and clear:
        indices = indices.sort(-1).values
        values = keys.gather(-1, indices)
    elif not is_sorted:
        # missing ones are -1, and stay last
        indices = torch.where(indices < 0, n, indices).sort(-1).values
        values = torch.where(indices < n, keys.gather(-1, indices.clamp(max=n - 1)), -math.inf)
        indices = torch.where(indices < n, indices, -1)
    return values, indices


def _decide_ties(rows: Tensor, values: Tensor, indices: Tensor, beyond: Tensor, which: Tensor) -> None:
    """Put the lowest indices first among equal values, in place, in these rows; no NaN and no -inf is in `values`."""
    n = rows.shape[1]
    if beyond.shape[1]:
        split = which[(beyond[which] == values[which, -1:])[:, 0]]
        if len(split):
            _first_equals(rows, values, indices, split)
    v, i = values[which], indices[which]
    same = v[:, 1:] == v[:, :-1]
    # groups of equal values, and the elements of those with several
    several = torch.nn.functional.pad(same, (0, 1)) | torch.nn.functional.pad(same, (1, 0))
    if several.sum() * 8 < several.numel():
        place = several.flatten().nonzero()[:, 0]
        starts = torch.nn.functional.pad(same, (1, 0)).flatten()[place].logical_not_()
        number = starts.cumsum(0) * n + i.flatten()[place]
        i.view(-1)[place] = number.sort().values % n
    else:
        number = torch.nn.functional.pad(same.logical_not(), (1, 0)).cumsum(-1) * n + i
        i = number.sort(-1).values % n
    indices[which] = i


def _first_equals(rows: Tensor, values: Tensor, indices: Tensor, split: Tensor) -> None:
    """Let the last of `values` be the first of its equals, in place, in rows where some of these are left out.

    Most rows with many equal scores have enough of them at the beginning.
    """
    n, k = rows.shape[1], values.shape[1]
    last = values[split, -1:]
    level = values[split] == last
    room = level.sum(-1)
    width = min(n, 4 * k)
    while True:
        equal = (rows if len(split) == len(rows) else rows[split])[:, :width] == last
        counts = equal.sum(-1)
        if width == n or bool((counts >= room).all()):
            break
        width = n
    row, column = equal.nonzero(as_tuple=True)
    before = (counts.cumsum(0) - counts)[row]
    first = torch.arange(len(row)) - before < room[row]
    indices[split] = indices[split].masked_scatter_(level, column[first])


def _anywhere(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select without looking at a value on the host; k ≤ n.

    A threshold selects: all scores above the k-th largest, then the first columns equal to it until there are k. Only
    these survivors are sorted, which is cheaper than sorting the row.
    """
    n = keys.shape[-1]
    threshold = keys.topk(k, dim=-1, sorted=True).values[..., -1:]
    # NaN of either sign is above all other scores and equal to NaN
    nan, nothing_above = keys.isnan(), threshold.isnan()
    above = (keys > threshold) | (nan & ~nothing_above)
    level = ((keys == threshold) & (threshold > -math.inf)) | (nan & nothing_above)
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room))
    # survivors' columns in ascending order: the slot is the number of survivors before; all others share a spare slot
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    columns = torch.arange(n, device=keys.device).expand(keys.shape)
    indices = columns.new_full((*keys.shape[:-1], k + 1), -1).scatter_(-1, slot, columns)[..., :k]
    values = torch.where(indices >= 0, keys.gather(-1, indices.clamp(min=0)), -math.inf)
    if not is_sorted:
        return values, indices.contiguous()
    # use one NaN for all: sorting on a GPU orders NaNs by their sign
    order = torch.where(values.isnan(), math.nan, values).sort(dim=-1, descending=True, stable=True).indices
    return values.gather(-1, order), indices.gather(-1, order)


def hard_gates(values: Tensor, indices: Tensor) -> Tensor:
    """Return 1 where an index is, else 0; NaN in a row that selects a NaN."""
    # a finite sum holds no NaN and no infinity, which stands where an index is missing
    if values.device.type == "cpu" and math.isfinite(values.sum().item()):
        return torch.ones_like(values, memory_format=torch.contiguous_format)
    ones = torch.where(values.isnan().any(-1, keepdim=True), math.nan, torch.ones_like(values))
    return torch.where(indices >= 0, ones, 0.0)


__all__ = ["hard_gates", "select"]
