"""The selection kernels against a stable sort: launch shapes, ties, masks, special scores, padding, CUDA graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import onepass
from onepass.ops.topk import plan
from onepass.ops.topk.op import choose
from topk_plans import expected, shrink

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kinds_of_rows(n: int, device: str) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    normal = torch.randn(4, n, device=device)
    yield "normal", normal, None
    yield "ties", (2 * normal).round(), None
    yield "constant, masked", torch.full_like(normal, 3.0), torch.rand(4, n, device=device) > 0.4
    yield "mask of columns", normal, torch.rand(n, device=device).expand(4, n) > 0.9
    yield "expanded", normal[:1].expand(4, n), None
    yield "strided", torch.randn(4, n + 3, device=device)[:, 1:-2], None
    special = normal.clone()
    special[0, ::3] = math.inf
    special[1, ::2] = -math.inf
    special[2] = 0
    special[2, ::2] = -0.0
    special[3, n // 2] = math.nan
    yield "special", special, None
    yield "nothing but NaN and -inf", torch.where(normal > 0, math.nan, -math.inf), None
    yield "far apart", (1.57 * normal).tan() * 1e30, None
    for dtype in DTYPES[1:]:
        yield str(dtype), normal.to(dtype), None
    for dtype in DTYPES:
        mixed = normal.to(dtype)
        mixed[:, ::5], mixed[:, 1::5], mixed[:, 2::5] = math.inf, _nans(mixed[:, 1::5], dtype), -math.inf
        # the first two rows whole, the others in part
        allowed = (torch.rand(4, n) > 0.4) | (torch.arange(4) < 2)[:, None]
        yield f"NaN, +inf and -inf, {dtype}", mixed[:, torch.randperm(n)], allowed.to(device)


def _nans(like: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN of both signs and several payloads."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    infinity = torch.tensor(math.inf, dtype=dtype).view(bits)
    sign = torch.where(torch.rand(like.shape) < 0.5, torch.iinfo(bits).min, 0).to(bits)
    return (infinity + torch.randint(1, 60, like.shape).to(bits) | sign).view(dtype).to(like.device)


def compare(n: int, k: int, device: str) -> None:
    for name, s, mask in kinds_of_rows(n, device):
        assert torch.equal(onepass.topk(s, k, mask=mask).indices, expected(s, k, mask=mask)[1]), (
            f"{name}, n = {n}, k = {k}"
        )


@pytest.mark.interpret
@pytest.mark.parametrize(
    "sorted_here",
    [pytest.param(True, id="sorted by one program"), pytest.param(False, id="merged runs", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("long", [False, True], ids=["whole rows", "chunks"])
def test_kernels_interpreted(sorted_here: bool, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, MAX_SORTED=64 if sorted_here else 8, MAX_COLS=16 if long else 64)
    n = 95 if long else 40
    for k in (1, 9) if sorted_here else (17, n + 3):
        compare(n, k, "cpu")


def compare_gradients(n: int, k: int, dtype: torch.dtype, hard: bool, device: str) -> None:
    """The fused operator against its parts: values, gates, gradients through both."""
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


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_gates(dtype: torch.dtype, hard: bool) -> None:
    long = [(700, 40), (33000, 40)] if hard and dtype == torch.float32 else []
    for n, k in ((30, 5), (6, 9), *long):
        compare_gradients(n, k, dtype, hard, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k"), [(30, 5), (1000, 1003), (8192, 700), (20000, 9000), (100003, 300), (100003, 50000)]
)
def test_fused_gates_on_gpu(n: int, k: int, dtype: torch.dtype, hard: bool) -> None:
    compare_gradients(n, k, dtype, hard, "cuda")


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
                assert shape.splits * shape.tiles * shape.tile >= n
                assert (shape.splits - 1) * shape.tiles * shape.tile < n
                # Triton takes powers of two alone
                assert {shape.sample_warps, shape.tile_warps, shape.choose_warps} <= {1, 2, 4, 8, 16, 32}
                assert shape.groups * shape.group <= plan.SAMPLE
                assert shape.tile == 32 * shape.vector * shape.parts <= 128 * shape.vector  # 8 bits count a part
                assert k <= shape.capacity <= max(n + 15, 2 * k + 8192, n if k > plan.MAX_SORTED else 0)


# a test per k, so that several processes share what kernels take to compile
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (n, k) for n in (1, 2, 17, 63, 500, 1000, 8192, 16385, 32768, 32769, 100003, 1 << 20)
        for k in sorted({1, min(n, 50), n // 16 + 1, min(n, 4096), n // 2 + 1, *((n, n + 7) if n < 5000 else ())})
    ],
)  # fmt: skip
def test_kernels_on_gpu(n: int, k: int) -> None:
    compare(n, k, "cuda")


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    rows, n = 140000, 16384
    s = torch.randn(1, n, device="cuda", dtype=torch.bfloat16).expand(rows, n).contiguous()
    indices = onepass.topk(s, 40).indices
    assert torch.equal(indices[:1], expected(s[:1], 40)[1])
    assert torch.equal(indices[-1], indices[0])
    assert torch.equal(indices[rows // 2], indices[0])


SPECIAL = (0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 1.0, -1.0)


@pytest.mark.parametrize("best_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_triple_of_special_values(dtype: torch.dtype, best_first: bool) -> None:
    """NaN of either sign before +inf, −0 equal to 0, −inf missing, ties by lowest index."""
    triples = list(itertools.product(SPECIAL, repeat=3))
    found = onepass.topk(torch.tensor(triples, dtype=dtype), 2, sorted=best_first).indices
    for triple, indices in zip(triples, found.tolist(), strict=True):
        order = sorted(range(3), key=lambda i: ((0, 0.0) if math.isnan(triple[i]) else (1, -triple[i]), i))
        expected = [i for i in order[:2] if triple[i] != -math.inf]
        expected = expected if best_first else sorted(expected)
        assert indices == expected + [-1] * (2 - len(expected)), triple


def test_columns_beyond_16_bits_on_a_cpu() -> None:
    s = torch.zeros(2, (1 << 16) + 9, dtype=torch.bfloat16)
    s[0, 5], s[1, (1 << 16) + 3] = 1.0, 2.0
    assert onepass.topk(s, 3).indices.tolist() == [[5, 0, 1], [(1 << 16) + 3, 0, 1]]
