"""What must hold for soft_topk whatever the scores: by hypothesis in float64 on a CPU; special scores everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.soft_topk.op import KINDS

# what a search of the threshold meets, from harmless to hostile
NAMES = ("normal", "uniform", "cauchy", "constant", "ties", "bimodal", "exponential", "wide", "outlier", "sorted")


def draw(name: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """(rows, cols) in float64."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    uniform = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    if name == "outlier":
        normal[:, 0] = 1e5
    return {
        "normal": normal, "uniform": uniform, "cauchy": (math.pi * (uniform - 0.5)).tan(), "ties": (2 * normal).round(),
        "constant": torch.full_like(normal, 3.0), "bimodal": normal + 20 * (uniform > 0.8), "wide": 1e4 * normal,
        "exponential": -(1 - uniform).log(), "outlier": normal, "sorted": normal.sort(dim=-1).values,
    }[name]  # fmt: skip


class Problem(NamedTuple):
    scores: Tensor
    k: Tensor  # per row, between whole numbers: hard gates have a kink at them
    eps: float
    mask: Tensor | None
    kind: str

    def gates(self, scores: Tensor | None = None, k: Tensor | None = None, eps: float | None = None) -> Tensor:
        return onepass.soft_topk(
            self.scores if scores is None else scores, self.k if k is None else k,
            eps=self.eps if eps is None else eps, mask=self.mask, kind=self.kind,
        )  # fmt: skip

    def valid(self) -> Tensor:
        return torch.ones_like(self.scores, dtype=torch.bool) if self.mask is None else self.mask


def problem(seed: int, rows: int, cols: int, name: str, share: float, eps: float, masked: bool, kind: str) -> Problem:
    # multiples of 1/64 below 2^14: every shift and scale below is exact, so only the operator can err
    scores = ((draw(name, rows, cols, seed).clamp(-4096, 4096) * 64).round() / 64).float().double()
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, cols, generator=generator) > 0.3 if masked else None
    spread = torch.arange(rows, dtype=torch.float64) / (4 * rows)
    k = (share * cols * (1 - spread)).floor() + 0.3
    return Problem(scores, k, eps, mask, kind)


problems = st.builds(
    problem, st.integers(0, 2**20), st.just(3), st.integers(2, 60), st.sampled_from(NAMES), st.floats(0.02, 0.97),
    st.sampled_from([0.03, 0.1, 1.0, 10.0]), st.booleans(), st.sampled_from(KINDS),
)  # fmt: skip


# φ as the README has it, not as the definition computes it
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "capped_exp": lambda u: u.clamp(max=0).exp(),
    "sigmoid": torch.sigmoid,
    "laplace": lambda u: torch.where(u < 0, u.exp() / 2, 1 - u.neg().exp() / 2),
    "clamp": lambda u: (u + 0.5).clamp(0, 1),
}


def solved(s: Tensor, k: float, eps: float, kind: str) -> Tensor:
    """Gates (n,) in float64, by bisection on Σ y - k as a count and what gates differ from 0 and 1 by."""
    s, gate = s.double(), GATES[kind]
    if k >= len(s):
        return torch.ones_like(s)
    lo, hi = s.min() - 60 * eps, s.max() + 60 * eps
    for _ in range(60):
        middle = (lo + hi) / 2
        u = (s - middle) / eps
        if kind == "capped_exp":
            high = gate(u).sum() >= k
        else:
            lacking = gate(-u.abs())
            high = (u > 0).double().sum() - k + torch.where(u > 0, -lacking, lacking).sum() >= 0
        lo, hi = torch.where(high, middle, lo), torch.where(high, hi, middle)
    return gate((s - (lo + hi) / 2) / eps)


def check_values(p: Problem) -> None:
    y, valid = p.gates(), p.valid()
    assert not y[~valid].any()
    for row, scores, k, chosen in zip(y, p.scores, p.k.tolist(), valid, strict=True):
        expected = solved(scores[chosen], k, p.eps, p.kind)
        torch.testing.assert_close(row[chosen], expected, rtol=0, atol=1e-9)
        assert expected.sum() == pytest.approx(min(k, len(expected)), rel=1e-9)


def slopes(y: Tensor, kind: str) -> Tensor:
    """φ' as a function of φ, which every kind allows."""
    if kind == "capped_exp":
        return torch.where(y < 1, y, 0.0)
    if kind == "sigmoid":
        return y * (1 - y)
    if kind == "laplace":
        return torch.minimum(y, 1 - y)
    return ((y > 0) & (y < 1)).double()


def check_gradients(p: Problem) -> None:
    """Σds = 0, dk = q, and ds = w·(gy - q)/eps with the w that the gates themselves tell."""
    s, k = p.scores.clone().requires_grad_(), p.k.clone().requires_grad_()
    y = p.gates(s, k)
    gy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y)
    ds, dk = (g.double() for g in torch.autograd.grad(y, (s, k), gy))
    assert (ds.sum(-1).abs() <= 1e-6 * (1 + ds.abs().sum(-1))).all()
    w = slopes(y.detach().double(), p.kind)
    w[p.k >= p.valid().sum(-1)] = 0
    # gates that underflow tell nothing about a quotient of two of them
    total = w.sum(-1)
    plain = (total > 1e-3) | (total == 0)
    q = (gy.double() * w).sum(-1) / total.clamp(min=1e-3)
    torch.testing.assert_close(dk[plain], q[plain], rtol=1e-6, atol=1e-5)
    expected = w * (gy.double() - q[:, None]) / p.eps
    torch.testing.assert_close(ds[plain], expected[plain], rtol=1e-6, atol=1e-5 / p.eps)


@pytest.mark.skipif(INTERPRET, reason="float64 never reaches a kernel")
@pytest.mark.parametrize("check", [check_values, check_gradients])
@settings(max_examples=60)
@given(p=problems)
def test_on_cpu(p: Problem, check: Callable[[Problem], None]) -> None:
    check(p)


specials = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e4, -1e4, 1e-40, 1.5])


@settings(max_examples=30 if INTERPRET else 100)
@given(st.lists(specials, min_size=1, max_size=12), st.floats(0.1, 14), st.sampled_from(KINDS))
def test_special_scores_end_and_mean_what_they_say(values: list[float], k: float, kind: str) -> None:
    leaf = torch.tensor(values, requires_grad=True)
    y, s = onepass.soft_topk(leaf, k, kind=kind), leaf.detach()
    (ds,) = torch.autograd.grad(y, leaf, torch.randn(len(s)))
    y = y.detach()
    if s.isnan().any():
        assert y.isnan().all()
        return
    assert ds.isfinite().all()
    assert not y[s == -math.inf].any()
    candidates = int((s > -math.inf).sum())
    assert y.double().sum().item() == pytest.approx(min(k, candidates), rel=2e-6, abs=1e-30)
    endless = s == math.inf
    if endless.any():
        share = min(1.0, k / int(endless.sum()))
        assert y[endless].tolist() == pytest.approx([share] * int(endless.sum()), rel=1e-6)


# whole rows, several to a program and one; rows in chunks
GPU_WIDTHS = (60, 1000, 8192, 32768, 100003)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", GPU_WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_special_rows_on_gpu(cols: int, kind: str) -> None:
    """NaN poisons its row alone and ends; +inf is saturated or shares k; -inf is never chosen."""
    s = torch.randn(7, cols, device="cuda")
    k = 5.5
    clean = onepass.soft_topk(s, k, kind=kind)
    # (no multiple of four: a guess may look at every fourth column)
    s[1, cols // 2 + 1] = math.nan
    s[2] = math.nan
    s[3, :3] = math.inf
    s[4, : 2 * 11] = math.inf
    s[5, 4:] = -math.inf
    s[6] = -math.inf
    leaf = s.clone().requires_grad_()
    y = onepass.soft_topk(leaf, k, kind=kind)
    (ds,) = torch.autograd.grad(y, leaf, torch.randn_like(y))
    torch.cuda.synchronize()
    y = y.detach()
    assert torch.equal(y[0], clean[0])
    assert y[1:3].isnan().all()
    assert (y[3, :3] == 1).all()
    assert y[3].double().sum().item() == pytest.approx(k, rel=1e-6)
    torch.testing.assert_close(y[4, : 2 * 11], torch.full_like(y[4, : 2 * 11], k / 22))
    assert not y[4, 2 * 11 :].any()
    assert (y[5, :4] == 1).all()
    assert not y[5, 4:].any()
    assert not y[6].any()
    assert ds[[0, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [5, 300, 3000])
def test_a_nan_beside_masked_scores(kind: str, n: int) -> None:
    """Among the valid scores it reaches every gate of its row, masked ones too; under the mask it reaches none."""
    s = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    mask = torch.ones(3, n, dtype=torch.bool)
    mask[:, ::3] = False
    clean = onepass.soft_topk(s, 1.5, mask=mask, kind=kind)
    s[0, 1] = math.nan  # valid
    s[1, 3] = math.nan  # masked
    y = onepass.soft_topk(s, 1.5, mask=mask, kind=kind)
    assert y[0].isnan().all()
    assert torch.equal(y[1:], clean[1:])
    assert not y[1:][~mask[1:]].any()
