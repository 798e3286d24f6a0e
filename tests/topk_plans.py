"""What the tests of topk share: scores, a stable sort, launch shapes that send small rows the ways of large ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.ops.topk import plan


def shrink(monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> None:
    """Let small rows take the ways of large ones."""
    small = {
        "NARROW": 0, "NARROW_TILE": 64, "WIDE": 1 << 40, "WIDE_CHUNK": 128, "WIDE_AGAIN": 512,
        "MAX_COLS": 16, "MAX_BYTES_OF_MANY": 16, "TILE": 32, "TILE_WARPS": 1, "SAMPLE": 32, "SECTOR": 16,
        "SIGMAS": 1.0, "ALONE": 32, "MAX_SORTED": 64, "SORTED_BY_WHOLE": 8, "RUN": 8, "MERGED": 16, **sizes,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(plan, name, value)


def expected(
    s: Tensor, k: int, largest: bool = True, sorted: bool = True, start: Tensor | None = None,
    lengths: Tensor | None = None, mask: Tensor | None = None, ties: str = "first",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values and indices by a stable sort in float64, which has NaN first; -1 and an infinity where nothing is left."""
    n, columns = s.shape[-1], torch.arange(s.shape[-1], device=s.device)
    first = torch.zeros((), dtype=torch.int64, device=s.device) if start is None else start.long()
    count = torch.full_like(first, n) if lengths is None else lengths.clamp(min=0)
    inside = (columns >= first[..., None]) & (columns < (first + count)[..., None])
    wide = (s if largest else -s).double().masked_fill(~(inside if mask is None else inside & mask), -math.inf)
    # every NaN alike, whatever its sign; the last of equals is the first of a row that is turned round
    wide = wide.masked_fill(wide.isnan(), math.nan)
    sorted_, indices = (wide.flip(-1) if ties == "last" else wide).sort(dim=-1, descending=True, stable=True)
    indices = n - 1 - indices if ties == "last" else indices
    indices = indices.masked_fill(sorted_ == -math.inf, n)[..., :k]
    indices = indices if sorted else indices.sort(-1).values
    indices = torch.nn.functional.pad(indices, (0, k - indices.shape[-1]), value=n)
    missing = -math.inf if largest else math.inf
    values = torch.nn.functional.pad(s, (0, 1), value=missing).gather(-1, indices)
    return values, indices.masked_fill(indices == n, -1)


def of_any_bits(s: Tensor) -> Tensor:
    """NaN of both signs and several payloads in the place of every NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[s.element_size()]
    payload = torch.randint(1, 60, s.shape, device=s.device).to(bits)
    sign = torch.where(torch.rand(s.shape, device=s.device) < 0.5, torch.iinfo(bits).min, 0).to(bits)
    return torch.where(s.isnan(), (torch.full_like(s, math.inf).view(bits) + payload | sign).view(s.dtype), s)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits but for NaN, which are alike; the sign of a zero counts."""
    nan = a.isnan()
    return a.dtype == b.dtype and bool((((a == b) & (a.signbit() == b.signbit())) | (nan & b.isnan())).all())


KINDS = (
    "normal", "a third equal", "level within", "all equal", "zeros of both signs", "far apart", "special", "NaN",
    "in one place", "one group", "no sample sees them", "few", "lowest",
)  # fmt: skip


def sampled(n: int, groups: int, group: int) -> Tensor:
    """The columns of the sample of a whole row, as `pivot_kernel` takes it."""
    n_groups = -(-n // group)
    at = torch.arange(groups)
    if n_groups > groups:
        scattered = ((at * 2654435769) & 0xFFFFFFFF) * (n_groups // groups) >> 32
        at = at * n_groups // groups + scattered
    columns = (at[:, None] * group + torch.arange(group)).flatten()
    return columns[columns < n]


def rows_of(kind: str, rows: int, n: int, generator: torch.Generator, k: int = 1) -> Tensor:
    """Scores (rows, n) in fp32; k: how many will be chosen."""
    s, chance = torch.randn(rows, n, generator=generator), torch.rand(rows, n, generator=generator)
    if kind == "a third equal":
        return s.clamp(max=0.43)
    if kind == "level within":
        return torch.where(chance < 1 / 3, 0.5, s)
    if kind == "all equal":
        return torch.full_like(s, -0.0)
    if kind == "zeros of both signs":
        return torch.where(chance < 0.5, 0.0, -0.0)
    if kind == "far apart":
        return s.pow(9) * 1e20
    if kind == "NaN":
        return torch.where(chance < 0.1, math.nan, torch.where(chance < 0.15, -math.nan, s))
    if kind == "one group":
        # a bound from groups is far too low
        return torch.where(torch.arange(n) % max(1, n // 8) == 0, 9 + chance, s)
    if kind == "few":
        # of each row another share is there
        return torch.where(chance < torch.linspace(0, 0.5, rows)[:, None], s, -math.inf)
    if kind == "lowest":
        # in fp16 it is infinite
        return torch.where(chance < 0.5, torch.finfo(torch.bfloat16).min, -math.inf)
    if kind == "special":
        s[:, ::3], s[::3, 1::3], s[1::3, 1::3], s[2::3] = math.inf, math.nan, -math.inf, -math.inf
    elif kind == "in one place":
        s[:, n // 3 : n // 3 + k + 2] += 9
    elif kind == "no sample sees them" and n:
        shape = plan.of_selection(3, n, max(1, min(k, n)), 4, 4)
        if isinstance(shape, plan.Pivot):
            s[:, sampled(n, shape.groups, shape.group)] -= 20
    return s
