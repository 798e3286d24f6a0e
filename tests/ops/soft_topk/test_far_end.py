"""k near the number of scores: what is solved for is told from thousands of gates near 1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import onepass
from conftest import INTERPRET
from onepass.ops.soft_topk.op import KINDS
from ops.soft_topk.test_properties import solved

SCORES = ("normal", "linspace", "ties", "plateau", "bimodal", "shifted", "low")
# the largest gap to a gate of float64 for the same scores, k and eps, both as float32 holds them
LARGEST = 1e-4


def scores(name: str, n: int) -> Tensor:
    """(n,) fp32."""
    normal = torch.randn(n, generator=torch.Generator().manual_seed(n))
    low = torch.linspace(-1, 0, 12)
    return {
        "normal": normal,
        "linspace": torch.linspace(-3, 3, n),
        "ties": (2 * normal).round(),
        # ten scores around thousands of equal ones
        "plateau": torch.cat((1 + 0.3 * normal[:10], torch.ones(n - 10))),
        "bimodal": normal + 20 * (normal.roll(1) > 0.8),
        "shifted": normal + 1000,
        # a dozen scores below thousands of equal ones
        "low": torch.cat((low, torch.full((n - 12,), 0.05))),
    }[name]


@pytest.mark.parametrize(
    ("device", "n", "kind"),
    # one row of a program's under Triton's interpreter, where each kind takes ten seconds: two of them in every run
    [pytest.param("cpu", 16384, k, marks=[pytest.mark.slow] * (INTERPRET and k in ("sigmoid", "laplace")))
     for k in KINDS]
    # a row of a program's, of a team's, and one that no team can hold
    + [pytest.param("cuda", n, kind, marks=pytest.mark.gpu)
       for n in (1024, 8192, 32768, 100000, 200000, 3 << 20) for kind in KINDS],
)  # fmt: skip
def test_gates(device: str, n: int, kind: str) -> None:
    k = torch.tensor([n / 2 + 0.25, 0.9 * n, n - 5, n - 1, n - 0.5])
    for eps in (1e-3, 1.0) if INTERPRET else (1e-3, 0.03, 1.0):
        given = torch.tensor(eps)
        for name in SCORES:
            s = scores(name, n).to(device)
            y = onepass.soft_topk(s.expand(len(k), n), k.to(device), eps=given.to(device), kind=kind)
            for row, of_k in zip(y, k.double().tolist(), strict=True):
                error = (row.double() - solved(s, of_k, given.double().item(), kind)).abs().max().item()
                assert error <= LARGEST, f"{name}, n = {n}, k = {of_k}, eps = {eps}: {error:.1e}"


def between(n: int, kind: str) -> tuple[Tensor, float, float]:
    """Scores (n,), k and eps whose threshold lies where n - 10 equal scores begin to saturate, within their roundings.

    There the sum of gates, as fp32 has it, jumps over k: what it lacks on either side is no distance to the threshold.
    """
    high = torch.full((5,), 1.3)
    if kind == "capped_exp":
        # five gates that sum to a little more than 4, which n - 10 gates make up for, a millionth each
        low = torch.full((5,), 1 + math.log((4 + 1e-6 * n) / 5))
        return torch.cat((high, low, torch.ones(n - 10))), n - 1.0, 1.0
    # four gates of 0, one of a hundredth of an ulp per equal score
    gate = 0.3e-7 * n
    low = torch.tensor([0.5, 0.5, 0.5, 0.5, 1 - 0.03 * (1 - gate)])
    return torch.cat((high, low, torch.ones(n - 10))), n - 5.0, 0.03


@pytest.mark.parametrize(
    ("device", "n"),
    [("cpu", 16384), *(pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (16384, 100000, 3 << 20))],
)
@pytest.mark.parametrize("kind", ["capped_exp", "clamp"])
def test_many_equal_scores_at_the_edge_of_saturation(kind: str, device: str, n: int) -> None:
    s, k, eps = between(n, kind)
    y = onepass.soft_topk(s.to(device), k, eps=eps, kind=kind).cpu()
    assert (y.double() - solved(s, k, eps, kind)).abs().max() <= LARGEST


@pytest.mark.parametrize("kind", ["sigmoid", "laplace", "clamp"])
def test_mask_and_a_k_for_each_row(kind: str) -> None:
    n = 16384
    mask = torch.arange(n) % 8 != torch.tensor([[0], [1], [2], [3]])
    valid = n - n // 8
    k = torch.tensor([valid - 1.0, valid - 0.5, valid - 0.0625, valid])
    for name, eps in (("normal", 1 / 64), ("ties", 1 / 32), ("bimodal", 1 / 64), ("shifted", 1 / 1024)):
        s = scores(name, n).expand(4, n)
        y = onepass.soft_topk(s, k, eps=eps, mask=mask, kind=kind)
        assert not y[~mask].any()
        assert (y[3, mask[3]] == 1).all()
        for i in range(3):
            expected = solved(s[i, mask[i]], k[i].item(), eps, kind)
            assert (y[i, mask[i]].double() - expected).abs().max() <= LARGEST, (name, i)


@pytest.mark.parametrize("kind", ["sigmoid", "laplace"])
def test_gradients(kind: str) -> None:
    """They know the threshold from forward: what gates are off by, φ' is off by as well."""
    s, k, eps = scores("low", 16384).requires_grad_(), torch.tensor(16379.5, requires_grad=True), torch.tensor(0.125)
    eps.requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (s, k, eps)]
    gy = torch.randn(16384, generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad(onepass.soft_topk(s, k, eps=eps, kind=kind), (s, k, eps), gy)
    expected = torch.autograd.grad(onepass.soft_topk(wide[0], wide[1], eps=wide[2], kind=kind), wide, gy.double())
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= LARGEST * max(1.0, e.abs().max().item())
