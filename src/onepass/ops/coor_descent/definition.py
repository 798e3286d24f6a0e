"""The definition of coor_descent: the tests' oracle; in float64 it runs on a CPU, without Triton, for the longest rows.

The whole state of a row is the threshold θ = -a: entries above it are saturated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.core.sums import row_sum
from onepass.ops._shared.arguments import accumulator, beside_rows, by_rows, column, from_rows, valid_entries, wide_rows


def schedule(n_iters: int, eps: float, eps_init: float | None, eps_decay: float) -> list[float]:
    """Return the eps of each of the T steps, then that of the final gates."""
    epsilons = [max(eps if eps_init is None else eps_init, eps)]
    for _ in range(n_iters):
        epsilons.append(max(epsilons[-1] * eps_decay, eps))
    return epsilons


def _steps(s: Tensor, k: Tensor, epsilons: list[float]) -> tuple[Tensor, Tensor]:
    """Return gates (..., n) and the thresholds of all steps (..., T); s is -inf where masked, k (..., 1)."""
    valid = s != -math.inf
    count = valid.sum(-1, keepdim=True)
    # in a row without valid entries zeros take part; their gates are 0
    inside = valid | (count == 0)
    s = torch.where(valid, s, 0.0)
    levels = [epsilons[0] * (count.clamp(min=1).to(s.dtype).log() - k.log())]
    for eps in epsilons[1:-1]:
        x = torch.where(inside, torch.where(s > levels[-1], levels[-1], s), -math.inf) / eps
        top = x.detach().amax(-1, keepdim=True)
        levels.append(eps * (row_sum((x - top).exp()).log() + top - k.log()))
    y = ((s - levels[-1]) / epsilons[-1]).clamp(max=0).exp()
    return torch.where(valid, y, 0.0), torch.cat(levels, -1)


def definition(
    scores: Tensor, *, n_iters: int, k: Tensor | float, eps: float = 0.1, eps_init: float | None = None,
    eps_decay: float = 1.0, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Repeat θ ← eps·(logsumexp(min(s, θ)/eps) - log k), T times; y = exp(min(s - θ, 0)/eps)."""
    if not scores.numel():
        return scores * 1
    s = torch.where(valid_entries(scores, mask), scores, -math.inf)
    return _steps(s, beside_rows(k, scores), schedule(n_iters, eps, eps_init, eps_decay))[0]


def forward(
    scores: Tensor, k: Tensor | None, mask: Tensor | None, k_value: float, n_iters: int, eps: float, eps_init: float,
    eps_decay: float, want_trace: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return gates and trace (..., 2T): the thresholds, each as its nearest number and the rest."""
    epsilons, dtype = schedule(n_iters, eps, eps_init, eps_decay), accumulator(scores)

    def of_rows(s: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        y, levels = _steps(s, k, epsilons)
        rest = (levels - levels.to(dtype)).nan_to_num(nan=0.0)
        return y.to(scores.dtype), torch.cat((levels, rest), -1).to(dtype)

    s, lead = wide_rows(scores, mask), scores.shape[:-1]
    if not s.numel():
        return torch.empty_like(scores), s.new_zeros((*lead, 2 * n_iters * want_trace), dtype=dtype)
    y, trace = by_rows(of_rows, s, column(k, k_value, s))
    return from_rows(y, scores), trace.view(*lead, -1) if want_trace else trace.new_empty((*lead, 0))


def backward(
    gy: Tensor, scores: Tensor, k: Tensor | None, mask: Tensor | None, trace: Tensor, k_value: float, n_iters: int,
    eps: float, eps_init: float, eps_decay: float, *_: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ds (rows, n) and dk (rows, 1) by a recursion over the steps, from the last to the first."""
    epsilons = schedule(n_iters, eps, eps_init, eps_decay)

    def of_rows(s: Tensor, gy: Tensor, k: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        x = (s - level[:, -1:]) / epsilons[-1]
        # an upstream inf or NaN has no effect where the gate is constant
        ds = torch.where((x <= 0) & (x.exp() > 0), gy * x.exp() / epsilons[-1], 0.0)
        da, dk = ds.sum(-1, keepdim=True), torch.zeros_like(k)
        for t in range(n_iters - 1, 0, -1):
            level_t, level_before, share = level[:, t : t + 1], level[:, t - 1 : t], da / k
            dk += epsilons[t] * share
            ds -= torch.where(s <= level_before, share * ((s - level_t) / epsilons[t]).exp(), 0.0)
            saturated = (s > level_before).sum(-1, keepdim=True)
            da = torch.where(saturated > 0, share * saturated * ((level_before - level_t) / epsilons[t]).exp(), 0.0)
        return ds.to(scores.dtype), dk + epsilons[0] * da / k

    s = wide_rows(scores, mask)
    pairs = trace.reshape(len(s), 2 * n_iters).double()
    levels = pairs[:, :n_iters] + pairs[:, n_iters:]
    return by_rows(of_rows, s, gy.reshape(s.shape).double(), column(k, k_value, s), levels)  # type: ignore[return-value]
