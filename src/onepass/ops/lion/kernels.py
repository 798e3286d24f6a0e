"""Triton kernels of Lion: the step over a table of tensors, and the norm of their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import INTERPRET, sm_count
from onepass.core.launch import launch as launch_kernel
from onepass.ops._shared.kernels_memory import load, store

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
    blocks = offset // 256 + tl.arange(0, BLOCK // 256)
    scale = load(s_ptr, blocks, blocks * 256 < n, MASKED) * LEVELS
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


@triton.jit
def sign(u):
    """Return −1, 0 or 1, and nan for nan (|nan| > 0 is false): the weight must show it."""
    signed_one = ((u.to(tl.int32, bitcast=True) & -0x80000000) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(u) > 0, signed_one, u)


@triton.jit
def join_bits(high, low):
    """Return the fp32 value with bits high·2^16 + low, from two int16 halves."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bits(x):
    """Return (bf16 bits rounded half up, remainder) of fp32 x, both int16; every nan becomes 0x7FC00000."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    high = (bits + 0x8000) >> 16
    return high.to(tl.int16), (bits - (high << 16)).to(tl.int16)


@triton.jit
def load_momentum(
    m_ptr,  # (n,) momentum, or its int8 codes
    s_ptr,  # (⌈n / 256⌉,) fp32 scales of the codes; unused for other momenta
    offset, n, at, beta1, beta2, M_TYPE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return β1·m and β2·m in fp32."""
    m = load(m_ptr, at, at < n, MASKED)
    if M_TYPE == "i8":
        m1, m2 = load_codes(m, s_ptr, offset, n, beta1, beta2, MASKED, BLOCK, PTX)
    else:
        m1 = m.to(tl.float32) * beta1
        m2 = m.to(tl.float32) * beta2
    return m1, m2


@triton.jit
def agreement(
    g_ptr, m_ptr, s_ptr, offset, n, factor, beta1, rest1, M_TYPE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return 1 where the update has the gradient's sign, else 0; pointers as in `update_tile`."""
    at = offset + tl.arange(0, BLOCK)
    m1, _ = load_momentum(m_ptr, s_ptr, offset, n, at, beta1, beta1, M_TYPE, MASKED, BLOCK, PTX)
    g = load(g_ptr, at, at < n, MASKED).to(tl.float32)
    # take the sign first: the product of two tiny numbers would underflow to 0
    return (sign(tl.fma(g, rest1 * factor, m1)) * (g * factor) > 0).to(tl.int32)


@triton.jit
def update_tile(
    p_ptr,  # (n,) of a tensor's memory: parameter; int16 bits of bf16 when MODE is 1: beside a remainder
    g_ptr,  # (n,) gradient
    m_ptr,  # (n,) momentum, or its int8 codes
    e_ptr,  # (n,) int16 remainder; unused in the other mode
    s_ptr,  # (⌈n / 256⌉,) fp32 scales of the codes; unused for other momenta
    offset, n, factor, lr, wd, beta1, rest1, beta2, rest2, cautious_decay, agreeing, disagreeing,
    M_TYPE: tl.constexpr, MODE: tl.constexpr, CAUTIOUS: tl.constexpr, CAUTIOUS_DECAY: tl.constexpr,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Update one tile in place.

    Every product that is added is an explicit fma, so that all variants of the kernel round alike: bf16 + remainder
    then has the same bits as fp32.
    """
    at = offset + tl.arange(0, BLOCK)
    inside = at < n
    m1, m2 = load_momentum(m_ptr, s_ptr, offset, n, at, beta1, beta2, M_TYPE, MASKED, BLOCK, PTX)
    p = load(p_ptr, at, inside, MASKED)
    g = load(g_ptr, at, inside, MASKED)
    if MODE == 1:
        value = join_bits(p, load(e_ptr, at, inside, MASKED))
    else:
        value = p.to(tl.float32)

    g = g.to(tl.float32)
    s = sign(tl.fma(g, rest1 * factor, m1))
    if CAUTIOUS:
        s = s * tl.where(s * (g * factor) > 0, agreeing, disagreeing)
    decay = wd
    if CAUTIOUS_DECAY:
        # cautious_decay is 0 or 1; 1: decay only weights that the update moves towards zero
        decay = tl.where(s * value > 0, wd, wd * (1.0 - cautious_decay))
    new_value = tl.fma(tl.fma(value, decay, s), -lr, value)
    new_m = tl.fma(g, rest2 * factor, m2)

    if MODE == 1:
        new_p, new_e = split_bits(new_value)
    else:
        new_p = new_value.to(p.dtype)
    if M_TYPE == "i8":
        if MASKED:
            # zeros beyond the end never are the maximum that sets the scale
            new_m = tl.where(inside, new_m, 0.0)
        new_m = to_codes(new_m, store_scales(new_m, s_ptr, offset, n, MASKED, BLOCK, PTX), PTX)
    else:
        new_m = new_m.to(m_ptr.dtype.element_ty)
    store(p_ptr, at, new_p, inside, MASKED)
    store(m_ptr, at, new_m, inside, MASKED)
    if MODE == 1:
        store(e_ptr, at, new_e, inside, MASKED)


@triton.jit
def pointer(word_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address of the table as a pointer; ALIGNED promises the compiler multiples of 16 bytes."""
    word = tl.load(word_ptr)
    if TYPE == "fp32":
        address = word.to(tl.pointer_type(tl.float32))
    elif TYPE == "bf16":
        address = word.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == "fp16":
        address = word.to(tl.pointer_type(tl.float16))
    elif TYPE == "i8":
        address = word.to(tl.pointer_type(tl.int8))
    else:
        address = word.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def find_tensor(first_ptr, coarse_ptr, chunk, n_tensors, SPAN: tl.constexpr):
    """Return the index of the tensor that a chunk belongs to.

    A coarse map gives the tensor at the start of the chunk's span; one load counts the tensors that begin before the
    chunk inside the span.
    """
    begin = tl.load(coarse_ptr + chunk // SPAN)
    ahead = begin + 1 + tl.arange(0, SPAN)
    starts = tl.load(first_ptr + ahead, mask=ahead < n_tensors, other=0x7FFFFFFFFFFF)
    return begin + tl.sum((starts <= chunk).to(tl.int32), 0)


@triton.jit(do_not_specialize=["n_tensors", "n_groups"])
def step_kernel(
    table_ptr,  # int64 words, see table.py: hyperparameters, addresses, sizes, groups, chunks
    scale_ptr,  # () fp32: gradients are this much too large; or None
    clip_ptr,  # () fp32: multiplies gradients; or None
    found_inf_ptr,  # () fp32: non-zero skips the step; or None
    agreed_ptr,  # (n_tensors,) int64: elements whose update agrees with the gradient, of cautious updates; or None
    n_tensors,
    n_groups,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, E_TYPE: tl.constexpr,
    MODE: tl.constexpr, ALIGNED: tl.constexpr, CAUTIOUS_DECAY: tl.constexpr, COUNT: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Update one chunk, TILES·BLOCK elements of one tensor, per program.

    COUNT: count the elements whose update agrees with the gradient, without updating.
    """
    CAUTIOUS: tl.constexpr = agreed_ptr is not None
    if found_inf_ptr is not None:
        if tl.load(found_inf_ptr) != 0:
            return
    chunk = tl.program_id(0)
    address_ptr = table_ptr + n_groups * 5
    size_ptr = address_ptr + n_tensors * 5
    first_ptr = size_ptr + n_tensors * 2
    tensor = find_tensor(first_ptr, first_ptr + n_tensors, chunk, n_tensors, SPAN)

    begin = (chunk - tl.load(first_ptr + tensor)) * (BLOCK * TILES)
    n = tl.load(size_ptr + tensor)
    group = tl.load(size_ptr + n_tensors + tensor)
    g_ptr = pointer(address_ptr + tensor, G_TYPE, ALIGNED)
    p_ptr = pointer(address_ptr + n_tensors + tensor, P_TYPE, ALIGNED)
    m_ptr = pointer(address_ptr + n_tensors * 2 + tensor, M_TYPE, ALIGNED)
    e_ptr = pointer(address_ptr + n_tensors * 3 + tensor, E_TYPE, ALIGNED)
    s_ptr = pointer(address_ptr + n_tensors * 4 + tensor, "fp32", ALIGNED)

    hyper_ptr = table_ptr.to(tl.pointer_type(tl.float32)) + group * 10
    lr = tl.load(hyper_ptr)
    wd = tl.load(hyper_ptr + 1)
    beta1 = tl.load(hyper_ptr + 2)
    rest1 = tl.load(hyper_ptr + 3)
    beta2 = tl.load(hyper_ptr + 4)
    rest2 = tl.load(hyper_ptr + 5)
    factor = tl.load(hyper_ptr + 6)
    cautious_decay = tl.load(hyper_ptr + 7)
    if clip_ptr is not None:
        factor = factor * tl.load(clip_ptr)
    if scale_ptr is not None:
        factor = factor / tl.load(scale_ptr)

    if COUNT:
        agreed = tl.zeros((BLOCK,), tl.int32)
        for tile in range(TILES):
            offset = begin + tile * BLOCK
            if offset + BLOCK <= n:
                agreed += agreement(g_ptr, m_ptr, s_ptr, offset, n, factor, beta1, rest1, M_TYPE, False, BLOCK, PTX)
            elif offset < n:
                agreed += agreement(g_ptr, m_ptr, s_ptr, offset, n, factor, beta1, rest1, M_TYPE, True, BLOCK, PTX)
        # integers: the order of the sum does not matter
        tl.atomic_add(agreed_ptr + tensor, tl.sum(agreed, 0).to(tl.int64), sem="relaxed")
    else:
        agreeing = 1.0
        disagreeing = 0.0
        if CAUTIOUS:
            lowered = tl.load(hyper_ptr + 8)
            share = tl.load(agreed_ptr + tensor).to(tl.float32) / n.to(tl.float32)
            agreeing = 1.0 / tl.maximum(share + (1.0 - share) * lowered, 1e-5)
            disagreeing = lowered * agreeing
        for tile in range(TILES):
            offset = begin + tile * BLOCK
            if offset + BLOCK <= n:
                update_tile(
                    p_ptr, g_ptr, m_ptr, e_ptr, s_ptr, offset, n, factor, lr, wd, beta1, rest1, beta2, rest2,
                    cautious_decay, agreeing, disagreeing, M_TYPE, MODE, CAUTIOUS, CAUTIOUS_DECAY, False, BLOCK, PTX,
                )  # fmt: skip
            elif offset < n:
                update_tile(
                    p_ptr, g_ptr, m_ptr, e_ptr, s_ptr, offset, n, factor, lr, wd, beta1, rest1, beta2, rest2,
                    cautious_decay, agreeing, disagreeing, M_TYPE, MODE, CAUTIOUS, CAUTIOUS_DECAY, True, BLOCK, PTX,
                )  # fmt: skip


@triton.jit(do_not_specialize=["n_tensors", "n_groups", "n_chunks"])
def norm_kernel(
    table_ptr,  # the table of `step_kernel`
    before_ptr,  # () fp32: sum of squares of earlier launches; or None
    partial_ptr,  # (programs,) fp32: partials, one per program
    ticket_ptr,  # () int32, zero before and after
    out_ptr,  # (3, 4) fp32, in the first column: sum of squares so far, its root, clip coefficient
    max_norm_ptr,  # () fp32
    scale_ptr,  # () fp32: gradients are this much too large; or None
    n_tensors,
    n_groups,
    n_chunks,
    G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute the norm of all gradients and the clip coefficient.

    Each program sums a run of chunks. The last one to finish adds the partials in a fixed order, so that the result has
    the same bits each time.
    """
    program = tl.program_id(0)
    address_ptr = table_ptr + n_groups * 5
    size_ptr = address_ptr + n_tensors * 5
    first_ptr = size_ptr + n_tensors * 2
    coarse_ptr = first_ptr + n_tensors
    chunk = (program.to(tl.int64) * n_chunks) // PROGRAMS
    end = ((program + 1).to(tl.int64) * n_chunks) // PROGRAMS
    total = tl.zeros((BLOCK,), tl.float32)
    while chunk < end:
        tensor = find_tensor(first_ptr, coarse_ptr, chunk, n_tensors, SPAN)
        first_chunk = tl.load(first_ptr + tensor)
        n = tl.load(size_ptr + tensor)
        g_ptr = pointer(address_ptr + tensor, G_TYPE, ALIGNED)
        # stop at the end of this program's run or of this tensor
        offset = (chunk - first_chunk) * CHUNK
        stop = tl.minimum((end - first_chunk) * CHUNK, n)
        while offset + BLOCK <= stop:
            g = tl.load(g_ptr + offset + tl.arange(0, BLOCK)).to(tl.float32)
            total += g * g
            offset += BLOCK
        if offset < stop:
            at = offset + tl.arange(0, BLOCK)
            g = tl.load(g_ptr + at, mask=at < stop, other=0.0).to(tl.float32)
            total += g * g
        chunk = first_chunk + (stop + CHUNK - 1) // CHUNK
    tl.store(partial_ptr + program, tl.sum(total, 0))
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == PROGRAMS - 1:
        lane = tl.arange(0, 1024)
        squares = tl.zeros((1024,), tl.float32)
        for start in range(0, PROGRAMS, 1024):
            inside = start + lane < PROGRAMS
            # bypass the L1 cache, which may hold stale partials
            squares += tl.load(partial_ptr + start + lane, mask=inside, other=0.0, cache_modifier=".cg")
        square = tl.sum(squares, 0)
        if before_ptr is not None:
            square += tl.load(before_ptr)
        norm = tl.sqrt(square)
        if scale_ptr is not None:
            norm = norm / tl.load(scale_ptr)
        clip = tl.load(max_norm_ptr) / (norm + 1e-6)
        tl.store(out_ptr, square)
        tl.store(out_ptr + 4, norm)
        # a nan norm must reach the weights, as with torch's clipping
        tl.store(out_ptr + 8, tl.where(clip > 1.0, 1.0, clip))
        tl.store(ticket_ptr, 0)


# inline assembly needs an NVIDIA GPU
PTX = not INTERPRET and torch.version.hip is None

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8"}


def launch(
    of: Any, table: Tensor, n_groups: int, agreed: Tensor | None, grad_scale: Tensor | None, clip: Tensor | None,
    found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Update every tensor of the table that `of`, a `table.Launch`, laid out; the last three are `table.Scalars`.

    agreed: for cautious updates, (tensors,) int64 counters; else None.
    """
    p_type, g_type, m_type = (TYPES[t] for t in of.dtypes)
    e_type = p_type
    if of.remainder:
        p_type = e_type = "i16"
    block, tiles, num_warps = of.shape
    counts = (False,)
    if agreed is not None:
        agreed.zero_()
        counts = (True, False)
    for count in counts:
        launch_kernel(
            step_kernel, (of.n_chunks, 1, 1), (table, grad_scale, clip, found_inf, agreed), (len(of.sizes), n_groups),
            (
                p_type, g_type, m_type, e_type, int(of.remainder), of.aligned, of.cautious_decay, count, of.span, block,
                tiles, PTX,
            ),
            num_warps=num_warps,
        )  # fmt: skip


def norm_programs(table: Tensor) -> int:
    """Return the number of programs of a norm launch: as many as run at once."""
    return 8 * sm_count(table)


def launch_norm(
    of: Any, table: Tensor, n_groups: int, before: Tensor | None, scratch: tuple[Tensor, Tensor], out: Tensor,
    max_norm: Tensor, grad_scale: Tensor | None,
) -> None:  # fmt: skip
    """Write sum of squares, norm and clip coefficient of the gradients of `of`, a `table.Launch`, to `out`.

    `before` is the sum of squares of earlier launches; `scratch` is (partials, ticket), see `norm_kernel`.
    """
    programs = norm_programs(table)
    launch_kernel(
        norm_kernel, (programs, 1, 1), (table, before, *scratch, out, max_norm, grad_scale),
        (len(of.sizes), n_groups, of.n_chunks),
        (TYPES[of.dtypes[1]], of.aligned, of.span, of.chunk, 2048, programs), num_warps=8,
    )  # fmt: skip
