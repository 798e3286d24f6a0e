"""The gate functions φ in torch, in place where it saves memory: their values, slopes and inverses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

KINDS = ("capped_exp", "sigmoid", "laplace", "clamp")
CAPPED_EXP, SIGMOID, LAPLACE, CLAMP = range(4)


def offsets(s: Tensor, ref: Tensor, eps: Tensor) -> Tensor:
    """Return (s - ref)/eps; where ref is +inf, +inf scores share k: 0 for them, -inf for all others."""
    x = (s - ref).div_(eps)
    endless = ref == math.inf
    if s.is_cuda or bool(endless.any()):
        x = torch.where(endless, torch.where(s == math.inf, 0.0, -math.inf).to(s.dtype), x)
    return x


def phi(x: Tensor, kind: int) -> Tensor:
    """Return the gates, overwriting x; for `clamp` x is 0 at the lower edge, so that small gates keep their digits."""
    if kind == CAPPED_EXP:
        return x.clamp_(max=0).exp_()
    if kind == SIGMOID:
        # (the last bit of torch.sigmoid depends on the place in memory; that of exp does not)
        return x.neg_().exp_().add_(1).reciprocal_()
    if kind == LAPLACE:
        # the tail below zero, 1 minus the tail above; torch.where would take ten times as long on a CPU
        tail = x.abs().neg_().exp_().mul_(0.5).copysign_(x.add_(0.0))
        return x.ge_(0).sub_(tail)
    return x.clamp_(0, 1)


def slope(x: Tensor, kind: int) -> Tensor:
    """Return φ'(x), 0 where the gate is saturated."""
    if kind == CAPPED_EXP:
        return x.clamp(max=0).exp_().sub_(above_zero(x))
    if kind == SIGMOID:
        e = x.abs().neg_().exp_()
        return e.div_((1 + e).square_())
    if kind == LAPLACE:
        return x.abs().neg_().exp_().mul_(0.5)
    return torch.gt(x, 0, out=torch.empty_like(x)).mul_(torch.lt(x, 1, out=torch.empty_like(x)))


def above_zero(x: Tensor) -> Tensor:
    """Return 1.0 where x > 0, else 0.0: bool masks are slower to create, apply and sum."""
    return torch.gt(x, 0, out=torch.empty_like(x))


def inverse(k: Tensor, n: Tensor, kind: int) -> Tensor:
    """Return φ⁻¹(k/n), the offset at which n equal scores sum to k; n - k is exact where 1 - k/n is not."""
    if kind == CAPPED_EXP:
        return (k / n).log()
    if kind == SIGMOID:
        return (k / (n - k)).log()
    if kind == LAPLACE:
        return torch.where(k < 0.5 * n, (2 * (k / n)).log(), -(2 * ((n - k) / n)).log())
    return k / n
