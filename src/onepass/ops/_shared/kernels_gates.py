"""The gate functions φ of soft_topk and their slopes, for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels_rows import INF, LOG2E

CAPPED_EXP = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
LAPLACE = tl.constexpr(2)
CLAMP = tl.constexpr(3)


@triton.jit
def offsets(s, base, eps):
    """Return (s - base)/eps; for base = +inf, the +inf scores share k: 0 for them, -inf for the rest."""
    shared = tl.where(s == INF, 0.0, -INF)
    return tl.where(base == INF, shared, (s - base) * (1.0 / eps))


@triton.jit
def gates_and_slopes(x, KIND: tl.constexpr):
    """Return φ(x) and φ'(x); for `clamp`, x is measured from its lower edge."""
    if KIND == CAPPED_EXP:
        y = tl.exp2(x * LOG2E)
        saturated = x > 0
        w = tl.where(saturated, 0.0, y)
        y = tl.where(saturated, 1.0, y)
    elif KIND == SIGMOID:
        e = tl.exp2(-tl.abs(x) * LOG2E)
        r = 1.0 / (1.0 + e)
        w = e * r * r
        y = tl.where(x < 0, e * r, r)
    elif KIND == LAPLACE:
        w = 0.5 * tl.exp2(-tl.abs(x) * LOG2E)
        y = tl.where(x < 0, w, 1.0 - w)
    else:
        w = tl.where((x > 0) & (x < 1), 1.0, 0.0)
        y = tl.where(x > 1, 1.0, tl.where(x < 0, 0.0, x))
    return y, w
