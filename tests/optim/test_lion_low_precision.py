"""Momenta in int8: arithmetic, exactness, what survives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.ops.lion.definition import (
    INT8_BLOCK,
    dequantize,
    quantize_,
    scales_for,
)

BF16 = torch.bfloat16


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.zeros_like(x, dtype=torch.int8, memory_format=torch.preserve_format)
    scales = torch.zeros(scales_for(x.numel()))
    quantize_(x, codes, scales)
    return codes, scales


def test_codes_keep_signs_zeros_and_three_percent() -> None:
    x = torch.randn(5000) * torch.randn(5000).mul(2).exp()
    x[::7] = 0.0
    codes, scales = codes_of(x)
    y = dequantize(codes, scales)
    largest = torch.nn.functional.pad(x.abs(), (0, scales_for(5000) * INT8_BLOCK - 5000)).view(-1, INT8_BLOCK).amax(1)
    assert torch.equal(scales, largest)
    assert torch.equal(y == 0, codes == 0)
    assert bool((y[::7] == 0).all())
    fine = x.abs() > 1e-5 * largest.repeat_interleave(INT8_BLOCK)[:5000]
    # code c covers ((c ± ½)/127)^4
    c = codes.abs().float().clamp_min(1)
    assert bool(((y - x).abs()[fine] <= (x.abs() * ((1 + 0.5 / c) ** 4 - (1 - 0.5 / c) ** 4))[fine]).all())
    assert bool((y.sign() == x.sign())[fine].all())
    top = x.abs() > 0.5 * largest.repeat_interleave(INT8_BLOCK)[:5000]
    assert ((y - x).abs()[top] / x.abs()[top]).max() < 0.02
    again, scales_again = codes_of(y)
    assert torch.equal(again, codes), "what was written must read back as itself"
    assert torch.allclose(scales_again, scales, rtol=1e-6)


@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_codes_are_scale_invariant(exponent: int) -> None:
    x = torch.randn(3000)
    codes, scales = codes_of(x)
    other, other_scales = codes_of(x * 2.0**exponent)
    assert torch.equal(codes, other)
    assert torch.equal(scales * 2.0**exponent, other_scales)


def test_codes_of_special_numbers() -> None:
    inf, nan = float("inf"), float("nan")
    codes, scales = codes_of(torch.tensor([1.0, -inf, nan, 0.0]))
    y = dequantize(codes, scales)
    assert y[1] < -1e36
    assert y[2].isnan()
    assert y[3] == 0
    codes, scales = codes_of(torch.tensor([1.0, nan, -2.0]))
    assert scales == 2.0
    assert dequantize(codes, scales)[2] == -2.0
    assert torch.equal(codes_of(torch.zeros(300))[1], torch.zeros(2))
    y = dequantize(*codes_of(torch.tensor([1e-42, -1e-42])))
    assert torch.equal(y, torch.zeros(2)) or bool((y.sign() == torch.tensor([1.0, -1.0])).all())


def test_codes_follow_strides() -> None:
    x = torch.randn(60, 50).t()
    codes, scales = codes_of(x)
    flat_codes, flat_scales = codes_of(x.t().contiguous())
    assert codes.stride() == x.stride()
    assert torch.equal(codes.t(), flat_codes)
    assert torch.equal(scales, flat_scales)
    assert torch.equal(dequantize(codes, scales).t(), dequantize(flat_codes, flat_scales))
