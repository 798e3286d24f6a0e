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
# columns of a block; least rows of WORTH·k blocks, and least scores of all rows, that are selected from the best blocks
BLOCK, WORTH, LEAST_COLUMNS, LEAST = 32, 16, 1 << 13, 1 << 17
# up to this part of a row torch.topk keeps a heap
OF_HEAP = 64
# last bits that are 0 in scores of 16 bits as fp32, and of 32 as float64
SPARE = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 29}


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
    """Return values and indices of the k largest valid scores, padded; k ≤ n, or n = 0."""
    n, shape, missing = scores.shape[-1], (*scores.shape[:-1], k), -math.inf if largest else math.inf
    if not k or not scores.numel():
        return scores.new_full(shape, missing), scores.new_full(shape, -1, dtype=index_dtype)
    rows = masked(scores, mask, start, lengths, missing).reshape(-1, n)
    found, blocks = candidates(rows, k, largest)
    indices = _best(found, k, largest)
    if blocks is not None:
        indices = blocks.gather(-1, indices // BLOCK) * BLOCK + indices % BLOCK
    values = rows.gather(-1, indices)
    lost = values == missing
    if not is_sorted:
        # what is missing stays last
        values, indices = _by_column(values, indices.masked_fill(lost, n), n)
    indices = indices.masked_fill(lost, -1)
    # not views, which autograd forbids to change in place
    shaped = torch.ops.aten._unsafe_view
    return shaped(values, shape), shaped(indices.to(index_dtype), shape)


def candidates(rows: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor | None]:
    """Return scores among which the k best of each row are, in order of their columns, and their blocks if not all.

    A row's k best stand in the k best of its blocks, these in order of their own best, then of their columns: the bests
    of k other blocks come before any score of another one. What is behind the last whole block counts as one more.
    """
    n = rows.shape[-1]
    whole = n // BLOCK
    if whole < WORTH * k or n < LEAST_COLUMNS or rows.numel() < LEAST:
        return rows, None
    blocks, parts = rows.unfold(-1, BLOCK, BLOCK), _parts(rows)
    # maxima of 16 bits take torch several times as long as of fp32; new memory for each part would cost as much again
    room = None if rows.element_size() > 2 else torch.empty_like(blocks[parts[0]], dtype=torch.float32)
    wide = (blocks[at] if room is None else room[: len(blocks[at])].copy_(blocks[at]) for at in parts)
    tops = torch.cat([part.amax(-1) if largest else part.amin(-1) for part in wide])
    chosen = _best(tops, k, largest).sort(dim=-1).values
    found = blocks[torch.arange(len(rows), device=rows.device)[:, None], chosen].flatten(1)
    return torch.cat((found, rows[:, whole * BLOCK :]), -1), functional.pad(chosen, (0, 1), value=whole)


def _parts(rows: Tensor) -> list[slice]:
    """Return which rows are done at a time; on a GPU all of them, as each part would cost launches."""
    height = len(rows) if rows.is_cuda else AT_ONCE * torch.get_num_threads() // rows.shape[-1]
    return [slice(at, at + max(1, height)) for at in range(0, max(1, len(rows)), max(1, height))]


def _best(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return the columns of the k best scores, best first and the first of equals first."""
    n, on_cpu = rows.shape[-1], rows.device.type == "cpu"
    if on_cpu and rows.element_size() < 8 and n < 1 << SPARE[torch.float32]:
        return _by_number(rows, k, largest)
    if not on_cpu or k == n:
        return _by_sort(rows, k, largest)
    # one more shows whether the k-th has equals
    values, indices = rows.topk(k + 1, largest=largest)
    again = (values[:, 1:] == values[:, :-1]).any(-1) | rows.isnan().any(-1)
    if again.any():
        indices[again, :k] = _by_sort(rows[again], k, largest)
    return indices[:, :k].contiguous()


def _by_sort(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return `_best` without looking at a value on the host."""
    # one NaN for all: a GPU sorts them by their sign
    keys = (rows if largest else -rows).masked_fill(rows.isnan(), math.nan)
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _by_number(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return `_best` by numbers, no two equal: bits of a wider float, the last of which are the column from the end."""
    n, parts, found = rows.shape[-1], _parts(rows), []
    spare, wide, bits = SPARE[torch.float32], torch.float64, torch.int64
    if rows.element_size() == 2 and n < 1 << SPARE[rows.dtype]:
        spare, wide, bits = SPARE[rows.dtype], torch.float32, torch.int32
    # most of a heap's time is what enters it and leaves again: k numbers ahead that the k best exceed keep that out
    ahead = k if OF_HEAP * k <= n else 0
    from_end = torch.arange(n, 0, -1, dtype=bits, device=rows.device)
    # new memory for each part would cost as much as a pass over it
    room = rows.new_empty((len(rows[parts[0]]), ahead + n), dtype=wide)
    for at in parts:
        keys, positive = room[: len(rows[at])], False
        scores = keys[:, ahead:].copy_(rows[at] if largest else -rows[at])
        if not math.isfinite(rows[at].sum().item()):
            # one NaN for all, above infinity
            scores.masked_fill_(scores.isnan(), math.nan)
        if ahead:
            # k groups have a score each that reaches the least of their best; NaN tells nothing
            least = scores[:, : n // k * k].view(len(keys), k, n // k).amax(-1).amin(-1, keepdim=True)
            keys[:, :ahead] = least.nan_to_num_(-math.inf, math.inf, -math.inf)
            positive = bool((least > 0).all())
        number = keys.view(bits)
        if not positive:
            # adding 0 makes +0 of −0; bits of negative scores are in the order of magnitudes
            keys.add_(0.0)
            number ^= (number >> torch.iinfo(bits).bits - 1).bitwise_and_(torch.iinfo(bits).max >> spare << spare)
        number[:, ahead:].bitwise_or_(from_end)
        found.append(number.topk(k).indices)
    return torch.cat(found).sub_(ahead)


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
