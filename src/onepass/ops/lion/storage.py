"""Store parameters and momenta in few bits: the conversions of the kernels, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import join, split

# what is stored beside a 16-bit parameter; MODE of the kernels
NONE, REMAINDER = 0, 1

# elements of an int8 momentum that share a scale, in the order of memory
INT8_BLOCK = 256
# range of the scales: their reciprocals are normal numbers
INT8_SCALES = (2.0**-120, 2.0**120)
INT8_NAN = -128


def widen(p: Tensor, extra: Tensor | None, mode: int, dtype: torch.dtype) -> Tensor:
    """Return the full-precision parameter; p itself if it already is."""
    if mode == REMAINDER and extra is not None:
        return join(p, extra).to(dtype)
    return p.to(dtype)


def narrow_(p: Tensor, extra: Tensor | None, mode: int, value: Tensor) -> None:
    """Round the full-precision parameter and store it in p and extra."""
    if mode == REMAINDER and extra is not None:
        # a float64 gradient or momentum makes value float64, but the pair holds an fp32 number
        high, low = split(value.float())
        p.copy_(high)
        extra.copy_(low)
        return
    if value is not p:
        p.copy_(value)


def scales_for(n: int) -> int:
    """Return the number of int8 scales of a tensor of n elements."""
    return -(-n // INT8_BLOCK)


def _vector(t: Tensor) -> Tensor:
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of int8 codes and fp32 scales per block of memory, with the strides of the codes."""
    flat = _vector(codes)
    x = flat.float() * (1 / 127)
    square = x * x
    value = (square * square).copysign(x) * scales.repeat_interleave(INT8_BLOCK)[: flat.numel()]
    value.masked_fill_(flat == INT8_NAN, float("nan"))
    if codes.is_contiguous():
        return value.view(codes.shape)
    return value.as_strided(codes.shape, codes.stride())


def quantize_(value: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write fp32 values as codes and scales: code = round(127·(|x| / scale)^¼) with the sign of x, scale = max |x|.

    The fourth root spreads the codes over 8.4 decades; the largest are 3 % apart. Lion uses the sign of a momentum, so
    elements much smaller than the largest of their block need a code too. Zero is exact. Multiplying all values by a
    power of two leaves the codes unchanged.
    """
    laid_out = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    laid_out.copy_(value)
    n = codes.numel()
    padded = torch.zeros(len(scales) * INT8_BLOCK, dtype=torch.float32, device=codes.device)
    padded[:n] = _vector(laid_out)
    blocks = padded.view(-1, INT8_BLOCK)
    largest = blocks.nan_to_num(0.0, float("inf"), float("-inf")).abs().amax(1)
    scale = torch.where(largest > 0, largest.clamp(*INT8_SCALES), torch.zeros_like(largest))
    share = (blocks.abs() * torch.where(scale > 0, 1 / scale, scale)[:, None]).clamp(max=1.0)
    code = (share.sqrt().sqrt() * 127 + 0.5).floor().copysign(blocks)
    code = torch.where(blocks.isnan(), torch.full_like(code, INT8_NAN), code)
    _vector(codes).copy_(code.view(-1)[:n])
    scales.copy_(scale)
