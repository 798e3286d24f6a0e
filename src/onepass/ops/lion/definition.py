"""The definition of a Lion step, and how its numbers are stored: bf16 with an int16 remainder, int8 with scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """A param group's hyperparameters; fp32 where kernels take them."""

    # tensors where only a device knows them, or autograd records them
    lr: Any
    weight_decay: Any
    beta1: float
    rest1: float  # 1 − β1, subtracted in double precision
    beta2: float
    rest2: float
    factor: Any = 1.0  # multiplies the gradient: −1 to maximise
    cautious_decay: float = 0.0  # 1: decay only weights that the update moves towards zero (arXiv 2510.12402)
    # multiplies updates whose sign disagrees with the gradient; below 1, all are divided by the mean factor
    # (arXiv 2411.16085)
    cautious: float = 1.0


def sign(u: Tensor) -> Tensor:
    """Return −1, 0 or 1, and nan for nan: torch.sign returns 0 there, and the weight would not show the nan."""
    # u == u instead of isnan: torch.compile for a CPU vectorises the comparison but not isnan
    return torch.where(u == u, u.sign(), u)


def reference(
    p: Tensor, g: Tensor, m: Tensor, row: Row, mean: Callable[[Tensor], Tensor] = torch.mean
) -> tuple[Tensor, Tensor]:
    """Return (new parameter, new momentum) after one step, out of place, in the dtype of the inputs (fp32 or fp64).

    u = β1·m + (1 − β1)·g; p ← p − lr·(sign(u) + wd·p); m ← β2·m + (1 − β2)·g.

    The decay is inside the bracket because 1 − lr·wd in fp32 is off by 19 % at lr·wd = 1e-7. The momentum avoids lerp,
    m + (1 − β)·(g − m), which turns an infinite gradient into nan. `mean` averages the cautious factors: for a shard,
    over all shards.
    """
    g = g * row.factor
    s = sign(m * row.beta1 + g * row.rest1)
    if row.cautious != 1.0:
        keep = torch.where(s * g > 0, 1.0, row.cautious).to(s.dtype)
        s = s * (keep / mean(keep).clamp(min=1e-5))
    decay = p * row.weight_decay
    if row.cautious_decay:
        decay = decay * (s * p > 0)
    return p - (s + decay) * row.lr, m * row.beta2 + g * row.rest2


def split_complex(t: Tensor) -> Tensor:
    """Return the real view of a complex tensor (a copy of a lazy conjugate); other tensors as they are."""
    return torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t


def join(p: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 value with bits p·2^16 + remainder, from bf16 p and an int16 remainder."""
    return ((p.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bf16 rounded half up, int16 remainder) of fp32 x; `join` restores x bit for bit.

    Rounding half up, instead of to even, makes every remainder fit in 16 bits. Every nan becomes 0x7FC00000, whose
    upper half is a nan too.
    """
    bits = torch.where(x == x, x.view(torch.int32), torch.tensor(0x7FC00000, dtype=torch.int32, device=x.device))
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


# neighbours in memory of an int8 momentum that share a scale
INT8_BLOCK = 256
# range of the scales: their reciprocals are normal numbers
INT8_SCALES = (2.0**-120, 2.0**120)
INT8_NAN = -128


def widen(p: Tensor, extra: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the full-precision parameter, with the remainder `extra` of a bf16 one; p itself if it already is."""
    return p.to(dtype) if extra is None else join(p, extra).to(dtype)


def narrow_(p: Tensor, extra: Tensor | None, value: Tensor) -> None:
    """Round the full-precision parameter and store it in p and extra."""
    if extra is not None:
        # a float64 gradient or momentum makes value float64, but the pair holds an fp32 number
        high, low = split(value.float())
        p.copy_(high)
        extra.copy_(low)
    elif value is not p:
        p.copy_(value)


def scales_for(n: int) -> int:
    """Return the number of int8 scales of a tensor of n elements."""
    return -(-n // INT8_BLOCK)


def vector(t: Tensor) -> Tensor:
    """Return the memory of a dense tensor in its order."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of int8 codes and fp32 scales per block of memory, with the strides of the codes."""
    flat = vector(codes)
    x = flat.float() * (1 / 127)
    square = x * x
    value = (square * square).copysign(x) * scales.repeat_interleave(INT8_BLOCK)[: flat.numel()]
    value.masked_fill_(flat == INT8_NAN, float("nan"))
    return value.as_strided(codes.shape, codes.stride())


def quantize_(value: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write fp32 values as codes and scales: code = round(127·(|x| / scale)^¼) with the sign of x, scale = max |x|.

    The fourth root spreads the codes over 8.4 decades; the largest are 3 % apart. Lion uses the sign of a momentum, so
    elements much smaller than the largest of their block need a code too. Zero is exact. Multiplying all values by a
    power of two leaves the codes unchanged.
    """
    in_order = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    in_order.copy_(value)
    n = codes.numel()
    padded = torch.zeros(len(scales) * INT8_BLOCK, dtype=torch.float32, device=codes.device)
    padded[:n] = vector(in_order)
    blocks = padded.view(-1, INT8_BLOCK)
    largest = blocks.nan_to_num(0.0, float("inf"), float("-inf")).abs().amax(1)
    scale = torch.where(largest > 0, largest.clamp(*INT8_SCALES), torch.zeros_like(largest))
    share = (blocks.abs() * torch.where(scale > 0, 1 / scale, scale)[:, None]).clamp(max=1.0)
    code = (share.sqrt().sqrt() * 127 + 0.5).floor().copysign(blocks)
    code = torch.where(blocks.isnan(), torch.full_like(code, INT8_NAN), code)
    vector(codes).copy_(code.view(-1)[:n])
    scales.copy_(scale)
