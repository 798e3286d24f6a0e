"""Store parameters and momenta in few bits: the conversions of the kernels, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import join, split

# what is stored beside a 16-bit parameter; MODE of the kernels
NONE, REMAINDER, KAHAN, STOCHASTIC = 0, 1, 2, 3

# elements of an int8 momentum that share a scale, in the order of memory
INT8_BLOCK = 256
# range of the scales: their reciprocals are normal numbers
INT8_SCALES = (2.0**-120, 2.0**120)
INT8_NAN = -128

_MASK = 0xFFFFFFFF


def widen(p: Tensor, extra: Tensor | None, mode: int, dtype: torch.dtype) -> Tensor:
    """Return the full-precision parameter; p itself if it already is."""
    if mode == REMAINDER and extra is not None:
        return join(p, extra)
    if mode == KAHAN and extra is not None:
        return p.to(dtype) + extra.to(dtype)
    return p.to(dtype)


def narrow_(p: Tensor, extra: Tensor | None, mode: int, value: Tensor) -> None:
    """Round the full-precision parameter and store it in p and extra."""
    if mode == REMAINDER and extra is not None:
        # a float64 gradient or momentum makes value float64, but the pair holds an fp32 number
        high, low = split(value.float())
        p.copy_(high)
        extra.copy_(low)
        return
    if mode == STOCHASTIC and extra is not None:
        noise = in_memory_order(random_bits(extra, p.numel()), p)
        p.copy_(round_stochastically(value.float(), noise, p.dtype))
        return
    if value is not p:
        p.copy_(value)
    if mode == KAHAN and extra is not None:
        lost = value - p.to(value.dtype)
        # an infinite weight needs no compensation: inf − inf would turn it into nan
        extra.copy_(torch.where(lost.isfinite(), lost, torch.zeros_like(lost)))


def in_memory_order(values: Tensor, like: Tensor) -> Tensor:
    """Return vector `values` in the shape of `like`, in the order of its memory if dense, else of its indices."""
    if like.is_contiguous():
        return values.view(like.shape)
    dense = torch.empty_like(like, dtype=values.dtype, memory_format=torch.preserve_format)
    if dense.stride() != like.stride():
        return values.view(like.shape)
    dense.as_strided((like.numel(),), (1,)).copy_(values)
    return dense


def _mix(x: Tensor) -> Tensor:
    """Return a 32-bit hash (two multiplications, three shifts) of numbers held in int64."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def random_bits(stream: Tensor, n: int) -> Tensor:
    """Return (n,) random 16-bit numbers of one step of one tensor, the same as in the kernel.

    They depend only on the stream's word and the element's place in memory, not on the order of updates or on the
    tensors of a launch.
    """
    low, high = stream & _MASK, (stream >> 32) & _MASK
    key0 = _mix(low ^ _mix(high))
    key1 = _mix((key0 + low) & _MASK)
    places = torch.arange(n, device=stream.device)
    x = (places & _MASK) ^ _mix(key0 ^ (places >> 32))
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = (x ^ (x >> 15)) + key1
    x = ((x & _MASK) * 0x846CA68B) & _MASK
    return x >> 16


def round_stochastically(x: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to bf16 or fp16, away from zero with the probability of the cut-off part; noise: 16 uniform bits."""
    drop = 16 if dtype == torch.bfloat16 else 13
    cut = noise & ((1 << drop) - 1)
    bits = (x.view(torch.int32) + cut.to(torch.int32)) & -(1 << drop)
    rounded = bits.view(torch.float32)
    if dtype == torch.float16:
        # below the smallest normal number the spacing is 2^-24 for every exponent
        small = (x.abs() * 2.0**24 + noise.float() * 2.0**-16).floor() * 2.0**-24
        rounded = torch.where(x.abs() < 2.0**-14, small.copysign(x), rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


def stream_word(seed: int, index: int) -> int:
    """Return the first word of a parameter's random stream: 62 well-mixed bits; each step adds one."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 2


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


__all__ = ["KAHAN", "NONE", "REMAINDER", "STOCHASTIC", "dequantize", "narrow_", "quantize_", "widen"]
