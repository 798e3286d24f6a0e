"""The definition of soft_topk: the tests' oracle; in float64 it runs on a CPU, without Triton, for the longest rows.

The solution of a row is (base, c) with gates φ((s - base)/eps - c): base is a score, so that no digits are lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops._shared.arguments import accumulator, beside_rows, by_rows, column, from_rows, valid_entries, wide_rows

KINDS = ("capped_exp", "sigmoid", "laplace", "clamp")
# a c that saturates every gate
ALL_ONES = -1e30
# accepted relative error of a sum of gates; eps from the threshold beyond which gates are 0 or 1; scores of a sample
EXACT, FAR, SAMPLE = 1e-14, 800.0, 64


def gate(u: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return φ(u) and its slope."""
    if kind == "capped_exp":
        y = u.clamp(max=0).exp()
        return y, torch.where(u <= 0, y, 0.0)
    if kind == "clamp":
        return (u + 0.5).clamp(0, 1), (u.abs() < 0.5).to(u.dtype)
    e = u.abs().neg().exp()
    if kind == "sigmoid":
        return torch.where(u < 0, e, 1.0) / (1 + e), e / (1 + e).square()
    return torch.where(u < 0, 0.5 * e, 1 - 0.5 * e), 0.5 * e


def _offsets(s: Tensor, base: Tensor, eps: Tensor) -> Tensor:
    """Return (s - base)/eps; where base is +inf, scores of +inf share k: 0 for them, -inf for all others."""
    x = torch.where(s.isinf(), s, (s.masked_fill(s.isinf(), 0.0) - base) / eps)
    return torch.where(base == math.inf, torch.where(s == math.inf, 0.0, -math.inf), x)


def _newton(
    x: Tensor, k: Tensor, n: Tensor, kind: str, c: Tensor, lo: Tensor | float, passes: int
) -> tuple[Tensor, Tensor]:
    """Solve Σ φ(x - c) = k between lo and FAR by Newton's steps and bisection; return c, and which rows are solved.

    A row that is solved keeps its bits while others go on.
    """
    done, side = k.isnan(), torch.where(k < 0.5 * n, 0.0, n)
    lo, hi = torch.full_like(c, 1.0) * lo, torch.full_like(c, FAR)
    for i in range(passes):
        y, w = gate(x - c, kind)
        total, slope = row_sum(y), row_sum(w)
        done = done | ((total - k).abs() <= EXACT * k)
        # on a GPU the host does not wait for this
        if not x.is_cuda and bool(done.all()):
            break
        too_low = total >= k
        lo, hi = torch.where(too_low, c, lo), torch.where(too_low, hi, c)
        # far from the root gates are like exponentials: Newton on the logarithm of the smaller side
        ratio = (total - side) / (k - side)
        far = (ratio - 1).abs() > (math.inf if kind == "clamp" else 0.1)
        next_c = c + torch.where(far, (total - side) * ratio.log(), total - k) / slope
        next_c = torch.where((next_c > lo) & (next_c < hi) & (i < 16 or i % 2 == 0), next_c, 0.5 * lo + 0.5 * hi)
        done = done | (next_c == c)
        c = torch.where(done, c, next_c)
    return c, done


def solve(s: Tensor, k: Tensor, eps: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (base, c) of rows s (R, n), -inf where masked, with k and eps (R, 1), all in float64.

    With base +inf, scores of +inf share k; c saturates all gates where k is not below their number.
    """
    valid, n_infinite = s != -math.inf, (s == math.inf).sum(-1, keepdim=True)
    shared = (n_infinite > 0) & (n_infinite >= k)
    n = torch.where(shared, n_infinite, valid.sum(-1, keepdim=True)).to(s.dtype)
    poisoned = ~((k > 0) & (eps > 0)) | s.isnan().any(-1, keepdim=True)
    full = k >= n
    k = torch.where(full | poisoned, math.nan, k)
    sample = s[:, :: max(1, s.shape[-1] // SAMPLE)].sort(dim=-1, descending=True).values
    rank = (k * (sample.shape[-1] / s.shape[-1])).nan_to_num(0.0).long().clamp(0, sample.shape[-1] - 1)
    guess = sample.gather(-1, rank)
    base = torch.where(shared, math.inf, torch.where(guess.isfinite(), guess, 0.0))
    c, solved = _newton(_offsets(s, base, eps), k, n, kind, torch.zeros_like(k), -FAR, 16)
    solved &= shared | (c.abs() <= 32) | k.isnan()
    if s.is_cuda or not bool(solved.all()):
        # the threshold is at most FAR eps above the k-th score and FAR below the following one; on a GPU for all rows
        at = torch.arange(len(s), device=s.device) if s.is_cuda else (~solved[:, 0]).nonzero()[:, 0]
        scores, of_k, of_eps = s[at], k[at], eps[at]
        top = scores.sort(dim=-1, descending=True).values
        kth, following = (top.gather(-1, i.long().clamp(0, s.shape[-1] - 1)) for i in (of_k.ceil() - 1, of_k.floor()))
        lo = (following - kth) / of_eps - FAR
        new_c, _ = _newton(_offsets(scores, kth, of_eps), of_k, n[at], kind, torch.zeros_like(lo), lo, 160)
        base = torch.where(solved, base, base.index_copy(0, at, kth))
        c = torch.where(solved, c, c.index_copy(0, at, new_c))
    c = torch.where(poisoned, math.nan, torch.where(full, ALL_ONES, c))
    return base, c


def definition(
    scores: Tensor, k: Tensor | float, *, eps: Tensor | float = 0.3, mask: Tensor | None = None,
    kind: str = "capped_exp",
) -> Tensor:  # fmt: skip
    """Return φ((s - base)/eps - c) with Σ = k; how c follows s, k and eps is the implicit function theorem."""
    if not scores.numel():
        return scores * 1
    lead, valid = scores.shape[:-1], valid_entries(scores, mask)
    k, eps = beside_rows(k, scores), beside_rows(eps, scores)
    s = torch.where(valid, scores, -math.inf)
    with torch.no_grad():
        rows, k_rows, eps_rows = (t.detach().reshape(-1, t.shape[-1]).double() for t in (s, k, eps))
        base, c = (t.view(*lead, 1).to(s.dtype) for t in solve(rows, k_rows, eps_rows, kind))
    u = _offsets(s, base, eps) - c
    y, w = gate(u, kind)
    slope = w.sum(-1, keepdim=True).detach()
    shift = torch.where(slope > 0, (y.sum(-1, keepdim=True) - k) / torch.where(slope > 0, slope, 1.0), 0.0)
    return gate(u - shift, kind)[0]


def forward(
    scores: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None, k_value: float, eps_value: float,
    kind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return gates and solution (..., 2)."""

    def of_rows(s: Tensor, k: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        base, c = solve(s, k, eps, KINDS[kind])
        y, _ = gate(_offsets(s, base, eps) - c, KINDS[kind])
        return y.to(scores.dtype), torch.cat((base, c), -1).to(accumulator(scores))

    s = wide_rows(scores, mask)
    if not s.numel():
        return torch.empty_like(scores), s.new_zeros((*scores.shape[:-1], 2), dtype=accumulator(scores))
    y, state = by_rows(of_rows, s, column(k, k_value, s), column(eps, eps_value, s))
    return from_rows(y, scores), state.view(*scores.shape[:-1], 2)


def backward(
    gy: Tensor, scores: Tensor, k: Tensor | None, eps: Tensor | None, mask: Tensor | None, state: Tensor,
    k_value: float, eps_value: float, kind: int, *_: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return ds (rows, n), dk and deps (rows, 1) by the implicit function theorem."""

    def of_rows(s: Tensor, gy: Tensor, eps: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        u = _offsets(s, state[:, :1], eps) - state[:, 1:]
        _, w = gate(u, KINDS[kind])
        # an upstream inf or NaN has no effect where the gate is constant
        gw, wu = torch.where(w > 0, gy * w, 0.0), torch.where(w > 0, w * u, 0.0)
        total = row_sum(w)
        q = torch.where(total == 0, 0.0, row_sum(gw) / total)
        deps = row_sum(torch.where(w > 0, (q - gy) * wu, 0.0)) / eps
        return ((gw - q * w) / eps).to(scores.dtype), q, deps

    s = wide_rows(scores, mask)
    return by_rows(of_rows, s, gy.reshape(s.shape).double(), column(eps, eps_value, s), state.reshape(-1, 2).double())
