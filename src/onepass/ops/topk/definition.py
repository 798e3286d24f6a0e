"""The definition of topk by a stable sort, the ranges of rows, and the torch path."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from onepass.core import check
from onepass.core.eager import visible
from onepass.core.launch import cdiv
from onepass.ops._shared import arguments
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
    valid = arguments.valid_entries(scores, mask)
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
    lead, n = scores.shape[:-1], scores.shape[-1]
    given = {name: value for name, value in (("start", start), ("lengths", lengths)) if value is not None}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}; pass torch.tensor({name})")
        if value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, got {value.dtype}; pass {name}.int()")
        if not arguments.broadcasts(value.shape, lead):
            raise ValueError(
                f"{op}: {name} must broadcast to scores.shape[:-1] = {tuple(lead)}, got {tuple(value.shape)}"
            )
        check.same_device(op, name, value, "scores", scores)
    if not given or not visible(scores, start, lengths) or not all(value.numel() for value in given.values()):
        return
    for name, value in given.items():
        least, most = (int(x) for x in value.aminmax())
        if least < 0 or most > n:
            raise ValueError(f"{op}: {name} must be from 0 to the row's length {n}, got {least if least < 0 else most}")
    if start is not None and lengths is not None:
        most = int((start.long() + lengths).amax())
        if most > n:
            raise ValueError(f"{op}: start + lengths must be at most the row's length {n}, got {most}")


def allowed(scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None) -> Tensor | None:
    """Return the mask of the entries within mask and ranges; ranges are clamped to the row."""
    if start is None and lengths is None:
        return mask
    column = torch.arange(scores.shape[-1], device=scores.device)
    begin, count = clamped(scores.shape[-1], start, lengths)
    inside = (column >= begin[..., None]) & (column < (begin + count)[..., None])
    return inside if mask is None else inside & mask


def masked(scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, missing: float) -> Tensor:
    """Return scores with `missing` beside mask and ranges."""
    valid = allowed(scores, mask, start, lengths)
    return scores if valid is None else torch.where(valid, scores, missing)


def clamped(n: int, start: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return where ranges begin and how many scores they have, in rows of n; the host may not see the values."""
    first = torch.zeros_like(lengths) if start is None else start.long()  # type: ignore[arg-type]
    begin = first.clamp(0, n)
    if lengths is None:
        return begin, n - begin
    return begin, (lengths.long().clamp(min=0) + first.clamp(max=0)).clamp(min=0).minimum(n - begin)


# scores of the rows that are done at a time by one thread, which stay in its cache
AT_ONCE = 1 << 18
# rows up to this width are selected by distinct numbers: ties cost nothing there
NARROW = 512
# a block's columns, as a power of 2: what equals the k-th score is counted by blocks; columns that are looked at first
BLOCK_BITS, FIRST = 6, 1024


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
    n, shape, missing = scores.shape[-1], (*scores.shape[:-1], k), -math.inf if largest else math.inf
    kept = min(k, n)
    if not kept or not scores.numel():
        return scores.new_full(shape, missing), scores.new_full(shape, -1, dtype=index_dtype)
    rows = masked(scores, mask, start, lengths, missing).reshape(-1, n)
    # only a CPU's results can be looked at without waiting for a device
    on_cpu = rows.device.type == "cpu"
    if not on_cpu:
        values, indices = _by_sort(rows, kept, largest)
    elif n > NARROW or rows.element_size() == 8:
        values, indices = _by_topk(rows, kept, largest, is_sorted)
    else:
        parts = rows.split(max(1, AT_ONCE * torch.get_num_threads() // n))  # type: ignore[no-untyped-call]
        found = [_by_number(part, kept, largest) for part in parts]
        values, indices = found[0] if len(found) == 1 else (torch.cat(t) for t in zip(*found, strict=True))
    # what is missing stays last
    lost = values == missing
    some_lost = not on_cpu or bool(lost.any())
    if some_lost:
        indices = indices.masked_fill(lost, n)
    if not is_sorted:
        values, indices = _by_column(values, indices, n)
    if some_lost:
        indices = indices.masked_fill(indices == n, -1)
    if kept < k:
        values, indices = (
            functional.pad(t, (0, k - kept), value=value) for t, value in ((values, missing), (indices, -1))
        )
    # not views, which autograd forbids to change in place
    shaped = torch.ops.aten._unsafe_view
    return shaped(values, shape), shaped(indices.to(index_dtype), shape)


def _by_sort(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their columns, best first, without looking at a value on the host."""
    # one NaN for all: a GPU sorts them by their sign
    keys = (rows if largest else -rows).masked_fill(rows.isnan(), math.nan)
    indices = keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    return rows.gather(-1, indices), indices


def _by_number(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their columns by numbers of a score's order and, below it, its column.

    No two numbers are equal. The bits of a float, as an integer, are in its order, if those of negative numbers are
    inverted.
    """
    n = rows.shape[-1]
    # 16 bits of score and as many of column, or 32
    half, bits, wide = (16, torch.int16, torch.int32) if rows.element_size() == 2 else (32, torch.int32, torch.int64)
    highest = (1 << (half - 1)) - 1
    # adding 0 makes +0 of −0
    keys = rows + 0.0 if largest else 0.0 - rows
    order = keys.view(bits)
    order = order ^ ((order >> half - 1) & highest)
    if not math.isfinite(keys.sum().item()):
        order.masked_fill_(keys.isnan(), highest)
    number = order.to(wide).bitwise_left_shift_(half).add_(torch.arange(n - 1, -1, -1, dtype=wide, device=rows.device))
    best = number.topk(k).values.bitwise_and_((1 << half) - 1)
    indices = best.neg_().add_(n - 1).long()
    return rows.gather(-1, indices), indices


def _by_topk(rows: Tensor, k: int, largest: bool, is_sorted: bool) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their columns by torch.topk, which decides ties arbitrarily.

    It chooses a few more than k: mostly all scores equal to the k-th are among them, and are put in order there.
    """
    n = rows.shape[-1]
    # up to a 64th of a row torch.topk keeps a heap, which is cheaper than what it does beyond
    room = min(k + 1 + k // 8, n if k > n // 64 else n // 64)
    values, indices = rows.topk(room, largest=largest)
    last = values[:, k - 1 : k]
    same = values[:, 1:] == values[:, :-1]
    # rows in which scores equal to the k-th are left over; what is missing takes no index
    left = (values[:, -1:] == last) & (last != (-math.inf if largest else math.inf))
    some_left = room < n and bool(left.any())
    if some_left:
        same &= ~(left & (values[:, 1:] == last))
    if not is_sorted:
        # the order among the chosen is of no account
        same &= (values[:, 1:] == last) & (values[:, k:] == last).any(-1, keepdim=True)
    some_same = bool(same.any())
    if some_same:
        _order_equals(indices, same, n)
    # copies: a view would keep what is beyond k, and its stride
    values, indices = values[:, :k].clone(), indices[:, :k].clone()
    if some_left:
        wanted = ((values == last) & left).sum(-1, keepdim=True)
        _first_equals(rows, last, left[:, 0].nonzero()[:, 0], wanted, indices, max(FIRST, 4 * k))
    if (some_left or some_same) and (values == 0).any():
        # equal scores have equal bits, but for zeros of both signs
        values = rows.gather(-1, indices)
    # torch.topk has NaN first, or last of the smallest; the sum of infinities may be NaN, too
    nan = values[:, 0].isnan() if largest else rows.sum(-1).isnan()
    if nan.any():
        values[nan], indices[nan] = _by_sort(rows[nan], k, largest)
    return values, indices


def _order_equals(indices: Tensor, same: Tensor, n: int) -> None:
    """Put runs of equal values in order of their columns; same: whether a value equals the one before it."""
    first = functional.pad(~same, (1, 0), value=True)
    places = (~first | functional.pad(same, (0, 1))).view(-1).nonzero()[:, 0]
    run = first.view(-1).index_select(0, places).cumsum(0)
    flat = indices.view(-1)
    # one sort for all rows: a run's columns stay in its places
    flat[places] = (run * n + flat.index_select(0, places)).sort().values % n


def _first_equals(rows: Tensor, last: Tensor, some: Tensor, wanted: Tensor, indices: Tensor, width: int) -> None:
    """Write the first columns whose scores equal the last chosen to the end of a row's indices.

    some: which rows; wanted: how many columns. Rows with too few of them in the first `width` columns are looked at
    again, whole.
    """
    n, k = rows.shape[-1], indices.shape[-1]
    width = width if 2 * width < n else n
    block_size = 1 << BLOCK_BITS
    blocks = cdiv(width, block_size)
    for part in some.split(max(1, AT_ONCE * torch.get_num_threads() // width)):  # type: ignore[no-untyped-call]
        begin, end = int(part[0]), int(part[-1]) + 1
        seen = rows[:, :width]
        if end - begin < 2 * len(part):
            # no copy; of the rows between nothing is wanted
            part, seen = torch.arange(begin, end, device=rows.device), seen[begin:end]
        else:
            seen = seen.index_select(0, part)
        # 1 or 0 in the scores' dtype, which torch compares faster than into bools
        equal = seen.new_empty(len(part), blocks * block_size)
        equal[:, width:] = 0
        torch.eq(seen, last.index_select(0, part), out=equal[:, :width])
        count = equal.view(-1, blocks, block_size).sum(-1).long()
        before = count.cumsum(-1) - count
        want = wanted.index_select(0, part)
        lacks = before[:, -1:] + count[:, -1:] < want
        if lacks.any():
            _first_equals(rows, last, part[lacks[:, 0]], wanted, indices, n)
            want = want.masked_fill(lacks, 0)
        # blocks that hold wanted columns; each column's block, rank within the row, and place among the indices
        held = ((count > 0) & (before < want)).view(-1).nonzero()[:, 0]
        found = equal.view(-1, block_size).index_select(0, held).view(-1).nonzero()[:, 0]
        count, before = (t.view(-1).index_select(0, held) for t in (count, before))
        row, block = held // blocks, found >> BLOCK_BITS
        rank = torch.arange(len(found), device=rows.device) + (before - count.cumsum(0) + count).index_select(0, block)
        want = want.view(-1).index_select(0, row)
        take = (rank < want.index_select(0, block)).nonzero()[:, 0]
        block, rank, found = (t.index_select(0, take) for t in (block, rank, found))
        place = (part.index_select(0, row) * k + k - want).index_select(0, block) + rank
        indices.view(-1)[place] = ((held % blocks) * block_size).index_select(0, block) + (found & (block_size - 1))


def _by_column(values: Tensor, indices: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return both in order of the indices, which are 0 to n."""
    if indices.device.type != "cpu" or indices.numel() < 1 << 15 or indices.shape[-1] < 16:
        indices, order = indices.sort(-1)
        return values.gather(-1, order), indices
    # one row: torch sorts long ones by radix
    first = torch.arange(0, len(indices) * (n + 1), n + 1, device=indices.device)[:, None]
    flat, order = (indices + first).view(-1).sort()
    return values.view(-1).index_select(0, order).view(values.shape), flat.view(values.shape) - first


def hard_gates(values: Tensor, indices: Tensor) -> Tensor:
    """Return 1 where an index is, else 0; NaN in a row that selects a NaN."""
    # a finite sum holds no NaN and no infinity, which stands where an index is missing
    if values.device.type == "cpu" and math.isfinite(values.sum().item()):
        return torch.ones_like(values, memory_format=torch.contiguous_format)
    ones = torch.where(values.isnan().any(-1, keepdim=True), math.nan, torch.ones_like(values))
    return torch.where(indices >= 0, ones, 0.0)
