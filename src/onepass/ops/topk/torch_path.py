"""The selection in torch: on a CPU, in float64 and without Triton."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ranges import allowed

# a call of so few scores is chosen by Python's sort: a torch operation takes longer
TINY = 32
# calls of so few scores, and of rows so short, have torch.topk first: the operations of `_by_bound` take longer
FEW, FEW_SORTED, LONG = 1 << 14, 1 << 16, 1 << 13
# rows so short: torch.topk takes about as long as the comparison and `nonzero` of `_by_bound`
SHORT = 256
# so few are chosen one after another
ROUNDS = 4
# scores of the rows that are done at a time, which bounds the memory beside them
AT_ONCE = 1 << 20
# groups for each score to choose, and in a row: fewer leave too many scores above the bound
GROUPS, LEAST_GROUPS = 2, 128


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
    """Select with torch.topk, which decides ties arbitrarily, and decide them; all ways give the same bits."""
    n = keys.shape[-1]
    # a view takes longer than a comparison
    flat = keys.dim() == 2
    rows = keys if flat else keys.reshape(-1, n)
    found = top = None
    size, half = keys.numel(), keys.element_size() == 2
    if size <= TINY:
        found = _of_a_few(rows, k, is_sorted)
    if found is None:
        way = _by_rounds if _in_rounds(size, n, k, half) else _by_number if half and _numbers(size, n, k) else _by_bound
        if way is _by_bound and not half and _torch_first(size, n, k, is_sorted):
            found, top = _without_ties(rows, k, is_sorted)
    if found is None:
        given = (rows,) if top is None else (rows, top)
        if size <= AT_ONCE:
            found = way(rows, k, is_sorted, *given[1:])
        else:
            pieces = zip(*(t.split(max(1, AT_ONCE // n)) for t in given), strict=True)  # type: ignore[no-untyped-call]
            parts = [way(part, k, is_sorted, *rest) for part, *rest in pieces]
            found = torch.cat([values for values, _ in parts]), torch.cat([indices for _, indices in parts])
    values, indices = found
    if flat:
        return values, indices
    shape = (*keys.shape[:-1], k)
    return values.view(shape), indices.view(shape)


def _in_rounds(size: int, n: int, k: int, half: bool) -> bool:
    """Return whether k passes over the rows take less time than torch.topk and what decides its ties."""
    if k == 1:
        return True
    few = k <= ROUNDS and 2 * k * k <= n
    return few and (n <= 2 * SHORT if half else size > FEW and n <= SHORT)


def _numbers(size: int, n: int, k: int) -> bool:
    """Return whether numbers take less time than `_by_bound` for 16-bit scores; a number has 16 bits for a column."""
    return n <= 1 << 16 and (n <= SHORT or n < 2 * GROUPS * k or (n < LONG and size < FEW_SORTED))


def _torch_first(size: int, n: int, k: int, is_sorted: bool) -> bool:
    """Return whether torch.topk takes less time than `_by_bound` for `size` scores without ties in rows of n."""
    # torch.topk keeps a heap of k where 64·k ≤ n, and is fast where scores seldom enter it
    heap = 64 * (k + 1) <= n
    if size <= FEW or (heap and (k <= 16 or 512 * (k + 1) <= n)):
        return True
    if 2 * n <= SHORT:
        return is_sorted or 8 * k <= n
    return is_sorted and (n < 2 * GROUPS * k or (size <= FEW_SORTED and (heap or n < LONG)))


def _of_a_few(rows: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor] | None:
    """Select by Python's sort, which is stable; None if a score is infinite or NaN."""
    numbers = rows.tolist()
    if not all(math.isfinite(s) for row in numbers for s in row):
        return None
    columns = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k] for row in numbers]
    indices = torch.tensor(columns if is_sorted else [sorted(chosen) for chosen in columns], device=rows.device)
    return rows.gather(-1, indices), indices


def _without_ties(rows: Tensor, k: int, is_sorted: bool) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
    """Select by torch.topk; None if it had a tie to decide, or a NaN or -inf is among the chosen. And the k values."""
    n = rows.shape[-1]
    # one value more than k shows a tie of the last one with what is left
    values, indices = rows.topk(min(k + 1, n))
    # each value must be below the one before: a tie or a NaN breaks this
    if n > 1 and not values.diff().amax().item() < 0:
        return None, values[:, :k]
    if (n == 1 or n == k) and not values[:, -1].amin().item() > -math.inf:
        return None, values[:, :k]
    if not is_sorted:
        indices = indices[:, :k].sort(-1).values
        return (rows.gather(-1, indices), indices), values
    if n > k:
        # copies: a view would keep k + 1 values, and their stride
        values, indices = (t[:, :k].clone(memory_format=torch.contiguous_format) for t in (values, indices))
    return (values, indices), values


def _by_bound(rows: Tensor, k: int, is_sorted: bool, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select among the scores that reach a bound.

    The columns are dealt to groups, at least twice as many as scores to choose. The k-th largest of the groups' largest
    scores is a bound that at least k scores reach, and seldom many more. Without groups it is the k-th score itself,
    as with `top`, the k largest scores.
    """
    n, dtype = rows.shape[-1], rows.dtype
    # torch compares and selects fp32 faster than 16-bit scores
    wide = (rows.float() if rows.element_size() == 2 else rows).contiguous()
    parts = 1
    if top is None:
        parts = max(1, n // max(GROUPS * k, LEAST_GROUPS))
        best = wide
        if parts > 1:
            groups = n // parts
            best = wide[:, : groups * parts].view(-1, parts, groups).amax(1)
            if rest := n - groups * parts:
                best[:, :rest] = torch.maximum(best[:, :rest], wide[:, -rest:])
        top = best.topk(k, sorted=False).values
    bound, highest = top.aminmax(dim=-1, keepdim=True)
    least = bound.amin().item()
    if math.isnan(least):
        return _anywhere(rows, k, is_sorted)
    # a row with fewer than k scores above -inf: its bound rises to the lowest of them there may be
    short = least == -math.inf
    if short:
        bound.clamp_(min=torch.finfo(wide.dtype).min)
    elif torch.equal(bound, highest) and (level := _first_level(wide, bound, k)) is not None:
        # no score is above the bound, so order by value is order by column
        return rows.gather(-1, level), level
    values, columns = _reaching(wide, bound, k, parts == 1, short)
    if is_sorted:
        values, order = values.sort(dim=-1, descending=True, stable=True)
        values, columns = values[:, :k], columns.gather(-1, order[:, :k])
    elif values.shape[-1] > k:
        last = values.topk(k, sorted=False).values.amin(-1, keepdim=True)
        if short:
            last.clamp_(min=torch.finfo(wide.dtype).min)
        values, places = _reaching(values, last, k, True, short)
        columns = columns.gather(-1, places)
    if short:
        columns.masked_fill_(values == -math.inf, -1)
    return values.to(dtype).contiguous(), columns


def _first_level(rows: Tensor, bound: Tensor, k: int) -> Tensor | None:
    """Return the first k columns of each row equal to its bound; None if they are not near the row's beginning."""
    same = rows[:, : 8 * k] == bound
    if len(rows) == 1:
        found = same.nonzero()[:k, 1]
        return found.clone()[None] if len(found) == k else None
    rank = same.cumsum(-1, dtype=torch.int32)
    if rank[:, -1].amin().item() < k:
        return None
    return same.logical_and_(rank <= k).nonzero()[:, 1].reshape(-1, k)


def _reaching(rows: Tensor, bound: Tensor, k: int, exact: bool, short: bool) -> tuple[Tensor, Tensor]:
    """Return the scores of each row that reach its bound, and their columns in ascending order, padded with -inf.

    Args:
        rows: (R, n), contiguous.
        bound: (R, 1), at most the k-th largest score of the row.
        k: at least so many columns are returned.
        exact: the bound is the k-th score, and of scores equal to it the first are taken: k in all.
        short: there are rows with fewer than k scores that reach the bound.
    """
    n_rows, n = rows.shape
    chosen = rows >= bound
    found = chosen.view(-1).nonzero().view(-1)
    # many more than k: a plateau at the bound
    if (exact and short) or len(found) > (k if exact else 2 * k) * n_rows:
        chosen = _first_equal(rows, bound, k)
        found = chosen.view(-1).nonzero().view(-1)
    values = rows.view(-1).index_select(0, found)
    if n_rows == 1 and len(found) >= k:
        return values[None], found[None]
    begins = torch.arange(0, n_rows * n, n, device=rows.device)[:, None]
    if not short and len(found) == k * n_rows:
        return values.view(-1, k), found.view(-1, k) - begins
    counts = chosen.sum(-1, keepdim=True, dtype=torch.int32)
    width = max(k, int(counts.amax()))
    if not len(found):
        return rows.new_full((n_rows, width), -math.inf), begins.new_zeros((n_rows, width))
    slot = torch.arange(width, device=rows.device)
    missing = slot >= counts
    place = (slot + (counts.cumsum(0) - counts)).clamp_(max=len(found) - 1).view(-1)
    values = values.index_select(0, place).view(-1, width).masked_fill_(missing, -math.inf)
    return values, (found.index_select(0, place).view(-1, width) - begins).masked_fill_(missing, 0)


def _first_equal(rows: Tensor, bound: Tensor, k: int) -> Tensor:
    """Return where scores are above the bound, or equal to it and among the first that fill a row up to k."""
    n = rows.shape[-1]
    above = rows > bound
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    # most plateaus fill up near the row's beginning
    for end in (min(n, 8 * k), n):
        same = rows[:, :end] == bound
        rank = same.cumsum(-1, dtype=torch.int32)
        if end == n or bool((rank[:, -1:] >= room).all()):
            break
    above[:, :end] |= same.logical_and_(rank <= room)
    return above


def _by_rounds(rows: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select the largest score k times; torch's max names the first of equal ones, and of NaNs."""
    if k == 1:
        return _in_order(rows, *rows.max(-1, keepdim=True), is_sorted=True)
    left = rows.clone()
    best = [left.max(-1, keepdim=True)]
    while len(best) < k:
        left.scatter_(-1, best[-1].indices, -math.inf)
        best.append(left.max(-1, keepdim=True))
    values, indices = (torch.cat(found, -1) for found in zip(*best, strict=True))
    return _in_order(rows, values, indices, is_sorted)


def _by_number(keys: Tensor, k: int, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Select by int32 numbers: a 16-bit score's order and, below it, its column from the end, so no two are equal.

    The bits of a float, as an integer, are in its order, if those of negative numbers are inverted.
    """
    n = keys.shape[-1]
    # adding 0 makes +0 of −0
    number = (keys + 0.0).view(torch.int16).to(torch.int32)
    number ^= (number >> 31) & 0x7FFF
    if not math.isfinite(keys.sum(dtype=torch.float32).item()):
        number.masked_fill_(keys.isnan(), 0x7FFF)
    number = number.bitwise_left_shift_(16).add_(torch.arange(n - 1, -1, -1, dtype=torch.int32, device=keys.device))
    best = number.topk(k, sorted=is_sorted).values
    indices = (n - 1 - (best & 0xFFFF)).long()
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
