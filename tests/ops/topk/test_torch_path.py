"""The ways of a CPU to select, each against a stable sort in float64."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.topk import torch_path
from topk_plans import expected, same

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels select there")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = (
    "normal", "level at the top", "level within", "all equal", "heavy tail", "few", "nothing", "zeros of both signs",
    "infinite", "NaN", "one group", "lowest",
)  # fmt: skip


def scores(kind: str, rows: int, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(rows, n, generator=generator)
    chance = torch.rand(rows, n, generator=generator)
    if kind == "level at the top":
        return torch.where(chance < 1 / 3, 0.0, -s.abs())
    if kind == "level within":
        return torch.where(chance < 1 / 3, 0.5, s)
    if kind == "all equal":
        return torch.full_like(s, -2.0)
    if kind == "heavy tail":
        return (s.pow(5) * 10).clamp(-6e4, 6e4)
    if kind == "few":
        # of each row another share is there
        return torch.where(chance < torch.linspace(0, 1, rows)[:, None], s, -math.inf)
    if kind == "nothing":
        return torch.full_like(s, -math.inf)
    if kind == "zeros of both signs":
        return torch.where(chance < 0.5, 0.0, -0.0)
    if kind == "infinite":
        return torch.where(chance < 0.2, math.inf, torch.where(chance < 0.5, -math.inf, s))
    if kind == "NaN":
        return torch.where(chance < 0.1, math.nan, torch.where(chance < 0.15, -math.nan, s))
    if kind == "one group":
        # a bound from groups is far too low
        return torch.where(torch.arange(n) % max(1, n // 8) == 0, 9 + chance, s)
    if kind == "lowest":
        return torch.where(chance < 0.5, torch.finfo(torch.bfloat16).min, -math.inf)
    return s


def check(found: tuple[Tensor, ...], s: Tensor, k: int, best_first: bool) -> None:
    values, indices = expected(s, k, best_first=best_first)
    assert found[0].is_contiguous()
    assert found[1].is_contiguous()
    assert torch.equal(found[1], indices), (found[1], indices)
    assert same(found[0], values)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**20), rows=st.integers(1, 5), n=st.integers(1, 90), share=st.floats(0, 1),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), best_first=st.booleans(),
)  # fmt: skip
def test_every_way_is_exact(
    seed: int, rows: int, n: int, share: float, kind: str, dtype: torch.dtype, best_first: bool
) -> None:
    """Every way takes any scores."""
    if kind == "lowest" and dtype == torch.float16:
        kind = "few"
    s = scores(kind, rows, n, seed).to(dtype)
    k = 1 + round(share * (n - 1))
    ways: list[Any] = [torch_path._from_rows, torch_path._anywhere]
    if dtype != torch.float64:
        ways.append(torch_path._by_number)
    for way in ways:
        check(way(s, k, best_first), s, k, best_first)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20), rows=st.integers(0, 4), n=st.integers(0, 40), k=st.integers(0, 50),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), best_first=st.booleans(), ranged=st.booleans(),
    at_once=st.sampled_from([1, 50, 1000]),
)  # fmt: skip
def test_calls(
    seed: int, rows: int, n: int, k: int, kind: str, dtype: torch.dtype, best_first: bool, ranged: bool, at_once: int
) -> None:
    """Rows that are done apart; k above n; ranges."""
    if kind == "lowest" and dtype == torch.float16:
        kind = "few"
    s = scores(kind, rows, n, seed).to(dtype)
    lengths = torch.randint(0, n + 1, (rows,), generator=torch.Generator().manual_seed(seed)) if ranged else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_path, "AT_ONCE", at_once)
        top = onepass.topk(s, k, sorted=best_first, lengths=lengths, pad=True)
    if lengths is not None:
        s = s.masked_fill(torch.arange(n) >= lengths[:, None], -math.inf)
    check((top.values, top.indices), s, k, best_first)


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(33, 1024, 64), (1, 20000, 1250), (2, 17001, 700), (70, 1030, 9), (300, 64, 2)]
)
def test_long_rows(rows: int, n: int, k: int, kind: str) -> None:
    s = scores(kind, rows, n, 0)
    for dtype in DTYPES[:2]:
        for best_first in (True, False):
            top = onepass.topk(s.to(dtype), k, sorted=best_first)
            check((top.values, top.indices), s.to(dtype), k, best_first)


def test_other_layouts() -> None:
    s = scores("level within", 40, 3000, 0)
    for view in (s.t(), s[:, ::2], s[:, ::100], s[:1].expand(40, 3000), s.view(2, 20, 3000)):
        for best_first in (True, False):
            for k in (1, 3, 30):
                top = onepass.topk(view, k, sorted=best_first)
                check((top.values, top.indices), view, k, best_first)
