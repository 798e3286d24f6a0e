"""The definition of topk by a stable sort, the ranges of rows, and the torch path."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from onepass.core import check
from onepass.core.eager import visible
from onepass.ops._shared import arguments
from onepass.ops.soft_topk.definition import definition as soft_topk


def topk(
    scores: Tensor, k: int, *, eps: Tensor | float = 0.3, mask: Tensor | None = None, kind: str = "capped_exp",
    pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (values, indices, gates) by a stable sort of the valid scores; gates are 1 with soft_topk's gradient."""
    padding = (0, max(0, k - scores.shape[-1]))
    valid = functional.pad(arguments.valid_entries(scores, mask), padding)
    s = functional.pad(scores, padding).masked_fill(~valid, -math.inf)
    order = s.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    present = valid.gather(-1, order)
    soft = soft_topk(s, k, eps=eps, mask=valid, kind=kind).gather(-1, order) if k else s[..., :0]
    gates = torch.where(present, soft - soft.detach() + 1, 0.0)
    return s.gather(-1, order), torch.where(present, order, -1), gates


def check_ranges(op: str, scores: Tensor, start: Tensor | None, lengths: Tensor | None) -> None:
    """Raise an error for ranges of a wrong type, shape or device, or that reach past a row.

    Values are checked on a CPU only: on a GPU the host would wait for them.
    """
    lead, n = scores.shape[:-1], scores.shape[-1]
    ranges = {name: value for name, value in (("start", start), ("lengths", lengths)) if value is not None}
    for name, value in ranges.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}; pass torch.tensor({name})")
        if value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, got {value.dtype}; pass {name}.int()")
        if not arguments.broadcasts(value.shape, lead):
            raise ValueError(
                f"{op}: {name} must broadcast to scores.shape[:-1] = {tuple(lead)}, got {tuple(value.shape)}"
            )
        check.same_device(op, name, value, "scores", scores)
    if not ranges or not visible(scores, start, lengths) or not all(value.numel() for value in ranges.values()):
        return
    for name, value in ranges.items():
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
    """Return scores with `missing` outside of mask and ranges."""
    valid = allowed(scores, mask, start, lengths)
    return scores if valid is None else torch.where(valid, scores, missing)


def clamped(n: int, start: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ranges' first columns and lengths, clamped to rows of n: the host may not have seen the values."""
    first = torch.zeros_like(lengths) if start is None else start.long()  # type: ignore[arg-type]
    begin = first.clamp(0, n)
    if lengths is None:
        return begin, n - begin
    return begin, (lengths.long().clamp(min=0) + first.clamp(max=0)).clamp(min=0).minimum(n - begin)


# scores that a thread handles at a time: they stay in its cache
AT_ONCE = 1 << 18
# columns of a block; rows of at least WORTH·k blocks and LEAST_COLUMNS, LEAST scores in all, look in the best blocks
BLOCK, WORTH, LEAST_COLUMNS, LEAST = 32, 16, 1 << 13, 1 << 17
# torch.topk keeps a heap for k up to n / OF_HEAP
OF_HEAP = 64
# low bits that are 0 when 16-bit scores are held in fp32, and fp32 scores in float64
SPARE = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 29}


def select(
    scores: Tensor, mask: Tensor | None, start: Tensor | None, lengths: Tensor | None, k: int, largest: bool,
    is_sorted: bool, index_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return values and indices of the k largest valid scores, padded; k ≤ n, or n = 0."""
    n, shape, missing = scores.shape[-1], (*scores.shape[:-1], k), -math.inf if largest else math.inf
    if not k or not scores.numel():
        return scores.new_full(shape, missing), scores.new_full(shape, -1, dtype=index_dtype)
    rows = masked(scores, mask, start, lengths, missing).reshape(-1, n)
    pool, blocks = candidates(rows, k, largest)
    indices = _best(pool, k, largest)
    if blocks is not None:
        indices = blocks.gather(-1, indices // BLOCK) * BLOCK + indices % BLOCK
    values = rows.gather(-1, indices)
    is_padding = values == missing
    if not is_sorted:
        # padding stays last
        indices = _by_column(indices.masked_fill(is_padding, n), n)
        values = rows.gather(-1, indices.clamp(max=n - 1)).masked_fill_(is_padding, missing)
    indices = indices.masked_fill(is_padding, -1)
    # autograd forbids to change views in place; these results don't count as views
    reshaped = torch.ops.aten._unsafe_view
    return reshaped(values, shape), reshaped(indices.to(index_dtype), shape)


def candidates(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor | None]:
    """Return scores that hold each row's k best, in the order of columns, and their blocks; None: the whole row.

    A row's k best scores are in its k best blocks, ordered by largest score, then by column: before a score of any
    other block come the largest scores of these k. The columns behind the last whole block count as one more block.
    """
    n = rows.shape[-1]
    n_blocks = n // BLOCK
    if n_blocks < WORTH * k or n < LEAST_COLUMNS or rows.numel() < LEAST:
        return rows, None
    blocks = rows.unfold(-1, BLOCK, BLOCK)
    chosen = _best(_tops(rows, largest), k, True).sort(dim=-1).values
    in_blocks = blocks[torch.arange(len(rows), device=rows.device)[:, None], chosen].flatten(1)
    return torch.cat((in_blocks, rows[:, n_blocks * BLOCK :]), -1), functional.pad(chosen, (0, 1), value=n_blocks)


def _tops(rows: Tensor, largest: bool) -> Tensor:
    """Return the largest score of each whole block, or the smallest, negated; 16-bit scores in fp32."""
    parts = [part.unfold(-1, BLOCK, BLOCK) for part in _parts(rows)]
    # torch's maxima of 16-bit scores take several times as long as of fp32; a buffer for each part would cost as much
    buffer = None if rows.element_size() > 2 else torch.empty_like(parts[0], dtype=torch.float32)
    computed = (part if buffer is None else buffer[: len(part)].copy_(part) for part in parts)
    return torch.cat([part.amax(-1) if largest else -part.amin(-1) for part in computed])


def _parts(rows: Tensor, share: int = 1) -> tuple[Tensor, ...]:
    """Split rows into parts that stay in a thread's cache; not on a GPU, where each part would cost launches."""
    height = len(rows) if rows.is_cuda else AT_ONCE // share * torch.get_num_threads() // rows.shape[-1]
    return rows.split(max(1, height))  # type: ignore[no-any-return, no-untyped-call]


def _best(rows: Tensor, k: int, largest: bool, try_level: bool = True) -> Tensor:
    """Return the columns of the k best scores, best first and the first of equals first."""
    n, on_cpu = rows.shape[-1], rows.device.type == "cpu"
    if try_level and on_cpu and rows.numel() >= LEAST and n >= 2 * BLOCK:
        # every 64th row tells whether the others are worth a try, and how many columns to search
        solved, columns = _of_level(rows[::64], k, largest, 16 * k + 64)
        if 2 * int(solved.sum()) > len(solved):
            solved, columns = _of_level(rows, k, largest, int(columns[solved, -1].max()) * 3 // 2 + 16)
            if not solved.all():
                columns[~solved] = _best(rows[~solved], k, largest, False)
            return columns
    if on_cpu and rows.element_size() < 8 and n < 1 << SPARE[torch.float32]:
        return _by_number(rows, k, largest)
    if not on_cpu or k == n:
        return _by_sort(rows, k, largest)
    # one more shows whether another score equals the k-th
    values, indices = rows.topk(k + 1, largest=largest)
    tied = (values[:, 1:] == values[:, :-1]).any(-1) | rows.isnan().any(-1)
    indices[tied, :k] = _by_sort(rows[tied], k, largest)
    return indices[:, :k].contiguous()


def _of_level(rows: Tensor, k: int, largest: bool, width: int) -> tuple[Tensor, Tensor]:
    """Return which rows fill up to k by scores equal to the k-th in the first `width` columns, and `_best` of these."""
    tops, sign, width = _tops(rows, largest), 1 if largest else -1, min(width, rows.shape[-1])
    kth = tops.amin(-1, keepdim=True)
    # fewer than k blocks exceed the k-th score; a row is worth a try where a quarter of its blocks don't
    beyond, n_blocks = tops != kth, tops.shape[-1]
    level = beyond.sum(-1) < min(k, n_blocks - max(1, n_blocks // 4))
    if 2 * int(level.sum()) <= len(rows):
        return torch.zeros_like(level), rows.new_empty((len(rows), k), dtype=torch.int64)
    # the first k equal ones; k columns of padding make up for rows that have fewer
    equal = functional.pad(rows[:, :width] == (sign * kth).to(rows.dtype), (0, k), value=True)
    equal &= equal.cumsum(-1, dtype=torch.int16 if width + k < 1 << 15 else torch.int32) <= k
    columns = equal.view(-1).nonzero().view(-1, k) % (width + k)
    row, block = (beyond & level[:, None]).nonzero().unbind(-1)
    pair, column = (sign * rows.unfold(-1, BLOCK, BLOCK)[row, block] > kth[row]).nonzero().unbind(-1)
    row, column = row[pair], block[pair] * BLOCK + column
    above, tail = row.bincount(minlength=len(rows)), sign * rows[:, n_blocks * BLOCK :]
    level &= (above < k) & (above + (columns < width).sum(-1) >= k) & (tail <= kth).all(-1)
    if len(row):
        # scores above the k-th come first, sorted within their row, and move the equal ones back
        row, column, above = row[level[row]], column[level[row]], above.where(level, 0)
        order = (sign * rows[row, column]).sort(descending=True, stable=True).indices
        row, at = row[order].sort(stable=True)
        columns = columns.gather(-1, (torch.arange(k, device=rows.device) - above[:, None]).clamp(min=0))
        columns[row, torch.arange(len(row), device=rows.device) - (above.cumsum(0) - above)[row]] = column[order[at]]
    return level, columns


def _by_sort(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return `_best` by a stable sort; the host reads no value."""
    # one NaN stands for all: a GPU sorts them by sign
    keys = (rows if largest else -rows).masked_fill(rows.isnan(), math.nan)
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _by_number(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return `_best` by distinct numbers: scores as wider floats whose low bits hold the column, counted backwards."""
    n, parts, columns = rows.shape[-1], _parts(rows), []
    spare, floats, ints = SPARE[torch.float32], torch.float64, torch.int64
    if rows.element_size() == 2 and n < 1 << SPARE[rows.dtype]:
        spare, floats, ints = SPARE[rows.dtype], torch.float32, torch.int32
    # a heap spends its time on numbers that enter and leave again: k numbers ahead, below the k best, keep them out
    ahead = k if OF_HEAP * k <= n else 0
    from_end = torch.arange(n, 0, -1, dtype=ints, device=rows.device)
    # a new buffer for each part would cost as much as a pass over it
    buffer = rows.new_empty((len(parts[0]), ahead + n), dtype=floats)
    for part in parts:
        keys, floor = buffer[: len(part)], -math.inf
        scores = keys[:, ahead:].copy_(part if largest else -part)
        if not math.isfinite(part.sum().item()):
            # one NaN stands for all, above infinity
            scores.masked_fill_(scores.isnan(), math.nan)
        if ahead:
            # the least of the maxima of k groups bounds the k best from below; a NaN bounds nothing
            least = scores[:, : n // k * k].view(len(keys), k, n // k).amax(-1).amin(-1, keepdim=True)
            keys[:, :ahead] = least.nan_to_num_(-math.inf, math.inf, -math.inf)
            floor = float(least.amin())
        number = keys.view(ints)
        if floor <= 0:
            # turns −0 into +0
            keys.add_(0.0)
        if floor < 0:
            # bits of negative scores order by magnitude: invert them, some rows at a time to save memory
            for slab in _parts(number, 8):
                slab ^= (slab >> torch.iinfo(ints).bits - 1).bitwise_and_(torch.iinfo(ints).max >> spare << spare)
        number[:, ahead:].bitwise_or_(from_end)
        columns.append(number.topk(k).indices)
    return torch.cat(columns).sub_(ahead)


def _by_column(indices: Tensor, n: int) -> Tensor:
    """Sort each row's indices, which are 0 to n."""
    if indices.device.type != "cpu" or indices.numel() < 1 << 15 or indices.shape[-1] < 16:
        return indices.sort(-1).values
    # sort all as one row: torch sorts long rows by radix
    first = torch.arange(0, len(indices) * (n + 1), n + 1, device=indices.device)[:, None]
    return (indices + first).view(-1).sort().values.view_as(indices) - first


def hard_gates(values: Tensor, indices: Tensor) -> Tensor:
    """Return 1 where an index is ≥ 0, else 0; NaN in a row that selects a NaN."""
    # a finite sum has no NaN and no infinity, which is the value of padding
    if values.device.type == "cpu" and math.isfinite(values.sum().item()):
        return torch.ones_like(values, memory_format=torch.contiguous_format)
    ones = torch.where(values.isnan().any(-1, keepdim=True), math.nan, torch.ones_like(values))
    return torch.where(indices >= 0, ones, 0.0)
