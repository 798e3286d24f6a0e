"""int8 momenta in the kernels: convert codes to numbers and back, as storage.py defines them.

With PTX, NVIDIA's assembly, a few instructions convert four elements at a time. AMD and the interpreter use plain
Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onepass.ops._shared.kernels_memory import load

# a code means (|code| / 127)^4 of the scale; kernels raise code / 256, which is exact, and multiply the scale by LEVELS
LEVELS = tl.constexpr((256 / 127) ** 4)

# byte y = code + 128 becomes part of the float with bits 0x4343yy43, 195 + y/256 + a constant; subtracting the float of
# y = 128 leaves code / 256. y = 0, the code of nan, sets the upper bytes to 0xFF: a nan. x·|x|, applied twice, is the
# fourth power with the sign of x
_FROM_CODES = tl.constexpr(
    """{
    .reg .b32 y, upper, w;
    .reg .f32 x, size;
    xor.b32 y, $4, 0x80808080;
    and.b32 upper, y, 0x7f7f7f7f;
    add.u32 upper, upper, 0x7f7f7f7f;
    or.b32 upper, upper, y;
    not.b32 upper, upper;
    and.b32 upper, upper, 0x80808080;
    shr.u32 upper, upper, 7;
    mad.lo.u32 upper, upper, 0xbc, 0x43434343;
    """
    + "".join(
        f"""prmt.b32 w, y, upper, {selector};
    mov.b32 x, w;
    sub.f32 x, x, 0f43438043;
    abs.f32 size, x;
    mul.f32 x, x, size;
    abs.f32 size, x;
    mul.f32 ${i}, x, size;
    """
        for i, selector in enumerate(("0x4404", "0x5515", "0x6626", "0x7737"))
    )
    + "}"
)

# the float 1.5·2^23 + 127 − 127·root has 127 − code in its lowest byte, and XOR with 0x7F gives code. A nan has 0xFF
# there, which gives −128
_TO_CODES = tl.constexpr(
    """{
    .reg .f32 root;
    .reg .b32 c0, c1, c2, c3;
    """
    + "".join(
        f"""abs.f32 root, ${1 + i};
    mul.f32 root, root, ${5 + i};
    min.NaN.f32 root, root, 0f3f800000;
    sqrt.approx.ftz.f32 root, root;
    sqrt.approx.ftz.f32 root, root;
    copysign.f32 root, ${1 + i}, root;
    fma.rn.f32 root, root, 0fc2fe0000, 0f4b40007f;
    mov.b32 c{i}, root;
    """
        for i in range(4)
    )
    + """prmt.b32 c0, c0, c1, 0x0040;
    prmt.b32 c2, c2, c3, 0x0040;
    prmt.b32 c0, c0, c2, 0x5410;
    xor.b32 $0, c0, 0x7f7f7f7f;
    }"""
)


@triton.jit
def from_codes(code, PTX: tl.constexpr):
    """Return (code / 256)^4 in fp32 with the sign of the int8 code; −128 gives nan."""
    if PTX:
        return tl.inline_asm_elementwise(_FROM_CODES, "=f,=f,=f,=f,r", [code], tl.float32, True, 4)
    x = code.to(tl.float32) * (1.0 / 256.0)
    x = x * tl.abs(x)
    return tl.where(code == -128, float("nan"), x * tl.abs(x))


@triton.jit
def to_codes(x, inverse, PTX: tl.constexpr):
    """Return the int8 codes of fp32 x, from the reciprocals of their scales."""
    if PTX:
        return tl.inline_asm_elementwise(_TO_CODES, "=r,f,f,f,f,f,f,f,f", [x, inverse], tl.int8, True, 4)
    share = tl.minimum(tl.abs(x) * inverse, 1.0)
    code = (tl.sqrt(tl.sqrt(share)) * 127.0 + 0.5).to(tl.int32)
    code = tl.where(x < 0, -code, code)
    return tl.where(x == x, code, -128).to(tl.int8)


@triton.jit
def per_element(value, BLOCK: tl.constexpr):
    """Repeat each of (BLOCK / 256,) values 256 times: (BLOCK,)."""
    return tl.reshape(tl.broadcast_to(value[:, None], (BLOCK // 256, 256)), (BLOCK,))


@triton.jit
def load_codes(
    code,  # (BLOCK,) int8
    s_ptr,  # (⌈n / 256⌉,) fp32
    offset, n, beta1, beta2, MASKED: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return β1·m and β2·m in fp32; β1 and β2 are multiplied into the scales, once per 256 elements."""
    which = offset // 256 + tl.arange(0, BLOCK // 256)
    scale = load(s_ptr, which, which * 256 < n, MASKED) * LEVELS
    level = from_codes(code, PTX)
    return level * per_element(scale * beta1, BLOCK), level * per_element(scale * beta2, BLOCK)


@triton.jit
def store_scales(x, s_ptr, offset, n, MASKED: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """Store a scale, the largest |x| without nans, per 256 elements; return the reciprocals, one per element."""
    COUNT: tl.constexpr = BLOCK // 256
    # a thread takes the maximum of its eight elements as floats, which ignores nan; the warp takes it of their bits as
    # integers, which is one instruction
    largest = tl.max(tl.abs(tl.reshape(x, (COUNT, 32, 8))), 2)
    largest = tl.where(largest == largest, largest, 0.0).to(tl.int32, bitcast=True)
    largest = tl.max(largest, 1).to(tl.float32, bitcast=True)
    bounded = tl.minimum(tl.maximum(largest, 2.0**-120), 2.0**120)
    scale = tl.where(largest > 0, bounded, 0.0)
    address = s_ptr + offset // 256 + tl.arange(0, COUNT)
    if PTX:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [bounded], tl.float32, True, 1)
    else:
        inverse = 1.0 / bounded
    if PTX and not MASKED:
        # tl.store would first move the few scales to other threads, through shared memory and a barrier
        tl.inline_asm_elementwise(
            "st.global.f32 [$1], $2; mov.b32 $0, 0;", "=r,l,f", [address.to(tl.int64), scale], tl.int32, False, 1
        )
    else:
        tl.store(address, scale, mask=(offset // 256 + tl.arange(0, COUNT)) * 256 < n)
    return per_element(inverse, BLOCK)
