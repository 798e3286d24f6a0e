"""topk at its edges: nothing to choose, another default device, results written over their scores."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass.core.launch import INTERPRET
from onepass.nn import CausalRouter

SHAPES = [((8,), 3), ((3, 50), 4), ((64, 1024), 64), ((2, 20_000), 300)]


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


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "k"), SHAPES[: 2 if INTERPRET else 4])
def test_the_default_device_changes_nothing(
    shape: tuple[int, ...], k: int, dtype: torch.dtype, is_sorted: bool
) -> None:
    s = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(4).round().to(dtype)
    lengths = torch.tensor([shape[-1] // 2, shape[-1]])[torch.arange(len(s)) % 2] if s.dim() > 1 else None
    expected = onepass.topk(s, k, sorted=is_sorted), onepass.topk(s, k, sorted=is_sorted, lengths=lengths)
    with torch.device("meta"):
        found = onepass.topk(s, k, sorted=is_sorted), onepass.topk(s, k, sorted=is_sorted, lengths=lengths)
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(a, b, strict=True))


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
