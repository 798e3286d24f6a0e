"""Scores that span any number of orders of magnitude: rows sum to k, and gates are those of float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops.soft_topk.op import KINDS

pytestmark = pytest.mark.skipif(INTERPRET, reason="a hundred passes over a thousand rows")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# two of each kind of row in every run, four more in the slow one
SEEDS = [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 48))]


def hostile(seed: int, n: int, generator: torch.Generator) -> Tensor:
    """(n,) fp32: Cauchy, outliers, two groups, ties, every magnitude, few levels, a huge pair, a step."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    normal, u = torch.randn(n, generator=generator, dtype=torch.float64), uniform(n)
    scale = 10 ** (12 * uniform(1) - 4)
    few = max(1, n // 3)
    pair = 1e-3 * normal
    pair[0], pair[-1] = 1e30, -1e30
    outliers = normal.clone()
    outliers[:few] *= 10 ** (30 * uniform(1))
    rows = (
        (math.pi * (u - 0.5)).tan() * scale,
        outliers,
        normal * 10 ** (4 * uniform(1) - 3) + (u > uniform(1)) * 10 ** (32 * uniform(1) - 2),
        (2 * normal).round() * scale,
        normal.sign() * 10 ** (60 * u - 30),
        (4 * u).floor() * 10 ** (30 * uniform(1) - 3),
        pair,
        normal + 1e7 * scale * (u > 0.5) + 1e7 * (uniform(1) - 0.5),
    )
    return rows[seed % len(rows)].float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_sum_to_k_whatever_the_scores(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(5, 300, (1,), generator=generator))
    if device == "cuda":
        # a few widths, that few kernels be compiled: several rows of a program's, one, a wide one, a team's
        n = (48, 272, 5008, 40000)[seed // 8 % 4]
    s = hostile(seed, n, generator)
    eps = 10 ** (-4 * torch.rand(1, generator=generator)).item()
    descending = s.sort(descending=True).values
    # as many as lie above the widest gap, and beside that
    gap = int((descending[:-1] - descending[1:]).argmax()) + 1
    k = torch.tensor([0.01 * n + 0.3, n / 8, 0.7 * n, gap, gap + 0.5, gap + 1e-3], dtype=torch.float64)
    k = k[k < n]
    s = s.expand(len(k), n)
    for kind in KINDS:
        y = onepass.soft_topk(s.to(device), k.to(device), eps=eps, kind=kind).double().cpu()
        assert ((y.sum(-1) - k).abs() <= 1e-6 * k).all(), (kind, n, k, gap, eps)
        exact = onepass.soft_topk(s.double(), k, eps=eps, kind=kind)
        assert ((exact.sum(-1) - k).abs() <= 1e-9 * k).all(), (kind, n, k, gap, eps)
        # what a sum may be off (1e-6 k, and k itself is rounded to fp32) can be the gate of a single entry
        assert ((y - exact).abs().amax(-1) <= (1e-6 * k).clamp(min=1e-4)).all(), (kind, n, k, gap, eps)
