"""Triton kernel that casts the weights of both branches in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.launch import cdiv, device_guard, launch, replayed

# weights and biases of two linear layers in each of two branches
TENSORS = 8
BLOCK = 4096
INTS = [f"n{i}" for i in range(TENSORS)]


@triton.jit
def copy(from_ptr, to_ptr, n, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    if from_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n * UNIT
        tl.store(to_ptr + at, tl.load(from_ptr + at, mask=inside, other=0.0).to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=INTS)
def cast_kernel(
    a0, a1, a2, a3, a4, a5, a6, a7,  # inputs, contiguous; or None
    b0, b1, b2, b3, b4, b5, b6, b7,  # outputs
    n0, n1, n2, n3, n4, n5, n6, n7,  # numbers of elements, in UNITs: bounds of known divisibility allow wide loads
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        copy(a0, b0, n0, UNIT, BLOCK)
    elif which == 1:
        copy(a1, b1, n1, UNIT, BLOCK)
    elif which == 2:
        copy(a2, b2, n2, UNIT, BLOCK)
    elif which == 3:
        copy(a3, b3, n3, UNIT, BLOCK)
    elif which == 4:
        copy(a4, b4, n4, UNIT, BLOCK)
    elif which == 5:
        copy(a5, b5, n5, UNIT, BLOCK)
    elif which == 6:
        copy(a6, b6, n6, UNIT, BLOCK)
    else:
        copy(a7, b7, n7, UNIT, BLOCK)


@replayed
def cast(
    a0: Tensor, a1: Tensor | None, a2: Tensor, a3: Tensor | None, a4: Tensor, a5: Tensor | None, a6: Tensor,
    a7: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return each tensor (contiguous) cast to `dtype`; None stays None."""
    tensors = (a0, a1, a2, a3, a4, a5, a6, a7)
    out = [None if t is None else torch.empty(t.shape, dtype=dtype, device=t.device) for t in tensors]
    sizes = [0 if t is None else t.numel() for t in tensors]
    unit = math.gcd(16, *sizes)
    with device_guard(a0):
        launch(
            cast_kernel, (cdiv(max(sizes), BLOCK), TENSORS, 1), (*tensors, *out), tuple(n // unit for n in sizes),
            (unit, BLOCK), num_warps=4,
        )  # fmt: skip
    return tuple(out)
