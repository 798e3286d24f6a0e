"""The selection in torch: on a CPU, in float64 and without Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ranges import allowed

# scores of a group of rows that is done at a time: 8 bytes each
GROUP = 1 << 17


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
    """Select with torch.topk, which decides ties arbitrarily: by numbers without ties, or again in the rows with ties.

    Numbers of 16-bit scores cost next to nothing. Those of fp32 take twice the bytes, and ties of fp32 scores are rare
    where the best come first; without that order torch.topk doesn't show them.
    """
    n = keys.shape[-1]
    exact = _anywhere if keys.dtype == torch.float64 else _in_groups
    if keys.element_size() == 2 or not is_sorted:
        return exact(keys, k, is_sorted)
    # one value more than k also shows a tie of the last one with what is left
    values, indices = keys.topk(min(k + 1, n))
    # falling from each value to the next: no tie, no NaN, and nothing but perhaps the last is -inf
    falls = values.diff()
    clear = n > 1 and falls.amax().item() < 0 and (n > k or values[..., -1].amin().item() > -math.inf)
    if n > k:
        # copies: a view would keep k + 1 values, and their stride
        values, indices = (t[..., :k].clone(memory_format=torch.contiguous_format) for t in (values, indices))
    if not clear:
        rows, v, i = keys.reshape(-1, n), values.view(-1, k), indices.view(-1, k)
        tied = (falls < 0).all(-1).logical_not_().view(-1) | v[:, 0].isnan() | (v[:, -1] == -math.inf)
        which = tied.nonzero()[:, 0]
        if len(which):
            v[which], i[which] = exact(rows[which], k, True)
    return values, indices


def _in_groups(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Return `_by_number` of groups of rows: their numbers stay in cache between one operation and the next."""
    n = keys.shape[-1]
    if keys.numel() <= GROUP or keys.numel() == n:
        return _by_number(keys, k, is_sorted)
    found = [_by_number(part, k, is_sorted) for part in keys.reshape(-1, n).split(max(1, GROUP // n))]  # type: ignore[no-untyped-call]
    values, indices = (torch.cat(parts).view(*keys.shape[:-1], k) for parts in zip(*found, strict=True))
    return values, indices


def _by_number(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select by integers that hold a score's order and, below it, its column from the end: no two are equal.

    The bits of a float, as an integer, are in its order, if those of negative numbers are inverted.
    """
    n = keys.shape[-1]
    wide = keys if keys.element_size() == 4 or n <= 1 << 16 else keys.float()
    half = 8 * wide.element_size()
    small, large, most = (
        (torch.int16, torch.int32, 0x7FFF) if half == 16 else (torch.int32, torch.int64, 0x7FFFFFFF)
    )  # fmt: skip
    # adding 0 makes +0 of −0
    number = (wide + 0.0).view(small).to(large)
    number ^= (number >> (2 * half - 1)) & most
    if not math.isfinite(keys.sum(dtype=torch.float32).item()):
        number.masked_fill_(keys.isnan(), most)
    number = number.bitwise_left_shift_(half).add_(torch.arange(n - 1, -1, -1, dtype=large))
    best = number.topk(k, sorted=is_sorted).values
    indices = (n - 1 - (best & (2 * most + 1))).long()
    values = keys.gather(-1, indices)
    missing = values == -math.inf
    if not is_sorted or missing.any():
        # missing ones stay last
        indices = torch.where(missing, n, indices)
        if not is_sorted:
            indices = indices.sort(-1).values
        values = torch.where(indices < n, keys.gather(-1, indices.clamp(max=n - 1)), -math.inf)
        indices = torch.where(indices < n, indices, -1)
    return values, indices


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
