"""Sizes that launch shapes are computed from; copies of tensors whose layout a kernel can't take."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Gpu(NamedTuple):
    """What launch shapes ask of a GPU: multiprocessors, bytes of shared memory of a program, compute capability."""

    multiprocessors: int
    shared: int
    capability: tuple[int, int]


@functools.cache
def _gpu(index: int) -> Gpu:
    about = torch.cuda.get_device_properties(index)
    shared = getattr(about, "shared_memory_per_block_optin", 49152)
    return Gpu(about.multi_processor_count, shared, torch.cuda.get_device_capability(index))


def gpu(x: Tensor) -> Gpu:
    """Return what x's GPU has; under the interpreter, where programs run in sequence, few multiprocessors."""
    return _gpu(x.device.index) if x.is_cuda else Gpu(4, 232448, (0, 0))


def sm_count(x: Tensor) -> int:
    """Return the number of multiprocessors of x's GPU."""
    return gpu(x).multiprocessors


def cdiv(a: int, b: int) -> int:
    """Return ⌈a / b⌉."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two ≥ n (1 for n ≤ 1)."""
    return 1 << max(n - 1, 0).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """Reshape x (..., n) to (rows, n) with unit column stride, as a view wherever strides allow one.

    A slice, a row step or an expanded leading dimension stays a view; a layout without one common row stride is copied.
    """
    n = x.shape[-1]
    rows = x.reshape(math.prod(x.shape[:-1]), n)
    return rows if n <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy where x starts off a 16-byte boundary.

    Alignment decides the width of loads and thereby the order of sums; the copy makes a sum's bits independent of the
    address of x.
    """
    return x if x.data_ptr() % 16 == 0 else x.clone()


def even_rows(x: Tensor, unit: int = 16) -> Tensor:
    """Return x (..., n) of unit column stride, or a copy where its rows are less aligned than a contiguous tensor's.

    gcd(unit, n) then divides all strides, so that a launch may rely on it and sums have one order for every layout.
    """
    divisor = math.gcd(unit, x.shape[-1])
    even = all(s % divisor == 0 for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return aligned(x) if even else x.contiguous()
