"""The CPU path: torch's own operator where it is as exact, ours where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import layer_norm, rms_norm
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="kernels run on the CPU")

MANY = 1 << 16  # elements


def _tensors(rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in (torch.randn(rows, cols), torch.randn(cols), torch.randn(cols))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_norm_is_torchs_where_nothing_is_widened(dtype: torch.dtype) -> None:
    x, w, b = _tensors(9, 70, dtype)
    dy = torch.randn(9, 70, dtype=dtype)
    ours, theirs = layer_norm(x, w, b), F.layer_norm(x, (70,), w, b)
    assert torch.equal(ours, theirs)
    for a, e in zip(*(torch.autograd.grad(y, (x, w, b), dy) for y in (ours, theirs)), strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_gradients_are_rounded_once(dtype: torch.dtype, has_mean: bool) -> None:
    """F.layer_norm's dw is 12 % off after 4096 rows of bf16."""
    rows = 1 << 13
    x, w, b = _tensors(rows, 64, dtype)
    dy = (torch.randn(rows, 64) + 0.5).to(dtype)
    x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, w, b))
    if has_mean:
        y, y64, inputs, exact = layer_norm(x, w, b), F.layer_norm(x64, (64,), w64, b64), (x, w, b), (x64, w64, b64)
    else:
        y, y64, inputs, exact = rms_norm(x, w, eps=1e-6), F.rms_norm(x64, (64,), w64, 1e-6), (x, w), (x64, w64)
    limit = torch.finfo(dtype).eps
    actual, expected = (y, *torch.autograd.grad(y, inputs, dy)), (y64, *torch.autograd.grad(y64, exact, dy.double()))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert float((a.double() - e).detach().abs().max()) <= limit * float(e.detach().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "residual", "no weight"])
@pytest.mark.parametrize("n", [1, 3, 51, 1000])
def test_gradients_of_constant_rows_of_any_size(dtype: torch.dtype, form: str, n: int, among: bool) -> None:
    """x − mean is 0: so is y, dx = (g − mean g)/√eps and dw = 0, but for the few rows beside them in one tensor."""
    values = [1e3, -3e4, 6e4] if dtype == torch.float16 else [1e3, -3e4, 1e6, -1e15, 1e18]
    constant = torch.tensor(values).to(dtype)[:, None].expand(len(values), n)
    x = torch.cat((torch.randn(3, n).to(dtype), constant)) if among else constant.clone()
    others = 3 * among
    w = None if form == "no weight" else torch.rand(n).to(dtype).requires_grad_()
    dy = torch.randn(x.shape).to(dtype)
    # a gradient of 16 bits can't hold more than 65504 in fp16: 1/√eps is 100
    r = torch.zeros_like(x) if form == "residual" else None
    y = layer_norm(x.requires_grad_(), w, eps=1e-4, residual=r)
    y = y if r is None else y[0]
    assert not y[others:].any(), "a mean off by an ulp leaves 0.5 of it"
    wanted = (x,) if w is None else (x, w)
    dx, *dw = torch.autograd.grad(y, wanted, dy)
    g = dy.double() * (1 if w is None else w.detach().double())
    exact = 100 * (g - g.mean(-1, keepdim=True))
    # a mean of n, a difference and two products in fp32 or wider, then one rounding
    u = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    limit = 100 * (n + 3) * u * g.abs().amax(-1, keepdim=True) + torch.finfo(dtype).eps * exact.abs()
    assert ((dx.double() - exact).abs() <= limit)[others:].all()
    if dw:
        d = x.detach()[:others].double()
        d = d - d.mean(-1, keepdim=True)
        n64 = d * (d.square().mean(-1, keepdim=True) + 1e-4).rsqrt()
        off = (dw[0].double() - (dy[:others].double() * n64).sum(0)).abs()
        # what torch's kernel takes, up to 2¹⁰ standard deviations from zero, it knows to 2⁻¹⁴
        assert (off <= 2.0**-13 * dy.double().abs().sum(0) + torch.finfo(dtype).eps * 9).all()


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_compiled_results_have_the_strides_of_eager_ones(norm: Any) -> None:
    x, w = torch.randn(3, 4, 16), torch.ones(16)

    def call(x: torch.Tensor) -> Any:
        y, s = norm(x.transpose(0, 1), w, residual=x.transpose(0, 1))
        return norm(x.transpose(0, 1), w).view(-1, 16), y.view(-1, 16), s.view(-1, 16)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(x), call(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [3e14, 1e15, 5e18])
@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_one_column_of_huge_sums(norm, dtype: torch.dtype, size: float, eps: float) -> None:
    """A change of the only column changes nothing; torch multiplies the value by the cube of 1/σ here: ∞ − ∞."""
    residual = torch.tensor([[size], [-size], [1.0]], requires_grad=True)
    x = torch.zeros(3, 1, dtype=dtype, requires_grad=True)
    y, _ = norm(x, eps=eps, residual=residual)
    dy = torch.full_like(y, 6e4)
    dx, dr = torch.autograd.grad(y, (x, residual), dy)
    if norm is layer_norm:
        assert not dx.any()
        assert not dr.any()
        return
    # dy·(1 − n²)·r, where n is known to some ulps
    s = residual.detach().double()
    r = (s.square() + eps).rsqrt()
    exact, limit = 6e4 * eps * r**3, 6e4 * r * 8 * torch.finfo(torch.float32).eps
    for d in (dx, dr):
        assert ((d.double() - exact).abs() <= limit + torch.finfo(d.dtype).tiny).all()
