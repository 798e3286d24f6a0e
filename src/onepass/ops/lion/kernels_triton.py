"""The Triton kernel of the Lion update: one launch over a table of tensors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import OPTIONS, device_guard

from .torch_path import REMAINDER


@triton.jit
def lion_update(p, g, m, lr, wd, beta1, rest1, beta2, rest2, cautious_decay):
    """fp32 in, (p, m) out. Every product that is added is an explicit fma, so that all variants of the kernel round
    alike: that is what makes bf16 + remainder the same bits as fp32.
    """
    u = tl.fma(g, rest1, m * beta1)
    # a nan compares unequal to itself and must reach the weight
    s = tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, tl.where(u == 0, 0.0, u)))
    # cautious_decay is 0 or 1: decay only what the update moves towards zero
    decay = tl.where(s * p > 0, wd, wd * (1.0 - cautious_decay))
    p = tl.fma(tl.fma(p, decay, s), -lr, p)
    m = tl.fma(g, rest2, m * beta2)
    return p, m


@triton.jit
def join_bits(high, low):
    """Upper and lower half (int16, int16) → the fp32 value whose bits are high·2^16 + low."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_bits(x):
    """fp32 → (bf16 bits rounded half up, remainder), both int16; every nan becomes the one that survives rounding."""
    bits = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
    high = (bits + 0x8000) >> 16
    return high.to(tl.int16), (bits - (high << 16)).to(tl.int16)


@triton.jit
def update_tile(
    p_ptr,  # (n,) of a tensor's memory: parameter; int16 bits of bf16 when MODE is REMAINDER
    g_ptr,  # (n,) gradient
    m_ptr,  # (n,) momentum
    e_ptr,  # (n,) int16 remainder or compensation in the parameter's dtype; unused when MODE is NONE
    offset, n, factor, lr, wd, beta1, rest1, beta2, rest2, cautious_decay,
    MODE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = offset + tl.arange(0, BLOCK)
    if MASKED:
        inside = at < n
        p = tl.load(p_ptr + at, mask=inside, other=0)
        g = tl.load(g_ptr + at, mask=inside, other=0)
        m = tl.load(m_ptr + at, mask=inside, other=0)
        if MODE != 0:
            e = tl.load(e_ptr + at, mask=inside, other=0)
    else:
        p = tl.load(p_ptr + at)
        g = tl.load(g_ptr + at)
        m = tl.load(m_ptr + at)
        if MODE != 0:
            e = tl.load(e_ptr + at)
    if MODE == 1:
        value = join_bits(p, e)
    elif MODE == 2:
        value = p.to(tl.float32) + e.to(tl.float32)
    else:
        value = p.to(tl.float32)
    new, new_m = lion_update(
        value, g.to(tl.float32) * factor, m.to(tl.float32), lr, wd, beta1, rest1, beta2, rest2, cautious_decay
    )
    if MODE == 1:
        new_p, new_e = split_bits(new)
    else:
        new_p = new.to(p.dtype)
        if MODE == 2:
            lost = new - new_p.to(tl.float32)
            # an infinite weight has nothing to compensate: inf − inf would turn it into nan
            new_e = tl.where(tl.abs(lost) < float("inf"), lost, 0.0).to(e.dtype)
    new_m = new_m.to(m.dtype)
    if MASKED:
        tl.store(p_ptr + at, new_p, mask=inside)
        tl.store(m_ptr + at, new_m, mask=inside)
        if MODE != 0:
            tl.store(e_ptr + at, new_e, mask=inside)
    else:
        tl.store(p_ptr + at, new_p)
        tl.store(m_ptr + at, new_m)
        if MODE != 0:
            tl.store(e_ptr + at, new_e)


@triton.jit
def pointer(word_ptr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address from the table, with the promise that lets the compiler use 16-byte loads."""
    word = tl.load(word_ptr)
    if TYPE == "fp32":
        address = word.to(tl.pointer_type(tl.float32))
    elif TYPE == "bf16":
        address = word.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == "fp16":
        address = word.to(tl.pointer_type(tl.float16))
    else:
        address = word.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit(do_not_specialize=["n_tensors", "n_groups"])
def step_kernel(
    table_ptr,  # int64 words as table.py lays them out: hyperparameters, addresses, sizes, groups, tiles
    scale_ptr,  # () fp32: gradients are this much too large; any pointer when HAS_SCALE is false
    found_inf_ptr,  # () fp32: non-zero skips the step; any pointer when HAS_FOUND_INF is false
    n_tensors,
    n_groups,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_TYPE: tl.constexpr, E_TYPE: tl.constexpr,
    MODE: tl.constexpr, ALIGNED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one tensor per program."""
    if HAS_FOUND_INF:
        if tl.load(found_inf_ptr) != 0:
            return
    tile = tl.program_id(0)
    address_ptr = table_ptr + n_groups * 4
    size_ptr = address_ptr + n_tensors * 4
    first_tile_ptr = size_ptr + n_tensors * 2

    # a coarse map says where the span of tiles begins; the tensors that begin inside it are counted in one load
    begin = tl.load(first_tile_ptr + n_tensors + tile // SPAN)
    ahead = begin + 1 + tl.arange(0, SPAN)
    starts = tl.load(first_tile_ptr + ahead, mask=ahead < n_tensors, other=0x7FFFFFFF)
    tensor = begin + tl.sum((starts <= tile).to(tl.int32), 0)

    offset = (tile - tl.load(first_tile_ptr + tensor)) * BLOCK
    n = tl.load(size_ptr + tensor)
    group = tl.load(size_ptr + n_tensors + tensor)
    g_ptr = pointer(address_ptr + tensor, G_TYPE, ALIGNED)
    p_ptr = pointer(address_ptr + n_tensors + tensor, P_TYPE, ALIGNED)
    m_ptr = pointer(address_ptr + n_tensors * 2 + tensor, M_TYPE, ALIGNED)
    e_ptr = pointer(address_ptr + n_tensors * 3 + tensor, E_TYPE, ALIGNED)

    hyper_ptr = table_ptr.to(tl.pointer_type(tl.float32)) + group * 8
    lr = tl.load(hyper_ptr)
    wd = tl.load(hyper_ptr + 1)
    beta1 = tl.load(hyper_ptr + 2)
    rest1 = tl.load(hyper_ptr + 3)
    beta2 = tl.load(hyper_ptr + 4)
    rest2 = tl.load(hyper_ptr + 5)
    factor = tl.load(hyper_ptr + 6)
    cautious_decay = tl.load(hyper_ptr + 7)
    if HAS_SCALE:
        factor = factor / tl.load(scale_ptr)

    if offset + BLOCK <= n:
        update_tile(
            p_ptr, g_ptr, m_ptr, e_ptr, offset, n, factor, lr, wd, beta1, rest1, beta2, rest2, cautious_decay,
            MODE, False, BLOCK,
        )  # fmt: skip
    else:
        update_tile(
            p_ptr, g_ptr, m_ptr, e_ptr, offset, n, factor, lr, wd, beta1, rest1, beta2, rest2, cautious_decay,
            MODE, True, BLOCK,
        )  # fmt: skip


TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def launch(
    table: Tensor,
    n_tiles: int,
    n_tensors: int,
    n_groups: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    mode: int,
    aligned: bool,
    span: int,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    block: int,
    num_warps: int,
) -> None:
    """Update every tensor of a table; dtypes of (parameter, gradient, momentum)."""
    p_type, g_type, m_type = (TYPES[t] for t in dtypes)
    e_type = p_type
    if mode == REMAINDER:
        p_type = e_type = "i16"
    with device_guard(table):
        step_kernel[(n_tiles,)](
            table, table if grad_scale is None else grad_scale, table if found_inf is None else found_inf,
            n_tensors, n_groups,
            P_TYPE=p_type, G_TYPE=g_type, M_TYPE=m_type, E_TYPE=e_type, MODE=mode, ALIGNED=aligned,
            HAS_SCALE=grad_scale is not None, HAS_FOUND_INF=found_inf is not None, SPAN=span, BLOCK=block,
            num_warps=num_warps, **OPTIONS,
        )  # fmt: skip
