"""topk against a stable sort: launch shapes, ties, masks, special scores, the k-th value, no choice, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onepass
from onepass.nn import CausalRouter
from onepass.ops.topk import plan
from onepass.ops.topk.op import choose
from topk_plans import expected

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


GPU = [pytest.param("cuda", n, k, marks=pytest.mark.gpu)
       for n, k in ((1000, 1003), (8192, 700), (20000, 9000), (100003, 300), (100003, 50000))]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "n", "k"), [("cpu", 30, 5), ("cpu", 6, 9), ("cpu", 700, 40), *GPU])
def test_fused_gates(device: str, n: int, k: int, dtype: torch.dtype, hard: bool) -> None:
    """Against their parts: values, gates, gradients through both."""
    s = torch.randn(3, n, device=device).to(dtype).requires_grad_()
    eps = torch.tensor(0.7, device=device, requires_grad=True)
    mask = torch.rand(3, n, device=device) > 0.3
    top = choose(s, k, eps, mask, "sigmoid", hard)
    present = top.indices >= 0
    soft = onepass.soft_topk(s, k, eps=eps, mask=mask, kind="sigmoid").gather(-1, top.indices.clamp(min=0))
    expected = torch.where(present, 1 + (soft - soft.detach()) if hard else soft, 0.0)
    assert torch.equal(top.gates, expected)
    values = torch.where(present, s.gather(-1, top.indices.clamp(min=0)), -math.inf)
    assert torch.equal(top.values, values)
    gy, gv = torch.randn(2, 3, k, device=device).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for parts in (slice(2), slice(1), slice(1, 2)):  # gates and values, gates, values, which have none of eps
        inputs = (s,) if parts.start else (s, eps)
        actual, theirs = (
            torch.autograd.grad(outs[parts], inputs, (gy, gv)[parts], retain_graph=True)
            for outs in ((top.gates, top.values), (expected, values))
        )
        torch.testing.assert_close(actual, theirs, rtol=tolerance, atol=tolerance)


LENGTHS = (1, 2, 31, 511, 513, 1024, 32767, plan.MAX_COLS, plan.MAX_COLS + 1, 20000, 100003, 1 << 20, 1 << 24)


@given(rows=st.integers(1, 5000), n=st.sampled_from(LENGTHS) | st.integers(1, 1 << 21), part=st.floats(0, 1))
def test_the_launch_formula_covers_a_row(rows: int, n: int, part: float) -> None:
    for k in sorted({1, min(n, 2048), max(1, round(part * n)), n // 2 + 1, n}):
        for itemsize in (2, 4):
            shape = plan.of_selection(rows, n, k, itemsize, 132)
            if isinstance(shape, plan.Narrow):
                assert n <= shape.block_c <= plan.NARROW
                assert k <= shape.block_k
            elif isinstance(shape, plan.Wide):
                assert k <= min(shape.groups, shape.room)
                assert shape.again % (shape.groups * shape.group) == 0
                assert shape.warps in (1, 2, 4, 8, 16, 32)
            elif isinstance(shape, plan.Whole):
                assert n <= shape.block_c <= max(plan.MAX_COLS, plan.MAX_BYTES_OF_MANY // itemsize)
                assert k <= shape.block_k
                assert shape.warps in (1, 2, 4, 8, 16, 32)
            else:
                assert shape.splits * shape.tiles * plan.TILE >= n
                assert (shape.splits - 1) * shape.tiles * plan.TILE < n
                # Triton takes powers of two alone
                assert {shape.sample_warps, plan.TILE_WARPS, shape.choose_warps} <= {1, 2, 4, 8, 16, 32}
                assert shape.groups * shape.group <= plan.SAMPLE
                assert plan.TILE == 32 * shape.vector * shape.parts <= 128 * shape.vector  # 8 bits count a part
                assert k <= shape.capacity <= max(n + 15, 2 * k + 8192, n if k > plan.MAX_SORTED else 0)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, n = 140000, 16384
    s = torch.randn(1, n, device="cuda", dtype=torch.bfloat16).expand(rows, n).contiguous()
    indices = onepass.topk(s, 40).indices
    assert torch.equal(indices[:1], expected(s[:1], 40)[1])
    assert torch.equal(indices[-1], indices[0])
    assert torch.equal(indices[rows // 2], indices[0])


def test_columns_beyond_16_bits_on_a_cpu() -> None:
    """Rows of equal scores, and between them one of none."""
    n = (1 << 16) + 9
    s = torch.arange(n).repeat(4, 1).float()
    s[::3] = 0
    s[0, 5], s[3, n - 6] = 1.0, 2.0
    distinct = [n - 1, n - 2, n - 3]
    assert onepass.topk(s, 3).indices.tolist() == [[5, 0, 1], distinct, distinct, [n - 6, 0, 1]]
    assert onepass.topk(s[0].bfloat16(), 3).indices.tolist() == [5, 0, 1]


@pytest.mark.parametrize("ties", ["first", "last"])
def test_ranges_that_the_host_does_not_see_are_cut_to_the_row(ties: str) -> None:
    def select(s: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return onepass.topk(s, len(s), **dict(zip(("start", "lengths"), given, strict=False)), ties=ties).indices >= 0

    place, start = torch.arange(8), torch.tensor([-(1 << 63), -(1 << 62) - 5, -(1 << 62), -1])
    ends = torch.vmap(select)(torch.randn(8, 8), place - 39, torch.full((8,), 40)).sum(-1)
    assert torch.equal(ends, place + 1)
    assert torch.vmap(select)(torch.randn(4, 4), start).all()
    most = torch.tensor([1 << 62, 1 << 62, 1 << 62, 3])
    assert torch.vmap(select)(torch.randn(4, 4), start, most).sum(-1).tolist() == [0, 0, 0, 2]


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
        for s_row in (row, row.detach()):
            assert onepass.kth_value(s_row, k, start=torch.tensor(first), lengths=lengths) == expected
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
    x, router = torch.randn(2, n, 8, requires_grad=True), CausalRouter(8)
    out = router(x, k)
    assert out.indices.dtype == torch.int64
    out.gates.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


S = torch.zeros(2, 5)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": 0, "mask": torch.ones(2).bool()}, ValueError, r"mask must broadcast .*\(2, 5\), got \(2,\)"),
    ({"out": (S, S)}, TypeError, r"there is no out=; write values.copy_\(top.values\)"),
    ({"call": onepass.kth_value, "scores": torch.ones(())}, ValueError, "scores must have at least one dimension"),
    ({"scores": torch.ones(3).long()}, TypeError, r"scores must be .*int64; pass scores.float\(\)"),
    ({"scores": S.to_sparse()}, TypeError, "scores must be dense, got torch.sparse_coo"),
    ({"mask": S.bool().to_sparse()}, TypeError, "mask must be dense, got torch.sparse_coo"),
    ({"scores": torch.nested.nested_tensor([S])}, TypeError, r"scores must be dense, got a nested .*to_padded_tensor"),
    ({"k": torch.ones(())}, TypeError, r"k must be an int, got Tensor; pass int\(k\)"),
    ({"k": True}, TypeError, "k must be an int, got bool"),
    ({"mask": torch.ones(5)}, TypeError, "mask must be bool.* of an additive mask of 0 and -inf, pass mask == 0"),
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
    ({"call": onepass.soft_topk, "dim": True}, ValueError, "dim must be an int from -2 to 1, got True"),
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
