"""8-bit results inside Triton kernels: scales, and codes of e4m3."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_E4M3 = tl.constexpr(448.0)
# least number that a scale maps to 448: the reciprocal of a smaller scale may leave fp32
LEAST = tl.constexpr(2.0**-40)
SMALLEST_E4M3 = tl.constexpr(2.0**-6)


@triton.jit
def scales_of(largest):
    """Return the fp32 scale that maps e4m3's 448 to the largest number, and its reciprocal."""
    largest = tl.maximum(largest, LEAST)
    most = tl.full(largest.shape, LARGEST_E4M3, tl.float32)
    return tl.div_rn(largest, most), tl.div_rn(most, largest)


@triton.jit
def e4m3_codes(x, dtype: tl.constexpr):
    """Round fp32 to e4m3, to nearest even and at most 448; in uint8 for GPUs without this dtype, with the same bits."""
    if dtype != tl.uint8:
        codes = x.to(dtype)
    else:
        size = tl.minimum(tl.abs(x), LARGEST_E4M3)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # an fp32 number from 2¹⁴ on has steps of 2⁻⁹, as e4m3 has below its normal numbers
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) & 15
        codes = tl.where(x == x, tl.where(size < SMALLEST_E4M3, subnormal, normal), 0x7F)
        codes = (codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return codes
