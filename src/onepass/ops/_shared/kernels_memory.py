"""Loads and stores of Triton kernels with a mask that a constexpr turns off: without one they can be 16 bytes wide."""

from __future__ import annotations

import triton
import triton.language as tl

# no policy. A default of "" would not compile: Triton 3.6 hands a default on as it is, and takes no str
NORMAL = tl.constexpr("")


@triton.jit
def load(ptr, offsets, mask, MASKED: tl.constexpr, POLICY: tl.constexpr = NORMAL):
    """Load; 0 where MASKED and the mask is False. POLICY says which lines leave L2 first."""
    if MASKED:
        x = tl.load(ptr + offsets, mask=mask, other=0, eviction_policy=POLICY)
    else:
        x = tl.load(ptr + offsets, eviction_policy=POLICY)
    return x


@triton.jit
def store(ptr, offsets, value, mask, MASKED: tl.constexpr, POLICY: tl.constexpr = NORMAL):
    """Store in the pointer's dtype, with MASKED only where the mask is True."""
    if MASKED:
        tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=mask, eviction_policy=POLICY)
    else:
        tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), eviction_policy=POLICY)
