"""Small facts that launch shapes are computed from."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(x: Tensor) -> int:
    """Number of multiprocessors of x's GPU (4 under the interpreter, where programs run one after another)."""
    return _sm_count(x.device.index) if x.is_cuda else 4


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two ≥ n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """(..., n) → (rows, n) with unit column stride, as a view wherever strides allow one.

    A slice, a row step or an expanded leading dimension stays a view; a layout that no (row stride, 1) pair
    describes is copied.
    """
    n = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), n)
    return rows if n <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it where it starts off a 16-byte boundary.

    The width of loads decides which thread adds up what; without the copy a sum's bits would depend on where x lies.
    """
    return x if x.data_ptr() % 16 == 0 else x.clone()


def even_rows(x: Tensor, unit: int = 16) -> Tensor:
    """Return x (..., n) of unit column stride, or a copy where its rows start less evenly than a contiguous tensor's.

    A launch may then take gcd(unit, n) as a divisor of all strides, and sums are in one order whatever the layout.
    """
    divisor = math.gcd(unit, x.shape[-1])
    even = all(s % divisor == 0 for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return aligned(x) if even else x.contiguous()
