"""The ways of a CPU to select, each against a stable sort in float64."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.topk import definition
from topk_plans import KINDS, expected, rows_of, same

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels select there")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


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
    s = rows_of(kind, rows, n, torch.Generator().manual_seed(seed)).to(dtype)
    k = 1 + round(share * (n - 1))
    ways: list[Any] = [definition._from_rows, definition._anywhere]
    if dtype != torch.float64:
        ways.append(definition._by_number)
    for way in ways:
        check(way(s, k, best_first), s, k, best_first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(33, 1024, 64), (1, 20000, 1250), (2, 17001, 700), (70, 1030, 9), (300, 64, 2)]
)
def test_long_rows(rows: int, n: int, k: int, kind: str) -> None:
    s = rows_of(kind, rows, n, torch.Generator().manual_seed(0))
    for dtype in DTYPES[:2]:
        for best_first in (True, False):
            top = onepass.topk(s.to(dtype), k, sorted=best_first)
            check((top.values, top.indices), s.to(dtype), k, best_first)
