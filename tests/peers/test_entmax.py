"""entmax's own tests of gates that sum to a budget, and of masks by -inf, with `soft_topk` in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass

tests = pytest.importorskip("entmax.test_root_finding")
pytestmark = pytest.mark.peer


def budget_bisect(x: Tensor, budget: Tensor | float = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """`entmax.budget_bisect`: a clamp of width 1. A budget of 0 is for no gates, which `soft_topk` refuses."""
    if isinstance(budget, Tensor) and budget.dim():
        budget = budget.squeeze(dim)
    return onepass.soft_topk(x, budget, dim=dim, eps=1.0, kind="clamp")


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests, "budget_bisect", budget_bisect)
    # the gradient of `entmax_bisect` has a parameter of its own kind; ours are a budget per row
    monkeypatch.setattr(tests, "entmax_bisect", lambda x, alpha, dim=-1: budget_bisect(x, alpha, dim))
    monkeypatch.setattr(tests, "normmax_bisect", budget_bisect)


# a budget of each row, and rows along any dimension
DIMS = [(name, d) for name in ("test_arbitrary_dimension", "test_arbitrary_dimension_grad") for d in range(4)]
CALLS = ["test_budget", "test_budget_grad_multiple_k", *(("test_budget_grad", k) for k in range(1, 7)), *DIMS]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_theirs(call: str | tuple[str, int]) -> None:
    name, *args = [call] if isinstance(call, str) else call
    getattr(tests, str(name))(*args)


@pytest.mark.parametrize("kind", ["capped_exp", "sigmoid", "laplace", "clamp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    masks: Any = pytest.importorskip("entmax.test_mask")
    masks.test_mask(lambda x: onepass.soft_topk(x, 2, kind=kind), dtype)
