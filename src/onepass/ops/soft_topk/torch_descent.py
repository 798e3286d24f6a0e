"""The torch path of coor_descent: T steps on one number per row.

Rows are (R, n) in fp32 or fp64 with every entry that may not be chosen at -inf, k is (R, 1). After each step all that
is left of the iteration is the threshold -a: an entry above it is saturated. A threshold is kept as ref + off, ref
near it, and E = exp((s - ref)/eps) serves every step that shares an eps: the step is u ← Σ min(E, u)/k.

The trace (R, 2T) is what backward needs: T thresholds relative to a ref, T - 1 counts of saturated entries, the ref.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exponents of E stay trustworthy this many eps around its ref
WINDOW = 40.0


def schedule(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> list[float]:
    """The eps of each of the T steps, and the one of the final gates."""
    out = [max(eps if eps_init is None else eps_init, eps)]
    for _ in range(n_iters):
        out.append(max(out[-1] * eps_decay, eps))
    return out


def forward(s: Tensor, k: Tensor, epsilons: list[float], want_trace: bool) -> tuple[Tensor, Tensor]:
    """Gates (R, n) and the trace ((R, 0) when not wanted)."""
    steps = len(epsilons) - 1
    if not s.numel():
        return s.clone(), s.new_zeros(len(s), 2 * steps if want_trace else 0)
    rows = torch.where((k > 0), k, math.nan)
    valid = (s != -math.inf).sum(-1, keepdim=True).to(s.dtype)
    top = s.amax(-1, keepdim=True)
    off = epsilons[0] * (valid.clamp(min=1) / rows).log()
    top = torch.where(valid > 0, top, off)
    start = ref = torch.minimum(top, off)
    off = off - ref
    thresholds, counts = [off], []
    ratios, buffer = torch.empty(0), torch.empty_like(s)
    for t in range(1, steps + 1):
        eps = epsilons[t]
        moved = torch.minimum(top, ref + off)
        if t > 1 and eps == epsilons[t - 1] and not s.is_cuda:
            leaves = (off.abs() > WINDOW * eps) & (moved != ref)
            stale, moved = bool(leaves.any()), torch.where(leaves, moved, ref)
        else:
            stale = True
        if stale:
            off, ref = (ref - moved) + off, moved
            ratios = torch.sub(s, ref, out=buffer).div_(eps).exp_()
        level = (off / eps).exp()
        if t == steps:
            break
        total = torch.minimum(ratios, level).sum(-1, keepdim=True)
        if want_trace:
            counts.append((ratios > level).sum(-1, keepdim=True).to(s.dtype))
        off = eps * (torch.where(valid > 0, total, rows) / rows).log()
        thresholds.append((ref - start) + off)
    y = ratios.mul_(1 / level).clamp_(max=1)
    if not want_trace:
        return y, s.new_empty(len(s), 0)
    return y, torch.cat((*thresholds, *counts, start), -1)


def backward(gy: Tensor, s: Tensor, trace: Tensor, k: Tensor, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """(ds (R, n), dk (R, 1)); entries share one exponential per distinct eps, the recursion is scalar."""
    steps = len(epsilons) - 1
    if not s.numel():
        return s.clone(), torch.zeros_like(k)
    level, count, start = trace[:, :steps], trace[:, steps : 2 * steps - 1], trace[:, -1:]
    z = s - start
    last = level[:, -1:]
    y = ((z - last) / epsilons[-1]).exp_()
    g = torch.where((z <= last) & (y > 0), gy * y, 0.0).div_(epsilons[-1])
    da = g.sum(-1, keepdim=True)
    dk = torch.zeros_like(da)
    ratios, weights = torch.zeros_like(s), torch.zeros_like(s)
    base, eps = last, -1.0
    for t in range(steps - 1, 0, -1):
        here, before = level[:, t : t + 1], level[:, t - 1 : t]
        dk += epsilons[t] * da
        stale = True
        if epsilons[t] == eps and not s.is_cuda:
            stale = bool(((here - base).abs() > WINDOW * eps).any())
        if stale:
            g.addcmul_(weights, ratios, value=-1)
            base, eps = here, epsilons[t]
            # above 80 only saturated entries, whose weight is zero, are cut
            ratios = ((z - base) / eps).clamp_(max=80).exp_()
            weights.zero_()
        weights += torch.where(z <= before, da / k * ((base - here) / eps).exp(), 0.0)
        saturated = count[:, t - 1 : t]
        da = torch.where(saturated == 0, 0.0, da * saturated * ((before - here) / eps).exp() / k)
    dk += epsilons[0] * da
    return g.addcmul_(weights, ratios, value=-1), dk / k
