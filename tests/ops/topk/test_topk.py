"""topk: hard selection, ties, masks, padding, straight-through gradients, the dispatcher's own checks."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.topk import reference
from onepass.ops.topk.op import choose

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@settings(max_examples=25 if INTERPRET else 80)
@given(st.integers(0, 2**20), st.integers(1, 40), st.integers(0, 45), st.booleans(), st.booleans())
def test_selection_is_a_stable_sort(seed: int, n: int, k: int, ties: bool, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(3, n, generator=generator)
    s = (2 * s).round() if ties else s
    mask = torch.rand(3, n, generator=generator) > 0.4 if masked else None
    top = onepass.topk(s, k, mask=mask, pad=True)
    assert top.values.shape == top.indices.shape == top.gates.shape == (3, k)
    assert top.indices.dtype == torch.int64
    for row in range(3):
        allowed = [i for i in range(n) if mask is None or mask[row, i]]
        expected = sorted(allowed, key=lambda i: (-s[row, i].item(), i))[:k]
        found = [i for i in top.indices[row].tolist() if i >= 0]
        assert found == expected
        assert top.indices[row, len(found) :].eq(-1).all()
        assert top.values[row, : len(found)].tolist() == [s[row, i].item() for i in expected]
        assert top.values[row, len(found) :].eq(-math.inf).all()
        assert top.counts[row] == len(found)
        assert top.gates[row].tolist() == [1.0] * len(found) + [0.0] * (k - len(found))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_set_is_torchs(dtype: torch.dtype) -> None:
    s = torch.randn(5, 7, 200).to(dtype)
    top = onepass.topk(s, 12)
    expected = s.topk(12)
    assert torch.equal(top.values, expected.values)
    assert top.values.dtype == top.gates.dtype == dtype
    assert torch.equal(s.gather(-1, top.indices), top.values)


@pytest.mark.parametrize("kind", ["capped_exp", "sigmoid", "laplace", "clamp"])
def test_gates_carry_the_gradient_of_soft_topk(kind: str) -> None:
    s = torch.randn(2, 3, 30, dtype=torch.float64, requires_grad=True)
    eps = torch.tensor([[0.7], [1.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.arange(30) % 5 != 2
    gates, values = torch.randn(2, 2, 3, 6, dtype=torch.float64)
    top = onepass.topk(s, 6, eps=eps, mask=mask, kind=kind)
    expected = reference.topk(s, 6, eps=eps, mask=mask, kind=kind)
    assert torch.equal(top.indices, expected[1])
    actual_gradients = torch.autograd.grad((top.gates, top.values), (s, eps), (gates, values))
    expected_gradients = torch.autograd.grad((expected[2], expected[0]), (s, eps), (gates, values))
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("n", "k"), [(700, 40), (33000, 40)])
def test_gradients_are_those_of_a_gather(n: int, k: int) -> None:
    """Of soft_topk's gates and of the scores, at every launch shape; eps has a gradient of its own."""
    s = torch.randn(2, n, requires_grad=True)
    eps = torch.tensor([0.7, 1.1], requires_grad=True)
    mask = torch.rand(2, n) > 0.3
    mask[1, k - 10 :] = False
    top = onepass.topk(s, k, eps=eps, mask=mask)
    here, present = top.indices.clamp(min=0), top.indices >= 0
    soft = torch.where(present, onepass.soft_topk(s, k, eps=eps, mask=mask).gather(-1, here), 0.0)
    values = torch.where(present, s.gather(-1, here), 0.0)
    gates_gradient, values_gradient = torch.randn(2, 2, k)
    pairs = {
        "gates": ((top.gates,), (soft,), (gates_gradient,)),
        "values": ((top.values,), (values,), (values_gradient,)),
        "both": ((top.gates, top.values), (soft, values), (gates_gradient, values_gradient)),
    }
    for wanted, (ours, theirs, gradients) in pairs.items():
        inputs = (s,) if wanted == "values" else (s, eps)
        actual = torch.autograd.grad(ours, inputs, gradients, retain_graph=True)
        expected = torch.autograd.grad(theirs, inputs, gradients, retain_graph=True)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, wanted=wanted: f"{wanted}: {m}"
        )


def test_values_alone_have_the_gradient_of_a_gather() -> None:
    """Without an upstream gradient of the gates, and with an eps that wants none."""
    s, eps, gradient = torch.randn(3, 30, requires_grad=True), torch.tensor([0.3, 0.7, 1.1]), torch.randn(3, 5)
    top = onepass.topk(s, 5, eps=eps, mask=torch.arange(30) % 3 > 0)
    (actual,) = torch.autograd.grad(top.values, s, gradient)
    assert torch.equal(actual, torch.zeros(3, 30).scatter(-1, top.indices, gradient))


def test_selection_is_on_the_scores_not_on_saturated_gates() -> None:
    """With eps this large for these scores many gates would tie at exactly 1."""
    s = torch.tensor([[10.0, 30.0, 20.0, 50.0, 40.0, -90.0]])
    assert onepass.topk(s, 4, eps=0.1).indices.tolist() == [[3, 4, 1, 2]]


def test_masked_entries_are_never_selected() -> None:
    s = torch.tensor([[9.0, 1.0, 8.0, 2.0]])
    mask = torch.tensor([False, True, False, True])
    top = onepass.topk(s, 3, mask=mask)
    assert top.indices.tolist() == [[3, 1, -1]]
    assert top.gates.tolist() == [[1.0, 1.0, 0.0]]
    assert onepass.topk(s, 2, mask=torch.zeros(4, dtype=torch.bool)).indices.tolist() == [[-1, -1]]


@pytest.mark.parametrize("kind", ["capped_exp", "sigmoid"])
def test_soft_gates_of_the_chosen(kind: str) -> None:
    """What a router takes: the gates of soft_topk where it chose, with their gradient."""
    s = torch.randn(3, 20, dtype=torch.float64, requires_grad=True)
    eps = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(20) > torch.tensor([[2], [15], [8]])
    top = choose(s, 6, eps, mask, kind, False)
    soft = onepass.soft_topk(s, 6, eps=eps, mask=mask, kind=kind)
    expected = soft.gather(-1, top.indices.clamp(min=0)) * (top.indices >= 0)
    assert torch.equal(top.gates, expected)
    gy = torch.randn(3, 6, dtype=torch.float64)
    actual = torch.autograd.grad(top.gates, (s, eps), gy)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (s, eps), gy))


def test_padding_sends_no_gradient() -> None:
    s = torch.randn(2, 3, requires_grad=True)
    top = onepass.topk(s, 5, pad=True)
    present = top.indices >= 0
    (ds,) = torch.autograd.grad(top.gates.sum() + top.values[present].sum(), s)
    assert torch.equal(ds, torch.ones(2, 3))


def test_none_and_nothing() -> None:
    assert onepass.topk(torch.randn(3, 4), 0).indices.shape == (3, 0)
    empty = onepass.topk(torch.randn(3, 0), 2, pad=True)
    assert empty.indices.tolist() == [[-1, -1]] * 3
    assert empty.gates.tolist() == [[0.0, 0.0]] * 3
    assert onepass.topk(torch.randn(0, 4), 2).values.shape == (0, 2)


def test_nan_counts_as_largest() -> None:
    s = torch.tensor([1.0, math.nan, 3.0])
    top = onepass.topk(s, 2)
    assert top.indices.tolist() == [1, 2]
    assert top.gates.isnan().all()


def test_infinite_scores() -> None:
    s = torch.tensor([math.inf, 2.0, -math.inf, math.inf])
    top = onepass.topk(s, 4)
    assert top.indices.tolist() == [0, 3, 1, -1]
    assert top.gates.tolist() == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: onepass.topk([1.0], 1), TypeError, "topk: scores must be a tensor, got list"),  # type: ignore[arg-type]
        (lambda: onepass.topk(torch.ones(()), 1), ValueError, "topk: scores must have at least one dimension"),
        (lambda: onepass.topk(torch.ones(3).long(), 1), TypeError, "scores must be .*int64"),
        (lambda: onepass.topk(torch.ones(3), 1.5), TypeError, "topk: k must be an int, got float"),  # type: ignore[arg-type]
        (lambda: onepass.topk(torch.ones(3), torch.ones(())), TypeError, "k must be an int, got Tensor"),  # type: ignore[arg-type]
        (lambda: onepass.topk(torch.ones(3), True), TypeError, "k must be an int, got bool"),
        (lambda: onepass.topk(torch.ones(3), -1), ValueError, "topk: k must be ≥ 0, got -1"),
        (lambda: onepass.topk(torch.ones(3), 1, eps=0.0), ValueError, "topk: eps must be > 0, got 0.0"),
        (lambda: onepass.topk(torch.ones(3), 1, kind="hard"), ValueError, "topk: kind must be one of .*'hard'"),
        (lambda: onepass.topk(torch.ones(3), 1, mask=torch.ones(3)), TypeError, "mask must be bool"),
        (lambda: onepass.topk(torch.ones(3), 1, mask=torch.ones(4) > 0), ValueError, r"\(3,\), got \(4,\)"),
    ],
)
def test_refused(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("mask_dim", [None, 0])
def test_vmap(mask_dim: int | None) -> None:
    s = torch.randn(3, 2, 12)
    mask = torch.rand(3, 12) > 0.3 if mask_dim == 0 else torch.rand(12) > 0.3
    mapped = torch.vmap(lambda s, m: tuple(onepass.topk(s, 4, mask=m)), (0, mask_dim))(s, mask)
    for i in range(3):
        expected = onepass.topk(s[i], 4, mask=mask[i] if mask_dim == 0 else mask)
        for a, e in zip(mapped, expected, strict=True):
            assert torch.equal(a[i], e)


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
        assert onepass.kth_value(row, k, start=torch.tensor(first), lengths=lengths) == expected
    compiled = torch.compile(onepass.kth_value, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(s, k, start=start, lengths=lengths), onepass.kth_value(s, k, start=start, lengths=lengths)
    )
    assert torch.equal(torch.vmap(lambda row: onepass.kth_value(row, k))(s), onepass.kth_value(s, k))
    s.data[1, 3] = math.nan
    assert onepass.kth_value(s, 1).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("k", "lengths", "match"),
    [
        (0, None, "k must be ≥ 1, got 0"),
        (4, None, "k must be at most the row's length 3, got 4"),
        (1, torch.tensor(9), "lengths must be from 0 to the row's length 3, got 9"),
    ],
)
def test_kth_value_refuses(k: int, lengths: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"kth_value: {match}"):
        onepass.kth_value(torch.zeros(2, 3), k, lengths=lengths)
