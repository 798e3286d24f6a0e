"""`compat.colt5_attention`: the original's functions, names and arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import onepass
from onepass.compat import colt5_attention as ours

theirs = pytest.importorskip("colt5_attention")
their_descent = pytest.importorskip("colt5_attention.coor_descent").coor_descent
their_topk = pytest.importorskip("colt5_attention.topk").topk


def _names(fn: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(fn).parameters.values()]


def test_everything_that_it_exports_is_here_or_in_contrib() -> None:
    exported = {name for name, value in vars(theirs).items() if name[0] != "_" and not inspect.ismodule(value)}
    modules = {name for name in exported if inspect.isclass(getattr(theirs, name))}
    assert len(modules) == 8
    assert exported - modules < set(ours.__all__)
    for name in modules:
        with pytest.raises(ImportError, match=f"has no {name}: use `from contrib.colt5 import {name}` in a checkout"):
            exec(f"from onepass.compat.colt5_attention import {name}")
    assert not hasattr(ours, "coor_decent")
    with pytest.raises(AttributeError, match="no attribute 'coor_decent'; it has TopkReturn, "):
        _ = ours.coor_decent  # type: ignore[attr-defined]


def test_signatures_are_the_originals() -> None:
    assert _names(ours.coor_descent) == _names(their_descent)
    assert _names(ours.topk) == _names(their_topk)
    assert _names(ours.triton_coor_descent) == [*_names(their_descent), ("checkpoint_segments", 1)]
    assert ours.TopkReturn._fields == ("values", "indices", "coor_descent_values", "gates")


def test_coor_descent_passes_all_on() -> None:
    """tests/ops/coor_descent compares with the original."""
    s, mask = torch.randn(3, 40, dtype=torch.float64), torch.rand(3, 40) > 0.3
    options = {"n_iters": 20, "eps": 0.3, "eps_init": 4.0, "eps_decay": 0.7}
    expected = onepass.coor_descent(s, k=5.5, mask=mask, **options)
    assert torch.equal(ours.coor_descent(s, k=5.5, mask=mask, **options), expected)
    assert torch.equal(ours.triton_coor_descent(s, k=5.5, mask=mask, **options, checkpoint_segments=4), expected)


def test_topk_agrees_where_the_original_is_right() -> None:
    """Positive scores, no mask: selection, gates and their gradients are the original's."""
    s = (torch.rand(3, 30, dtype=torch.float64) + 0.5).requires_grad_()
    a, b = ours.topk(s, 4, eps=0.3), their_topk(s, 4, eps=0.3)
    assert torch.equal(a.indices, b.indices)
    gy = torch.randn(3, 4, dtype=torch.float64)
    for name in ("values", "coor_descent_values", "gates"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(a.gates, s, gy), torch.autograd.grad(b.gates, s, gy), rtol=1e-7, atol=1e-8
    )


def test_topk_never_selects_masked_entries() -> None:
    s = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    mask = torch.tensor([[False, True, False, True]])
    assert their_topk(s, 2, mask=mask).indices.tolist() == [[0, 1]]
    top = ours.topk(s, 3, mask=mask)
    assert top.indices.tolist() == [[1, 3, -1]]
    assert top.values.tolist() == [[4.0, 2.0, float("-inf")]]
    assert top.gates is not None
    assert top.gates.tolist() == [[1.0, 1.0, 0.0]]


def test_topk_not_differentiable() -> None:
    top = ours.topk(torch.tensor([3.0, 1.0, 2.0]), 2, non_differentiable=True)
    assert top.values.tolist() == [3.0, 2.0]
    assert top.coor_descent_values is None
    assert top.gates is None


@pytest.mark.parametrize(("kwargs", "match"), [
    ({"k": 0}, "k must be ≥ 1, got 0"),
    ({"k": "2"}, "k must be an int, got str"),
    ({"k": 2, "coor_descent_k_ratio": 0.5}, "coor_descent_k_ratio must be ≥ 1, got 0.5"),
    ({"k": 2, "coor_descent_k_ratio": "2"}, "coor_descent_k_ratio must be a number > 0, got str"),
])  # fmt: skip
def test_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        ours.topk(torch.randn(2, 5), **kwargs)
