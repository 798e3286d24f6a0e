"""The kernels on a GPU: distributions, launch shapes, long rows, no host synchronisation, CUDA graphs, repetitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from harness import waiting_is_an_error
from onepass.ops.soft_topk.op import KINDS
from ops.soft_topk.test_properties import draw

pytestmark = pytest.mark.gpu

ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
# one program for several rows, a row per program up to the largest, the first that is cut into chunks, a million
WIDTHS = (1, 3, 17, 64, 100, 1000, 1024, 5000, 8192, 16384, 16385, 32768, 32769, 100003, 1 << 20)
DESCENTS: list[dict[str, Any]] = [
    {"n_iters": 50, "eps": 0.1},
    {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
]


@pytest.mark.parametrize("n", WIDTHS)
@ALL_KINDS
def test_soft_topk_at_every_launch_shape(n: int, masked: bool, kind: str) -> None:
    """Against float64; twenty calls have the same bits."""
    s = torch.cat([draw(name, 1, n) for name in ("normal", "ties", "bimodal")]).float().cuda().requires_grad_()
    k = torch.tensor(0.3 * n + 0.123, device="cuda", requires_grad=True)
    eps = torch.tensor([0.5, 0.7, 1.1], device="cuda", requires_grad=True)
    mask = torch.rand(3, n, generator=torch.Generator().manual_seed(n)) > 0.3 if masked else None
    wide = [t.detach().cpu().double().requires_grad_() for t in (s, k, eps)]
    expected = onepass.soft_topk(wide[0], wide[1], eps=wide[2], mask=mask, kind=kind)
    clear = torch.ones(3, n, dtype=torch.bool)
    if kind == "clamp":  # its slope ends at 0 and 1: beside them fp32 may put a score on the other side
        u = (wide[0] / wide[2][:, None]).detach()
        gate = u - torch.where((expected > 0) & (expected < 1), u - expected, -torch.inf).amax(-1, keepdim=True)
        clear = torch.minimum(gate.abs(), (gate - 1).abs()) > 1e-4
    gy = torch.randn(3, n, dtype=torch.float64) * clear
    exact = [expected, *torch.autograd.grad(expected, wide, gy)]
    mask, upstream = mask if mask is None else mask.cuda(), gy.float().cuda()

    def run() -> list[Tensor]:
        y = onepass.soft_topk(s, k, eps=eps, mask=mask, kind=kind)
        return [y, *torch.autograd.grad(y, (s, k, eps), upstream)]

    first = run()
    torch.testing.assert_close(first[0].cpu().double(), exact[0], rtol=1e-5, atol=1e-5)
    for a, e, told in zip(first[1:], exact[1:], (clear, True, True), strict=True):
        assert ((a.cpu().double() - e).abs() * told).max() <= 1e-4 * max(1.0, e.abs().max().item())
    for _ in range(20):
        assert all(map(torch.equal, first, run()))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("options", DESCENTS, ids=["constant", "schedule"])
def test_coor_descent_at_every_launch_shape(n: int, options: dict[str, Any]) -> None:
    s = torch.randn(3, n, device="cuda", requires_grad=True)
    k = torch.tensor(0.3 * n + 0.123, device="cuda", requires_grad=True)
    wide = [t.detach().cpu().double().requires_grad_() for t in (s, k)]
    y = onepass.coor_descent(s, k=k, **options)
    expected = onepass.coor_descent(wide[0], k=wide[1], **options)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=3e-5)
    # upstream gradient only where no entry lies beside the last threshold, the sharpest of the kinks
    gy = torch.randn(3, n, dtype=torch.float64) * ((expected < 1 - 1e-3) | (expected == 1))
    actual = torch.autograd.grad(y, (s, k), gy.float().cuda())
    for a, e in zip(actual, torch.autograd.grad(expected, wide, gy), strict=True):
        close = (a.cpu().double() - e).abs() <= 1e-3 * max(1.0, e.abs().max().item())
        # an entry beside an earlier kink may fall to either side
        assert close.double().mean() >= 1 - 3 / max(n, 30)


@pytest.mark.parametrize("n", [1000, 40000])
def test_the_host_never_waits(n: int) -> None:
    s = torch.randn(3, n, device="cuda", requires_grad=True)
    k, eps = torch.full((3,), 20.5, device="cuda", requires_grad=True), torch.tensor(0.3, device="cuda")
    mask = torch.rand(3, n, device="cuda") > 0.2
    gy = torch.randn_like(s)

    def everything() -> None:
        for kind in KINDS:
            torch.autograd.grad(onepass.soft_topk(s, k, eps=eps, mask=mask, kind=kind), (s, k), gy)
        torch.autograd.grad(onepass.coor_descent(s, n_iters=6, k=k, mask=mask), (s, k), gy)
        # chosen in one launch, and sorted by torch
        for n_chosen in (20, min(n, n // 2 + 2500)):
            top = onepass.topk(s, n_chosen, eps=eps, mask=mask)
            torch.autograd.grad(top.gates.sum() + top.values.masked_fill(top.indices < 0, 0).sum(), s)

    everything()
    with waiting_is_an_error():
        everything()


def test_values_that_are_not_looked_into_give_nan() -> None:
    s = torch.randn(3, 50, device="cuda")
    k = torch.tensor([2.0, 0.0, -1.0], device="cuda")
    for y in (onepass.soft_topk(s, k), onepass.coor_descent(s, n_iters=5, k=k)):
        assert y[0].isfinite().all()
        assert y[1:].isnan().all()
    assert onepass.soft_topk(s, 2, eps=torch.zeros(3, device="cuda")).isnan().all()


def test_more_than_2_to_the_31_elements() -> None:
    rows, n = 140000, 16384
    s = torch.randn(1, n, device="cuda", dtype=torch.bfloat16).expand(rows, n)
    y = onepass.soft_topk(s, 1000)
    assert torch.equal(y[-1], y[0])
    assert torch.equal(y[rows // 2], y[0])


@pytest.mark.parametrize("n", [3000, 40000])
def test_nan_poisons_its_row_alone(n: int) -> None:
    """Wherever it is: in any chunk of a team, which goes on to the next row with all the sums it should have."""
    s = torch.randn(240, n, device="cuda")
    rows = torch.arange(1, 240, 2)
    poisoned = s.clone()
    poisoned[rows, rows * (n // 240) + rows % 8 // 2] = torch.nan
    for kind in (*KINDS, "coor_descent"):
        clean, y = (
            onepass.coor_descent(x, n_iters=4, k=5.5, eps=0.3)
            if kind == "coor_descent"
            else onepass.soft_topk(x, 5.5, kind=kind)
            for x in (s, poisoned)
        )
        assert y[1::2].isnan().all(), kind
        assert torch.equal(y[::2], clean[::2]), kind
