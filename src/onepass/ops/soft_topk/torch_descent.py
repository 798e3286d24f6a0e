"""The torch path of coor_descent: T steps on one number per row.

Rows are (R, n) in fp32 or fp64 with every entry that may not be chosen at -inf, k is (R, 1). After each step all that
is left of the iteration is the threshold -a: an entry above it is saturated. A threshold is kept as ref + off, ref
near it, and E = exp((s - ref)/eps) serves every step that shares an eps: the step is u ← Σ min(E, u)/k.

The trace (R, 2T) is what backward needs: T thresholds relative to a ref, T - 1 counts of entries above them, the ref.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exponents of E stay trustworthy this many eps around its ref
WINDOW = 40.0
# steps between two looks at whether a threshold left its window
BATCH = 8


def schedule(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> list[float]:
    """The eps of each of the T steps, and the one of the final gates."""
    out = [max(eps if eps_init is None else eps_init, eps)]
    for _ in range(n_iters):
        out.append(max(out[-1] * eps_decay, eps))
    return out


def forward(s: Tensor, k: Tensor, epsilons: list[float], want_trace: bool) -> tuple[Tensor, Tensor]:
    """Gates (R, n) and the trace ((R, 0) when not wanted; here without the counts, which backward finds by itself)."""
    steps = len(epsilons) - 1
    if not s.numel():
        return s.clone(), s.new_zeros(len(s), 2 * steps if want_trace else 0)
    k = torch.where(k > 0, k, math.nan)
    valid = (s != -math.inf).sum(-1, keepdim=True).to(s.dtype)
    top = s.amax(-1, keepdim=True)
    off = epsilons[0] * (valid.clamp(min=1) / k).log()
    top = torch.where(valid > 0, top, off)
    start = ref = torch.minimum(top, off)
    off = off - ref
    nobody = (valid == 0).to(s.dtype) * k
    level, eps = (off / epsilons[0]).exp(), epsilons[0]
    levels, refs = [level], [ref]
    ratios, clipped = torch.empty_like(s), torch.empty_like(s)
    t = 1
    while True:
        fresh = t == 1 or epsilons[t] != eps
        leaves = ~_within(level)
        if fresh or s.is_cuda or bool(leaves.any()):
            off = eps * level.log()
            moved = torch.minimum(top, ref + off)
            if not fresh:
                moved = torch.where(leaves, moved, ref)
            shifted = moved != ref
            level = torch.where(shifted | (epsilons[t] != eps), (((ref - moved) + off) / epsilons[t]).exp(), level)
            ref, eps = moved, epsilons[t]
            torch.sub(s, ref, out=ratios).div_(eps).exp_()
        if t == steps:
            break
        # a step is a clipped sum and a division; several go without a look, and again one by one if one went too far
        first, end = t, t + 1
        while end < steps and end - first < BATCH and epsilons[end] == eps and not s.is_cuda:
            end += 1
        batch = []
        for _ in range(first, end):
            level = torch.minimum(ratios, level, out=clipped).sum(-1, keepdim=True).add_(nobody).div_(k)
            batch.append(level)
        if len(batch) > 1 and not bool(_within(torch.cat(batch, -1)).all()):
            batch = batch[:1]
            level = batch[0]
        levels += batch
        refs += [ref] * len(batch)
        t = first + len(batch)
    y = ratios.mul_(1 / level).clamp_(max=1)
    if not want_trace:
        return y, s.new_empty(len(s), 0)
    thresholds = torch.cat(levels, -1).log() * level.new_tensor(epsilons[:steps])
    thresholds += torch.cat(refs, -1) - start
    return y, torch.cat((thresholds, s.new_zeros(len(s), steps - 1), start), -1)


def _within(level: Tensor) -> Tensor:
    """Where exponentials of these thresholds are trustworthy (or NaN)."""
    return ~((level > math.exp(WINDOW)) | (level < math.exp(-WINDOW)))


def backward(gy: Tensor, s: Tensor, trace: Tensor, k: Tensor, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """(ds (R, n), dk (R, 1)): a recursion over T numbers per row, and one exponential per element and distinct eps.

    An entry takes part in every step whose threshold before it was not yet passed: with the thresholds sorted, one
    search per entry finds its steps, and running sums of the steps' weights do the rest.
    """
    steps, n = len(epsilons) - 1, s.shape[-1]
    if not s.numel():
        return s.clone(), torch.zeros_like(k)
    level, z = trace[:, :steps], (s - trace[:, -1:]).contiguous()
    last = level[:, -1:]
    x = (z - last).div_(epsilons[-1])
    y = torch.exp(x).mul_(torch.le(x, 0, out=x))
    g = torch.where(y > 0, gy * y, 0.0).div_(epsilons[-1])
    eps = level.new_tensor(epsilons[:-1])
    ascending, order = level.sort(dim=-1)
    place = torch.searchsorted(ascending, z)
    # entries above each threshold: those whose place lies behind it
    slots = torch.arange(len(s), device=s.device)[:, None] * (steps + 1) + place
    histogram = torch.bincount(slots.view(-1), minlength=len(s) * (steps + 1)).view(len(s), steps + 1)
    above = (n - histogram.cumsum(-1)[:, :-1]).to(s.dtype)
    count = torch.empty_like(level).scatter_(-1, order, above)[:, :-1]
    # da of step t is da of the last one times the shares that every later step passed on
    passed = count * ((level[:, :-1] - level[:, 1:]) / eps[1:]).exp() / k
    passed = torch.where(count == 0, 0.0, passed).flip(-1).cumprod(-1).flip(-1)
    da = g.sum(-1, keepdim=True) * torch.cat((passed, torch.ones_like(last)), -1)
    for first, end in _groups(level, epsilons):
        base = level[:, end - 1 : end]
        weight = torch.zeros_like(level)
        weight[:, first - 1 : end - 1] = da[:, first:end] / k * ((base - level[:, first:end]) / epsilons[first]).exp()
        weight = weight.gather(-1, order).flip(-1).cumsum(-1).flip(-1)
        weight = torch.cat((weight, torch.zeros_like(last)), -1).gather(-1, place)
        # above 80 lie only entries that were saturated, whose weight is zero
        g.addcmul_(torch.sub(z, base, out=x).div_(epsilons[first]).clamp_(max=80).exp_(), weight, value=-1)
    return g, (da * eps).sum(-1, keepdim=True) / k


def _groups(level: Tensor, epsilons: list[float]) -> list[tuple[int, int]]:
    """Runs [first, end) of steps that can share an exponential: one eps, thresholds within the window of the last."""
    out = []
    end = level.shape[-1]
    while end > 1:
        first = end - 1
        while first > 1 and epsilons[first - 1] == epsilons[end - 1] and not level.is_cuda:
            spread = (level[:, first - 1] - level[:, end - 1]).abs()
            if bool((spread > WINDOW * epsilons[first]).any()):
                break
            first -= 1
        out.append((first, end))
        end = first
    return out
