"""weighted_sum beyond its contract: only the work that is asked for, launches, dtypes, offsets beyond 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import call, close, float64, gradients
from onepass import weighted_sum
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample
from onepass.ops.weighted_sum.definition import definition


@pytest.mark.parametrize(("rows", "dim", "vectors"), [(64, 64, 2), (100, 200, 3), (130, 512, 16)])
def test_sixteen_bit_vectors(device: str, rows: int, dim: int, vectors: int) -> None:
    """Wide enough for the tensor cores' kernel, in whole tiles and not: products are exact, sums are fp32."""
    x = torch.randn(rows, dim, device=device, dtype=torch.float16)
    weight = torch.randn(vectors, dim, device=device, dtype=torch.float16)
    exact = x.double() @ weight.double().mT
    y = weighted_sum(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5 * dim)
    assert torch.equal(weighted_sum(x, weight), weighted_sum(x, weight))


def test_x_is_not_read_when_only_its_own_gradient_is_wanted() -> None:
    """The memory of x is given back before backward: reading one element would be an error or a crash."""
    for x in (torch.randn(6, 10), torch.randn(10, 6).t()):
        weight = torch.randn(10)
        x.requires_grad_()
        y = weighted_sum(x, weight)
        x.untyped_storage().resize_(0)
        (dx,) = torch.autograd.grad(y, x, torch.ones(6))
        torch.testing.assert_close(dx, weight.expand(6, 10))


def test_the_gradient_of_x_is_not_made_when_only_the_weight_wants_one() -> None:
    x, weight = torch.randn(1000, 500), torch.randn(500, requires_grad=True)
    y = weighted_sum(x, weight)
    with _Written(x) as written:
        torch.autograd.grad(y, weight, torch.ones(1000))
    assert x.numel() not in written.sizes
    assert weight.numel() in written.sizes


class _Written(TorchDispatchMode):
    """Element counts of every tensor that an operation returned in memory other than x's."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.storage = x.untyped_storage().data_ptr()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (t for t in tree_leaves(out) if isinstance(t, Tensor))
        self.sizes.update(t.numel() for t in tensors if t.untyped_storage().data_ptr() != self.storage)
        return out


class TestLaunch:
    """The launch formulas."""

    @pytest.fixture(autouse=True)
    def _kernels(self) -> None:
        pytest.importorskip("triton")

    @given(st.integers(1, 1 << 22), st.integers(1, 1 << 21), st.sampled_from([1, 2, 4, 8]), st.integers(1, 16))
    def test_tiles_are_powers_of_two_and_waste_little(self, rows: int, cols: int, vector: int, vectors: int) -> None:
        from onepass.ops.weighted_sum import kernels as k

        block_r, block_c, warps = k._forward_tile(cols, vector, vectors)
        tiles = [(block_r, block_c, warps, vector)]
        unroll, block_r, block_c, _, warps = k._backward_tile(rows, cols, vector, vectors, False)
        assert unroll * block_r * block_c <= 8 * warps * 32 * vector
        tiles.append((block_r, block_c, warps, min(vector, 4) if vectors > 4 else vector))
        _, block_r, block_c, _, warps = k._backward_tile(rows, cols, vector, 1, True)
        tiles.append((block_r, block_c, warps, vector))
        for block_r, block_c, warps, width in tiles:
            assert all(v > 0 and v & (v - 1) == 0 for v in (block_r, block_c, warps))
            if cols > 8 * width:
                assert -(-cols // block_c) * block_c < 1.07 * (cols + 8 * width)
            # one thread never holds more than eight vectors of x
            assert block_r * block_c <= 8 * warps * 32 * width

    def test_widths_that_16_does_not_divide_keep_wide_loads(self) -> None:
        from onepass.ops.weighted_sum.kernels import _unit

        assert _unit(3000, 3000) == 8
        assert _unit(100, 100) == 4
        assert _unit(33, 33) == 1
        assert _unit(64, 100) == 4
        assert _unit(64, 0) == 16


def test_a_float64_weight_has_float64_sums(device: str) -> None:
    """The result says float64, so kernels, which add up in fp32, must leave it to torch; whatever x's layout."""
    for x in (torch.randn(40, 70, device=device), torch.randn(70, 40, device=device).mT):
        x.requires_grad_()
        weight = torch.randn(3, 70, device=device, dtype=torch.float64, requires_grad=True)
        y, exact = weighted_sum(x, weight), x.double() @ weight.mT
        torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
        dy = torch.randn_like(exact)
        (dx, dw), expected = (torch.autograd.grad(out, (x, weight), dy) for out in (y, exact))
        torch.testing.assert_close(dw, expected[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dx, expected[0])


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_output_has_the_promoted_dtype(x_dtype: torch.dtype, w_dtype: torch.dtype, device: str) -> None:
    if INTERPRET and torch.bfloat16 in (x_dtype, w_dtype):
        pytest.skip("the interpreter does not emulate bfloat16 faithfully")
    x = torch.randn(4, 9, device=device, dtype=x_dtype, requires_grad=True)
    w = torch.randn(9, device=device, dtype=w_dtype, requires_grad=True)
    y = weighted_sum(x, w)
    assert y.dtype == torch.promote_types(x_dtype, w_dtype)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (dx.dtype, dw.dtype) == (x_dtype, w_dtype)


def test_row_offsets_are_64_bit(device: str) -> None:
    """Rows 2^20 elements apart, 2050 of them: the last offsets don't fit 32 bits (untouched pages cost no memory)."""
    rows, stride = 2050, 2**20
    x = torch.empty(rows * stride, dtype=torch.float16, device=device).as_strided((rows, 8), (stride, 1))
    x.copy_(torch.randn(rows, 8))
    sample = Sample("rows far apart", (x, torch.randn(8, device=device)))
    calls = ((weighted_sum, sample), (definition, float64(sample)))
    found, exact = ([*call(fn, given), *gradients(fn, given).values()] for fn, given in calls)
    for name, a, e in zip(("y", "dx", "dw"), found, exact, strict=True):
        # one rounding of the result, and fp32 sums
        limit = max(torch.finfo(a.dtype).eps, 1e-4)
        close(a, e, limit, limit, name)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    x = torch.empty(2**21 + 1, 1024, device="cuda", dtype=torch.float16)
    if torch.cuda.mem_get_info()[0] < 3 * x.numel() * 2:
        pytest.skip("not enough memory")
    x.fill_(0)
    x[-1] = 1
    w = torch.ones(1024, device="cuda", dtype=torch.float16, requires_grad=True)
    y = weighted_sum(x.requires_grad_(), w)
    assert y[-1].item() == 1024
    assert not y[:-1].any()
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert (dw == 1).all()
    assert (dx[-1] == 1).all()
