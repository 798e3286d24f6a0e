"""soft_topk by an independent solver in float64, coor_descent step for step, and how far a right result may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import length

# a solver knows a sum to this many roundoffs of k, or of n − k where that is smaller: four where it stops, one for the
# sum and one for k
STOP = 6.0


def vanishing(dtype: torch.dtype) -> float:
    """Gates below this may be 0: exponentials are taken relative to a base within e^16 of the threshold."""
    return 2.0**-900 if dtype == torch.float64 else 2.0**-100


def gate(u: Tensor, kind: str) -> Tensor:
    """φ(u)."""
    if kind == "capped_exp":
        return u.clamp(max=0).exp()
    if kind == "sigmoid":
        return u.sigmoid()
    if kind == "laplace":
        tail = 0.5 * (-u.abs()).exp()
        return torch.where(u < 0, tail, 1 - tail)
    return (u + 0.5).clamp(0, 1)


def slope(u: Tensor, kind: str) -> Tensor:
    """φ′(u)."""
    if kind == "capped_exp":
        return torch.where(u <= 0, u.clamp(max=0).exp(), 0.0)
    if kind == "sigmoid":
        return u.sigmoid() * (-u).sigmoid()
    if kind == "laplace":
        return 0.5 * (-u.abs()).exp()
    return (u.abs() <= 0.5).double()


def _key(x: float) -> int:
    bits = int(torch.tensor(x, dtype=torch.float64).view(torch.int64))
    return bits if bits >= 0 else -(bits & (2**63 - 1))


def _number(key: int) -> float:
    value = float(torch.tensor(abs(key), dtype=torch.int64).view(torch.float64))
    return value if key >= 0 else -value


@dataclass
class Solved:
    """One row: gates, arguments u, slopes, and how exactly a solver can know them."""

    y: Tensor
    u: Tensor
    w: Tensor
    of_u: Tensor  # absolute error of u, the threshold's included
    of_sum: float  # what the sum may be off by
    sharp: bool  # the threshold is known well enough for a gradient
    free: Tensor  # entries that take part at all


def solve(s: Tensor, valid: Tensor, k: float, eps: float, kind: str, u: float) -> Solved:
    """Gates of one row s (n,) in float64 by bisection on the bits of the threshold."""
    n = len(s)
    y, arg, w, of_u = torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(n).double()
    valid = valid & (s != -math.inf)
    none = torch.zeros(n, dtype=torch.bool)
    count = int(valid.sum())
    if bool(s[valid].isnan().any()):
        y[valid] = math.nan
        return Solved(y, arg, w, of_u, 0.0, False, none)
    if k >= count:
        y[valid] = 1.0
        return Solved(y, arg, w, of_u, 0.0, True, none)
    endless = valid & (s == math.inf)
    many = int(endless.sum())
    if many >= k:
        y[endless] = k / many
        # their gradient is that of equal scores, of which there is no definition at infinity
        return Solved(y, arg, w, of_u, 4 * u * k, False, none)
    y[endless] = 1.0
    free = valid & ~endless
    t, rest = s[free], k - many
    base = t.sort(descending=True).values[math.ceil(rest) - 1]
    x = (t - base) / eps
    reach = float(x.abs().max()) + 800.0
    lo, hi = _key(-reach), _key(reach)
    while hi - lo > 1:
        middle = (lo + hi) // 2
        if float(gate(x + _number(middle), kind).sum()) < rest:
            lo = middle
        else:
            hi = middle
    e = _number(hi)
    a = x + e
    gates, slopes = gate(a, kind), slope(a, kind)
    own = 8 * u * (a.abs() + 1) + 2**-50 * abs(e)
    total = float(slopes.sum())
    # the last: the sum above is one of float64
    of_sum = STOP * u * min(k, count - k) + length(count) * u * total + 2**-52 * k
    shift = (of_sum + float((slopes * own).sum())) / total if total > 0 else math.inf
    sharp = shift < 0.05
    delta = own + shift if sharp else torch.full_like(own, math.inf)
    kinks = {"capped_exp": (0.0,), "clamp": (-0.5, 0.5)}.get(kind, ())
    sharp = sharp and all(not bool(((a - kink).abs() <= delta).any()) for kink in kinks)
    y[free], arg[free], w[free], of_u[free] = gates, a, slopes, delta
    return Solved(y, arg, w, of_u, of_sum, sharp, free)


def allowed_gates(row: Solved, kind: str, u: float, v: float, zero: float) -> Tensor:
    """How far a gate may be from `row.y`."""
    near = torch.where(row.of_u < 0.1, row.of_u, 0.0)
    # the steepest slope within reach
    steep = torch.maximum(slope(row.u - near, kind), slope(row.u + near, kind)).maximum(row.w)
    steep = torch.where(row.u.abs() <= near, torch.ones_like(steep), steep) if kind == "capped_exp" else steep
    moved = torch.where(row.free, steep * near, 0.0)
    # not sharp: whatever the threshold is, gates move by the error of their sum
    vague = row.of_sum + row.w * 16 * u * (row.u.abs() + 1)
    moved = torch.where(row.free & (row.of_u >= 0.1), vague, moved)
    if kind == "capped_exp" and float(row.y[row.y < 1 - row.of_sum].sum()) <= row.of_sum:
        # the rest of the gates is less than the sum can be off by: a solver that takes the others as saturated is right
        moved = moved + torch.where(row.y < 1 - row.of_sum, row.of_sum, 0.0)
    return moved + 4 * u * row.y + v * row.y + zero + (row.of_sum if not bool(row.free.any()) else 0.0)


@dataclass
class SoftGradients:
    """Gradients of one row with what a right result may be off by."""

    ds: tuple[Tensor, Tensor]
    dk: tuple[float, float]
    deps: tuple[float, float]


def gradients(row: Solved, gy: Tensor, eps: float, u: float, v: float, zero: float) -> SoftGradients:
    """For the upstream gradient gy (n,); the row must be sharp."""
    w, a = row.w, row.u
    gy = torch.where(w > 0, gy, 0.0)
    total, stretch = float(w.sum()), length(len(w)) * u
    if total == 0:
        nothing = torch.zeros_like(w)
        return SoftGradients((nothing, nothing + zero), (0.0, zero), (0.0, zero))
    q = float((gy * w).sum()) / total
    # |φ″| ≤ φ′ for every kind away from its kinks
    of_w = w * (row.of_u + 4 * u)
    of_q = float(((gy - q).abs() * of_w).sum() + 2 * stretch * (gy.abs() * w).sum()) / total + 2 * u * abs(q)
    ds = w * (gy - q) / eps
    of_ds = (of_w * (gy - q).abs() + w * (of_q + 2 * u * (gy.abs() + abs(q)))) / eps
    terms = (q - gy) * w * a
    of_terms = (gy - q).abs() * (of_w * a.abs() + w * row.of_u) + w * a.abs() * (of_q + 3 * u * (gy.abs() + abs(q)))
    deps = float(terms.sum()) / eps
    of_deps = float((of_terms + stretch * terms.abs()).sum()) / eps
    floor = zero * (1 + float(gy.abs().max())) * (1 + 1 / eps) * (1 + 1 / total)
    return SoftGradients(
        (ds, of_ds + 4 * u * ds.abs() + v * ds.abs() + floor), (q, of_q + floor),
        (deps, of_deps + len(w) * floor * (1 + float(a.abs().max()))),
    )  # fmt: skip


@dataclass
class Descent:
    """T steps of one row: thresholds, gates, their units, gradients."""

    y: Tensor
    allowed: Tensor
    ds: tuple[Tensor, Tensor]
    dk: tuple[float, float]
    sharp: bool


def descend(
    s: Tensor, valid: Tensor, k: float, schedule: list[float], gy: Tensor, u: float, v: float, zero: float
) -> Descent:
    """Coordinate descent of one row in float64 by the published recursion; schedule: eps_1 … eps_{T+1}."""
    steps, last = schedule[:-1], schedule[-1]
    none = torch.zeros_like(s)
    valid = valid & (s != -math.inf)
    if not bool(valid.any()):
        return Descent(none, none + zero, (none, none + zero), (0.0, zero), True)
    t, g = s[valid], gy[valid]
    trace: list[float] = []
    of_a, errors = 0.0, []
    for eps in steps:
        state = torch.minimum(t, torch.full_like(t, -trace[-1])) if trace else torch.zeros_like(t)
        a = eps * (math.log(k) - float((state / eps).logsumexp(0)))
        # a threshold is a base and a small number in units of eps: one rounding of each, and of the sum of n terms;
        # the error of the one before enters with a weight of at most 1
        of_a += 8 * u * abs(a) + eps * u * (length(len(t)) + 8 + abs(math.log(k)))
        trace.append(a)
        errors.append(of_a)
    a = trace[-1]
    y = (torch.minimum(t + a, torch.zeros_like(t)) / last).exp()
    of_arg = (of_a + 8 * u * (t.abs() + abs(a))) / last
    of_arg = torch.where(t + a - of_a > 0, 0.0, of_arg)
    sharp = all(
        bool(((t + b).abs() > 4 * e + 16 * u * (t.abs() + abs(b))).all()) for b, e in zip(trace, errors, strict=True)
    )
    sharp = sharp and bool(of_arg[y > zero].max() < 0.05 if bool((y > zero).any()) else True)
    moved = y * torch.expm1(of_arg.clamp_max(80.0)) + 4 * u * y + v * y + zero
    # backward, with the sums of absolute terms beside it
    ds, size = g * y / last * (t + a <= 0), (g * y / last * (t + a <= 0)).abs()
    da, of_da = float(ds.sum()), float(size.sum())
    dk, of_dk = 0.0, 0.0
    for i in range(len(trace) - 1, -1, -1):
        dk, of_dk = dk + steps[i] * da, of_dk + steps[i] * of_da
        if i == 0:
            break
        before = (t + trace[i - 1]) <= 0
        term = torch.where(before, ((t + trace[i]) / steps[i]).exp(), 0.0)
        ds, size = ds - da / k * term, size + of_da / k * term
        weight = float((~before).sum()) * math.exp(min(700.0, (trace[i] - trace[i - 1]) / steps[i])) / k
        da, of_da = da * weight, of_da * weight
    worst = (
        max(errors) / min(schedule) + 16 * u * (float(t[y > 0].abs().max()) + abs(a)) / min(schedule)
        if bool((y > 0).any())
        else 0.0
    )
    relative = 4 * worst + u * length(len(t)) * 2 * len(steps)
    out, out_allowed, grad, grad_allowed = none.clone(), none + zero, none.clone(), none + zero
    out[valid], out_allowed[valid] = y, moved
    # a GPU flushes an exponential below the smallest normal number, and with it all steps that share it
    flushed = torch.where(y < 2 * torch.finfo(torch.float32).tiny, ds.abs(), 0.0) if u > 1e-10 else 0.0
    grad[valid], grad_allowed[valid] = (
        ds,
        relative * size + v * ds.abs() + zero * (1 + 1 / last) * (1 + float(g.abs().max())) + flushed,
    )
    floor = zero * (1 + 1 / k) * (1 + float(g.abs().max())) * (1 + 1 / last) * len(t)
    return Descent(
        out, out_allowed, (grad, grad_allowed), (dk / k, relative * of_dk / k + floor), sharp and worst < 0.05
    )
