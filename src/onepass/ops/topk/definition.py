"""The definition of topk by a stable sort, the ranges of rows, and the torch path."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from onepass.core import check
from onepass.core.eager import plain
from onepass.ops._shared import arguments
from onepass.ops._shared.reference import valid_entries
from onepass.ops.soft_topk.definition import definition as soft_topk


def topk(
    scores: Tensor,
    k: int,
    *,
    eps: Tensor | float = 0.3,
    mask: Tensor | None = None,
    kind: str = "capped_exp",
    pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, indices, gates) by a stable sort of the valid scores; gates are 1 with soft_topk's gradient."""
    valid = valid_entries(scores, mask)
    order = torch.where(valid, scores, -math.inf).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    present = valid.gather(-1, order)
    soft = soft_topk(scores, k, eps=eps, mask=mask, kind=kind).gather(-1, order) if k else scores[..., :0]
    values = torch.where(present, scores.gather(-1, order), -math.inf)
    gates = torch.where(present, soft - soft.detach() + 1, 0.0)
    more = (0, k - order.shape[-1])
    indices = torch.where(present, order, -1)
    padded = zip((values, indices, gates), (-math.inf, -1, 0.0), strict=True)
    values, indices, gates = (functional.pad(found, more, value=value) for found, value in padded)
    return values, indices, gates


def check_ranges(op: str, scores: Tensor, start: Tensor | None, lengths: Tensor | None) -> None:
    """Raise an error for ranges of a wrong type, shape or device, or that reach past a row.

    Values are checked on a CPU only: on a GPU the host would wait for them.
    """
    _check(op, "start", start, scores)
    _check(op, "lengths", lengths, scores)
    if scores.device.type != "cpu" or not plain(scores, start, lengths):
        return
    n = scores.shape[-1]
    for name, value in (("start", start), ("lengths", lengths)):
        if value is None or not value.numel():
            continue
        least, most = (int(x) for x in value.aminmax())
        if least < 0 or most > n:
            raise ValueError(f"{op}: {name} must be from 0 to the row's length {n}, got {least if least < 0 else most}")
    if start is not None and lengths is not None and start.numel() and lengths.numel():
        most = int((start.long() + lengths).amax())
        if most > n:
            raise ValueError(f"{op}: start + lengths must be at most the row's length {n}, got {most}")


def _check(op: str, name: str, value: Tensor | None, scores: Tensor) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}; pass torch.tensor({name})")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {value.dtype}; pass {name}.int()")
    lead = scores.shape[:-1]
    if not arguments.broadcasts(value.shape, lead):
        raise ValueError(f"{op}: {name} must broadcast to scores.shape[:-1] = {tuple(lead)}, got {tuple(value.shape)}")
    check.same_device(op, name, value, "scores", scores)


def allowed(scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Return the mask of the entries within mask and ranges; ranges are clamped to the row."""
    if start is None and lengths is None:
        return mask
    column = torch.arange(scores.shape[-1], device=scores.device)
    begin, count = clamped(scores.shape[-1], start, lengths)
    inside = (column >= begin[..., None]) & (column < (begin + count)[..., None])
    return inside if mask is None else inside & mask


def clamped(n: int, start: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return where ranges begin and how many scores they have, in rows of n; the host may not see the values."""
    first = torch.zeros_like(lengths) if start is None else start.long()  # type: ignore[arg-type]
    begin = first.clamp(0, n)
    if lengths is None:
        return begin, n - begin
    return begin, (lengths.long().clamp(min=0) + first.clamp(max=0)).clamp(min=0).minimum(n - begin)


# scores of the rows that are done at a time, which bounds the memory beside them
AT_ONCE = 1 << 20


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
    return values, indices if index_dtype == torch.int64 else indices.to(index_dtype)


def _on_cpu(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select with torch.topk, which decides ties arbitrarily: from scores without a tie, else from distinct numbers."""
    n = keys.shape[-1]
    rows = keys.reshape(-1, n)
    parts = [_from_rows(part, k, is_sorted) for part in rows.split(max(1, AT_ONCE // n))]  # type: ignore[no-untyped-call]
    values, indices = parts[0] if len(parts) == 1 else (torch.cat(found) for found in zip(*parts, strict=True))
    # not views, which autograd forbids to change in place
    shaped, shape = torch.ops.aten._unsafe_view, (*keys.shape[:-1], k)
    return shaped(values, shape), shaped(indices, shape)


def _from_rows(rows: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    exact = _anywhere if rows.element_size() == 8 else _by_number
    if rows.element_size() == 2:
        return exact(rows, k, is_sorted)
    n = rows.shape[-1]
    # one value more than k shows a tie of the last one with what is left
    values, indices = rows.topk(min(k + 1, n))
    # each value is below the one before: a tie or a NaN breaks this
    tied = ~(values.diff() < 0).all(-1)
    if n == k:
        tied |= ~(values[:, -1] > -math.inf)
    if tied.all():
        return exact(rows, k, is_sorted)
    if n > k:
        # copies: a view would keep k + 1 values, and their stride
        values, indices = (t[:, :k].clone(memory_format=torch.contiguous_format) for t in (values, indices))
    if not is_sorted:
        indices = indices.sort(-1).values
        values = rows.gather(-1, indices)
    if tied.any():
        values[tied], indices[tied] = exact(rows[tied], k, is_sorted)
    return values, indices


def _by_number(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select by numbers of a score's order and, below it, its column from the end: no two are equal.

    The bits of a float, as an integer, are in its order, if those of negative numbers are inverted.
    """
    n = keys.shape[-1]
    bits, largest = (torch.int16, 0x7FFF) if keys.element_size() == 2 else (torch.int32, 0x7FFFFFFF)
    # 16 bits of score and as many of column, or 32
    half = 16 if bits == torch.int16 and n <= 1 << 16 else 32
    wide = torch.int32 if half == 16 else torch.int64
    # adding 0 makes +0 of −0
    number = (keys + 0.0).view(bits).to(wide)
    number ^= (number >> 31) & largest
    if not math.isfinite(keys.sum(dtype=torch.float64).item()):
        number.masked_fill_(keys.isnan(), largest)
    number = number.bitwise_left_shift_(half).add_(torch.arange(n - 1, -1, -1, dtype=wide, device=keys.device))
    best = number.topk(k, sorted=is_sorted).values
    indices = (n - 1 - (best & ((1 << half) - 1))).long()
    return _in_order(keys, keys.gather(-1, indices), indices, is_sorted)


def _in_order(keys: Tensor, values: Tensor, indices: Tensor, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Return the chosen values and indices, by index unless `is_sorted`, with -1 where a value is -inf."""
    missing = values == -math.inf
    if missing.any():
        # they stay last
        n = keys.shape[-1]
        indices = torch.where(missing, n, indices)
        if not is_sorted:
            indices = indices.sort(-1).values
        values = torch.where(indices < n, keys.gather(-1, indices.clamp(max=n - 1)), -math.inf)
        return values, torch.where(indices < n, indices, -1)
    if not is_sorted:
        indices = indices.sort(-1).values
        values = keys.gather(-1, indices)
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
