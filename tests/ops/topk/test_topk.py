"""topk beyond its contract: gradients, the k-th value, nothing to choose, vmap, refusals. test_ranges selects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import onepass
from onepass.nn import CausalRouter


@pytest.mark.parametrize("k", [1, 7, 20])
def test_kth_value(k: int) -> None:
    """The k-th of a sort, within ranges and of a NaN too, compiled, under vmap, with the gradient of one score."""
    s = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    assert torch.equal(onepass.kth_value(s, k), s.sort(-1, descending=True).values[:, k - 1])
    (ds,) = torch.autograd.grad(onepass.kth_value(s, k).sum(), s)
    assert torch.equal(ds, (s == onepass.kth_value(s, k)[:, None]).double())
    start, lengths = torch.tensor([0, 5, 9]), torch.tensor(9)
    for row, first in zip(s, start.tolist(), strict=True):
        expected = -math.inf if k > 9 else row[first : first + 9].sort(descending=True).values[k - 1]
        for given in (row, row.detach()):
            assert onepass.kth_value(given, k, start=torch.tensor(first), lengths=lengths) == expected
    compiled = torch.compile(onepass.kth_value, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(s, k, start=start, lengths=lengths), onepass.kth_value(s, k, start=start, lengths=lengths)
    )
    assert torch.equal(torch.vmap(lambda row: onepass.kth_value(row, k))(s), onepass.kth_value(s, k))
    s.data[1, 3] = math.nan
    assert onepass.kth_value(s.detach(), 1).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(("n", "k"), [(4, 0), (0, 2), (0, 0)])
@pytest.mark.parametrize("name", ["values", "gates"])
def test_backward_runs_where_nothing_is_chosen(n: int, k: int, name: str) -> None:
    s = torch.full((3, n), torch.nan, requires_grad=True)
    top = onepass.topk(s, k, pad=True)
    assert getattr(top, name).shape == top.indices.shape == (3, k)
    assert bool((top.values == -torch.inf).all())
    assert not top.gates.any()
    getattr(top, name).sum().backward()
    assert s.grad is not None
    assert not s.grad.any()
    assert not onepass.topk(s.detach(), k, pad=True).values.requires_grad


@pytest.mark.parametrize(("n", "k"), [(5, 0), (0, 2)])
def test_backward_runs_where_a_causal_router_chooses_nothing(n: int, k: int) -> None:
    x = torch.randn(2, n, 8, requires_grad=True)
    router = CausalRouter(8)
    out = router(x, k)
    assert out.indices.dtype == torch.int64
    out.gates.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


@pytest.mark.parametrize(("n", "k"), [(300, 7), (300, 300), (5000, 5000)])
def test_results_may_be_written_over_their_scores(n: int, k: int) -> None:
    # kernels that write here would change what others still read
    memory = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    expected = onepass.topk(memory.clone(), k)
    indices = torch.empty(1, k, dtype=torch.int64)
    top = onepass.topk(memory, k, out=(memory[:, :k], indices))
    assert torch.equal(top.values, expected.values)
    assert torch.equal(indices, expected.indices)
    assert torch.equal(memory[:, :k], expected.values)


S = torch.zeros(2, 5)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": 0, "mask": torch.ones(2).bool()}, ValueError, r"mask must broadcast .*\(2, 5\), got \(2,\)"),
    ({"dim": 0, "out": (torch.ones(5, 1), torch.ones(1, 5))}, ValueError, r"out's values must have .*\(1, 5\), got"),
    ({"call": onepass.kth_value, "scores": torch.ones(())}, ValueError, "scores must have at least one dimension"),
    ({"scores": torch.ones(3).long()}, TypeError, r"scores must be .*int64; pass scores.float\(\)"),
    ({"scores": S.to_sparse()}, TypeError, "scores must be dense, got torch.sparse_coo"),
    ({"k": torch.ones(())}, TypeError, r"k must be an int, got Tensor; pass int\(k\)"),
    ({"k": True}, TypeError, "k must be an int, got bool"),
    ({"mask": torch.ones(5)}, TypeError, "mask must be bool"),
    ({"start": 1}, TypeError, r"start must be a tensor, got int; pass torch.tensor\(start\)"),
    ({"lengths": torch.ones(2)}, TypeError, "lengths must be int32 or int64, got torch.float32; pass lengths.int"),
    ({"lengths": torch.ones(3).int()}, ValueError, r"lengths must broadcast to .*\(2,\), got \(3,\)"),
    ({"lengths": torch.tensor(-1)}, ValueError, "lengths must be from 0 to the row's length 5, got -1"),
    ({"start": torch.tensor([0, 6])}, ValueError, "start must be from 0 to the row's length 5, got 6"),
    ({"start": torch.tensor([0, 3]), "lengths": torch.tensor(3)}, ValueError, r"start \+ lengths must be .* 5, got 6"),
    ({"index_dtype": torch.int16}, TypeError, "index_dtype must be torch.int32 or torch.int64"),
    ({"ties": "lowest"}, ValueError, "ties must be 'first' or 'last', got 'lowest'"),
    ({"sorted": 1}, TypeError, "sorted must be a bool, got int"),
    ({"largest": None}, TypeError, "largest must be a bool, got NoneType"),
    ({"out": torch.ones(2, 1)}, TypeError, "out must be a tuple of two tensors"),
    ({"out": (torch.ones(2, 1), torch.ones(2, 1))}, TypeError, "out's indices must be torch.int64, .*index_dtype="),
    ({"out": (torch.ones(2), torch.ones(2, 1).long())}, ValueError, r"out's values must have the shape \(2, 1\)"),
    ({"call": onepass.kth_value, "k": 0}, ValueError, "k must be ≥ 1, got 0"),
    ({"call": onepass.kth_value, "k": 6}, ValueError, "k must be at most the row's length 5, got 6"),
    ({"call": onepass.kth_value, "lengths": torch.tensor(9)}, ValueError, "lengths must be from 0 to .* 5, got 9"),
]


@pytest.mark.parametrize(("given", "error", "match"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    """Beside the contract's bad calls."""
    call, scores, k = (given.get(name, usual) for name, usual in (("call", onepass.topk), ("scores", S), ("k", 1)))
    options = {name: value for name, value in given.items() if name not in ("call", "scores", "k")}
    with pytest.raises(error, match=f"{call.__name__}: .*{match}"):
        call(scores, k, **options)
