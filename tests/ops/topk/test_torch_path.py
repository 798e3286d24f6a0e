"""Long rows on a CPU against a stable sort in float64; test_ranges leads small ones through every way."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass.core.launch import INTERPRET
from topk_plans import KINDS, expected, rows_of, same

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels select there")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(33, 1024, 64), (1, 20000, 1250), (2, 17001, 700), (70, 1030, 9), (300, 64, 2)]
)
def test_long_rows(rows: int, n: int, k: int, kind: str) -> None:
    s = rows_of(kind, rows, n, torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        for best_first in (True, False):
            top = onepass.topk(s.to(dtype), k, sorted=best_first)
            values, indices = expected(s.to(dtype), k, best_first=best_first)
            assert torch.equal(top.indices, indices)
            assert same(top.values, values)
