"""The faults of CS336's "weighted sum" exercise, each as a test of ours.

Misspelt API calls, `x.shape[-1, ]` used as a number and a main guard that never runs show in any call at all: the
public function runs, forward and backward, in every test below.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass import weighted_sum
from onepass.core.launch import INTERPRET

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def _check(x: Tensor, weight: Tensor) -> None:
    """Forward and both gradients against float64 autograd of the definition."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = weighted_sum(x, weight)
    dy = torch.randn(y.shape, dtype=torch.float64).to(y)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    x64, w64 = (t.detach().double().cpu().requires_grad_() for t in (x, weight))
    y64 = x64 @ w64 if weight.dim() == 1 else x64 @ w64.mT
    dx64, dw64 = torch.autograd.grad(y64, (x64, w64), dy.double().cpu())
    for ours, theirs in ((y, y64), (dx, dx64), (dw, dw64)):
        # one rounding of the result, and fp32 sums
        limit = max(torch.finfo(ours.dtype).eps, 1e-4)
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=limit, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
class TestFaults:
    @pytest.mark.parametrize("dim", [1, 2, 7, 15])
    def test_a_tile_of_a_sixteenth_of_the_width_is_zero_below_sixteen_columns(self, dim: int, device: str) -> None:
        _check(torch.randn(5, dim, device=device), torch.randn(dim, device=device))

    # the pointers must advance by the column tile: the second and third tile of a row must be the right ones
    @pytest.mark.parametrize("dim", [129, 1024, 2500])
    def test_pointers_advance_by_the_column_tile(self, dim: int, device: str) -> None:
        _check(torch.randn(3, dim, device=device), torch.randn(dim, device=device))

    @pytest.mark.parametrize("rows", [1, 127, 129, 300])
    def test_the_last_row_tile_may_be_partial(self, rows: int, device: str) -> None:
        _check(torch.randn(rows, 20, device=device), torch.randn(20, device=device))

    @pytest.mark.parametrize("shape", [(9,), (2, 9), (2, 3, 9), (2, 3, 2, 9)])
    def test_backward_takes_any_number_of_dimensions(self, shape: tuple[int, ...], device: str) -> None:
        _check(torch.randn(shape, device=device), torch.randn(9, device=device))

    @pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("w_dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_the_output_has_the_promoted_dtype(self, x_dtype: torch.dtype, w_dtype: torch.dtype, device: str) -> None:
        if INTERPRET and torch.bfloat16 in (x_dtype, w_dtype):
            pytest.skip("the interpreter does not emulate bfloat16 faithfully")
        x = torch.randn(4, 9, device=device, dtype=x_dtype, requires_grad=True)
        w = torch.randn(9, device=device, dtype=w_dtype, requires_grad=True)
        y = weighted_sum(x, w)
        assert y.dtype == torch.promote_types(x_dtype, w_dtype)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert (dx.dtype, dw.dtype) == (x_dtype, w_dtype)

    # contiguity is handled, not asserted
    @pytest.mark.parametrize("layout", ["transposed", "column step", "row step", "expanded", "offset by one"])
    def test_any_strides(self, layout: str, device: str) -> None:
        base = torch.randn(12, 24, device=device)
        x = {
            "transposed": base.t(),
            "column step": base[:, ::2],
            "row step": base[::3],
            "expanded": base[:1].expand(6, 24),
            "offset by one": base[:, 1:],
        }[layout]
        _check(x, torch.randn(2 * x.shape[1], device=device)[::2])

    def test_a_single_upstream_number_is_spread_over_all_rows(self, device: str) -> None:
        x = torch.randn(4, 9, device=device, requires_grad=True)
        w = torch.randn(9, device=device)
        weighted_sum(x, w).sum().backward()
        torch.testing.assert_close(x.grad, w.expand(4, 9))


@pytest.mark.parametrize("device", DEVICES)
def test_row_offsets_are_64_bit(device: str) -> None:
    """Rows 2^20 elements apart, 2050 of them: the last offsets don't fit 32 bits (untouched pages cost no memory)."""
    rows, stride = 2050, 2**20
    x = torch.empty(rows * stride, dtype=torch.float16, device=device).as_strided((rows, 8), (stride, 1))
    x.copy_(torch.randn(rows, 8))
    _check(x, torch.randn(8, device=device))


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
