"""What the tests of topk share: a stable sort, and launch shapes by which small rows take the ways of large ones."""

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
        "MAX_COLS": 16, "MAX_BYTES_OF_MANY": 16, "SCAN": 16, "TILE": 32, "TILE_WARPS": 1, "SAMPLE": 32, "SECTOR": 16,
        "SIGMAS": 1.0, "ALONE": 32, "MAX_SORTED": 64, **sizes,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(plan, name, value)


def expected(
    s: Tensor, k: int, largest: bool = True, best_first: bool = True, start: Tensor | None = None,
    lengths: Tensor | None = None, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values and indices by a stable sort in float64, which has NaN first; -1 and an infinity where nothing is left."""
    n, columns = s.shape[-1], torch.arange(s.shape[-1], device=s.device)
    first = torch.zeros((), dtype=torch.int64, device=s.device) if start is None else start.long()
    count = torch.full_like(first, n) if lengths is None else lengths.clamp(min=0)
    inside = (columns >= first[..., None]) & (columns < (first + count)[..., None])
    wide = (s if largest else -s).double().masked_fill(~(inside if mask is None else inside & mask), -math.inf)
    # every NaN alike, whatever its sign
    sorted_, indices = wide.masked_fill(wide.isnan(), math.nan).sort(dim=-1, descending=True, stable=True)
    indices = indices.masked_fill(sorted_ == -math.inf, n)[..., :k]
    indices = indices if best_first else indices.sort(-1).values
    indices = torch.nn.functional.pad(indices, (0, k - indices.shape[-1]), value=n)
    missing = -math.inf if largest else math.inf
    values = torch.nn.functional.pad(s, (0, 1), value=missing).gather(-1, indices)
    return values, indices.masked_fill(indices == n, -1)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits but for NaN, which are alike; the sign of a zero counts."""
    nan = a.isnan()
    return a.dtype == b.dtype and bool((((a == b) & (a.signbit() == b.signbit())) | (nan & b.isnan())).all())
