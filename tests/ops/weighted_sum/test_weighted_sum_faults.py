"""Faults of CS336's "weighted sum" exercise beyond the contract: the dtype of the result, offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from harness import call, close, float64, gradients
from onepass import weighted_sum
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample
from onepass.ops.weighted_sum.definition import definition

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
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
