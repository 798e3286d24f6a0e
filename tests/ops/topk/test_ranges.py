"""topk's options against a sort in Python: largest, sorted, start, lengths, index_dtype, out; branches of kernels."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.topk import definition
from topk_plans import KINDS, expected, of_any_bits, rows_of, same, shrink

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def compare(s: Tensor, k: int, index_dtype: torch.dtype = torch.int64, **options: Any) -> None:
    """Check every output."""
    s = of_any_bits(s)
    with torch.device("meta" if s.device.type == "cpu" and not INTERPRET else s.device):
        top = onepass.topk(s, k, pad=True, index_dtype=index_dtype, **options)
    values, indices = expected(s, k, **options)
    assert torch.equal(top.indices, indices.to(index_dtype)), (top.indices, indices)
    assert same(top.values, values)
    assert top.indices.is_contiguous()
    assert top.values.is_contiguous()
    chosen = indices >= 0
    ones = torch.where(values.isnan().any(-1, keepdim=True), math.nan, 1.0) if k else torch.ones((), device=s.device)
    assert same(top.gates, torch.where(chosen, ones, 0.0).to(s.dtype))
    assert torch.equal(top.counts.long(), chosen.sum(-1))


# whose choices are as likely as each other: Hypothesis's own favour no rows, no columns and the first of a list
@settings(max_examples=24 if INTERPRET else 400)
@given(st.randoms(use_true_random=True))
def test_every_option(draw: Random) -> None:
    """Under the interpreter small sizes lead through all kernels; a pivot without margin misses often.

    On a CPU rows are done apart, or so many numbers at once; blocks of 4 columns, numbers of 32 bits or 64, a heap.
    """
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    rows, n, k = draw.randint(0, 4 if INTERPRET else 9), draw.randint(0, 130), draw.randint(0, 90)
    way = draw.choice(["narrow", "wide", "whole", "long"])
    with pytest.MonkeyPatch.context() as patch:
        shrink(
            patch, SIGMAS=draw.choice([0.0, 1.0]), MAX_COLS=128 if way == "whole" else 16, MAX_SORTED=32,
            NARROW=512 if way == "narrow" else 0, WIDE=1 if way == "wide" else 1 << 40,
        )  # fmt: skip
        spare = [definition.SPARE, {dtype: 2 * dtype.itemsize + 1 for dtype in DTYPES}]
        sizes = {"AT_ONCE": [1, 50, 1000], "OF_HEAP": [1, 1000], "SPARE": spare, "LEAST": [1, 1 << 30]}
        for name, values in (sizes | {"BLOCK": [4], "WORTH": [1], "LEAST_COLUMNS": [0]}).items():
            patch.setattr(definition, name, draw.choice(values))
        s = rows_of(draw.choice(KINDS), rows, n, generator, k).to(draw.choice(DTYPES[:2] if INTERPRET else DTYPES))
        options: dict[str, Any] = {name: draw.choice([True, False]) for name in ("largest", "sorted")}
        options["ties"] = draw.choice(["first", "first", "last"])
        ranged = draw.choice(["", "start", "lengths", "both"])
        most = n
        if ranged in ("start", "both"):
            options["start"] = torch.randint(0, n + 1, (rows,), generator=generator)
            most -= max(options["start"].tolist(), default=0)
        if ranged in ("lengths", "both"):
            options["lengths"] = torch.randint(0, most + 1, (rows,), generator=generator, dtype=torch.int32)
        if draw.random() < 0.5:
            options["mask"] = torch.rand(rows, n, generator=generator) > 0.3
        compare(s, k, draw.choice([torch.int32, torch.int64]), **options)
        if 0 < k <= n:
            ranges = {name: t for name, t in options.items() if name in ("start", "lengths")}
            assert same(onepass.kth_value(s, k, **ranges) + 0.0, expected(s, k, **ranges)[0][..., -1] + 0.0)


@pytest.mark.interpret
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_long_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program per row or several, a margin that holds or none: two of four in turn, each of either."""
    turn = KINDS.index(kind) % 2
    for many, sigmas in ((1000, float(turn)), (0, 1.0 - turn)):
        shrink(monkeypatch, SIGMAS=sigmas, MANY=many)
        s = rows_of(kind, 3, 210, torch.Generator().manual_seed(1), 20)
        compare(s, 20, sorted=many > 0)


@pytest.mark.interpret
@pytest.mark.parametrize("many", [0, 1000])
@pytest.mark.parametrize(("cols", "dtype"), [(8192, torch.float32), (1024, torch.bfloat16), (16, torch.bfloat16)])
def test_the_sort_of_survivors(cols: int, dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows and few, from whole rows and from long ones: zeros of both signs, NaN, plateaus, large numbers."""
    shrink(monkeypatch, MANY=many, MAX_COLS=cols, MAX_SORTED=1024)
    s = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))
    s[0, :3] = torch.tensor([math.nan, 3e38, -3e38])
    s[1] = s[1].relu() * torch.tensor([1.0, -1.0]).repeat(350)
    s[2], s[2, ::90] = (s[2] * 2).round(), math.nan
    compare(s.to(dtype), 520)
    compare(s.to(dtype), 600, index_dtype=torch.int32, largest=False, sorted=many > 0)


@pytest.mark.interpret
@pytest.mark.parametrize(("n", "k"), [(16, 16), (33, 5)])
def test_narrow_rows(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 scores that differ in few bits, or in none, and scores of 16 bits."""
    shrink(monkeypatch, NARROW=512)
    s = 1 + torch.randint(0, 9, (5, n), generator=torch.Generator().manual_seed(2)) * 2.0**-23
    for scores in (s, -s, s.bfloat16(), torch.where(s > 1 + 2.0**-21, s, -math.inf)):
        for best_first in (True, False):
            compare(scores, k, sorted=best_first)


@pytest.mark.interpret
@pytest.mark.parametrize("kind", ["normal", "a third equal", "all equal", "few", "one group"])
def test_wide_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima below a bound, a plateau of maxima, rows with fewer scores than k, a group that holds all of the best."""
    shrink(monkeypatch, WIDE=1)
    s = rows_of(kind, 3, 700, torch.Generator().manual_seed(1))
    if kind == "one group":
        # the same place in every chunk of 32
        s[:, 4::32] += 20
        s[:, 5::32] += 30
    compare(s, 3, sorted=False)
    compare(s.bfloat16(), 20)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("kind", "k", "ways"),
    [("normal", 20, []), ("a third equal", 30, ["equals"]), ("all equal", 60, ["equals"]), ("few", 40, []),
     ("no sample sees them", 5, ["exact", "row"])],
)  # fmt: skip
def test_what_follows_a_pivot(kind: str, k: int, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of row takes the way that the README gives: none, the equals of the pivot, the row again."""
    from onepass.ops.topk import kernels_pivot

    taken: list[str] = []
    exact, collect = kernels_pivot.exact_threshold, kernels_pivot.collect

    def note_exact(*args: Any) -> Any:
        taken.append("exact")
        return exact(*args)

    def note_collect(*args: Any) -> Any:
        # the argument ABOVE
        taken.append("row" if args[6] else "equals")
        return collect(*args)

    shrink(monkeypatch, SAMPLE=64)
    monkeypatch.setattr(kernels_pivot, "exact_threshold", note_exact)
    monkeypatch.setattr(kernels_pivot, "collect", note_collect)
    s = rows_of(kind, 3, 210, torch.Generator().manual_seed(3), k)
    compare(s, k)
    assert taken == ways * 3


@pytest.mark.parametrize("ties", ["first", "last"])
def test_gradients_within_ranges(ties: str, largest: bool, is_sorted: bool) -> None:
    """As with a mask of the same entries; the smallest are the largest of the negated scores, the last the first."""
    s = torch.randint(-3, 4, (3, 20)).double().requires_grad_()
    eps = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    start, lengths = torch.tensor([0, 3, 8]), torch.tensor([20, 9, 2])
    columns = torch.arange(20)
    mask = (columns >= start[:, None]) & (columns < (start + lengths)[:, None])
    g_values, g_gates = torch.randn(2, 3, 20, dtype=torch.float64)

    def gradients(top: Any, turned: bool) -> tuple[Tensor, ...]:
        """Each column has an upstream gradient of its own, wherever it stands."""
        there, column = top.indices >= 0, (19 - top.indices if turned else top.indices).clamp(0, 19)
        pairs = (top.values, g_values), (top.gates, g_gates)
        total = torch.stack([torch.where(there, t * g.gather(-1, column), 0.0).sum() for t, g in pairs]).sum()
        return torch.autograd.grad(total, (s, eps))

    options = {"largest": largest, "sorted": is_sorted, "ties": ties}
    ours = gradients(onepass.topk(s, 5, start=start, lengths=lengths, eps=eps, **options), False)
    last = ties == "last"
    turned = [t.flip(-1) if last else t for t in (s if largest else -s, mask)]
    flipped = onepass.topk(turned[0], 5, mask=turned[1], eps=eps)
    theirs = gradients(flipped if largest else flipped._replace(values=-flipped.values), last)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_hard_gates_are_not_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only backward needs soft_topk's solution."""
    from onepass.ops.topk import op

    solved = []
    solve = op.soft_forward
    monkeypatch.setattr(op, "soft_forward", lambda *args: solved.append(1) or solve(*args))
    s = torch.randn(3, 9, requires_grad=True)
    top = onepass.topk(s, 4)
    assert not solved
    top.values.sum().backward(retain_graph=True)
    assert not solved
    top.gates.sum().backward()
    assert len(solved) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 70001, 700), (600, 40000, 300), (3, 200000, 9000), (3, 5000, 300)])
def test_every_option_on_gpu(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Whatever the values, in every order, within ranges that reach past the row."""
    for kind in KINDS:
        s = rows_of(kind, 3, n, torch.Generator().manual_seed(0), k).to(dtype).cuda()
        s = s.repeat(rows // 3, 1)
        n_rows = len(s)
        first = torch.randint(-9, n // 2, (n_rows,), device="cuda")
        count = torch.randint(-5, n, (n_rows,), device="cuda", dtype=torch.int32)
        for largest in (True, False):
            for best_first in (True, False):
                ours = onepass.topk(s, k, largest=largest, sorted=best_first)
                compare(s[:3], k, largest=largest, sorted=best_first)
                assert torch.equal(ours.indices[:3], onepass.topk(s[:3], k, largest=largest, sorted=best_first).indices)
                assert torch.equal(ours.indices, ours.indices[:3].repeat(n_rows // 3, 1))
        compare(s[:3], k, start=first[:3], lengths=count[:3], sorted=False)
        whole = onepass.topk(s, k, start=first, lengths=count)
        assert torch.equal(whole.indices[:3], onepass.topk(s[:3], k, start=first[:3], lengths=count[:3]).indices)


# a test per k, so that several processes share what kernels take to compile
@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [
    (n, k) for n in (1, 2, 17, 63, 500, 1000, 8192, 16385, 32768, 32769, 100003, 1 << 20)
    for k in sorted({1, min(n, 100), n // 16 + 1, min(n, 4096), n // 2 + 1, *((n, n + 7) if n < 5000 else ())})
])  # fmt: skip
def test_kernels_on_gpu(n: int, k: int) -> None:
    mask = torch.rand(4, n, device="cuda") > 0.4
    for i, kind in enumerate(KINDS):
        s = rows_of(kind, 4, n, torch.Generator().manual_seed(0), k).cuda()
        for dtype in DTYPES[:3]:
            compare(s.to(dtype), k, mask=mask if i % 2 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3000, 70000])
def test_graphs_on_gpu(n: int) -> None:
    s, lengths = torch.randn(5, n, device="cuda"), torch.full((5,), n, device="cuda")

    def call() -> onepass.TopK:
        return onepass.topk(s, 40, lengths=lengths, index_dtype=torch.int32)

    for _ in range(4):
        call()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top = call()
    for end in (n, 50, 3):
        s.normal_()
        lengths.fill_(end)
        graph.replay()
        values, indices = expected(s, 40, lengths=lengths)
        assert torch.equal(top.indices.long(), indices)
        assert torch.equal(top.values, values)
