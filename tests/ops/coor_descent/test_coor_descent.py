"""coor_descent against the published eager code in float64: values, gradients, schedules, masks, tensor k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
from onepass.core.launch import INTERPRET
from onepass.ops._shared import arguments

theirs = pytest.importorskip("colt5_attention.coor_descent").coor_descent

SCHEDULES: list[dict[str, Any]] = [
    {"n_iters": 1, "eps": 0.1},
    {"n_iters": 2, "eps": 0.1},
    {"n_iters": 50, "eps": 0.1},
    {"n_iters": 20, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},
    {"n_iters": 6, "eps": 0.03, "eps_init": 4.0, "eps_decay": 0.7},  # never arrives at eps
    {"n_iters": 20, "eps": 1.0, "eps_init": 4.0, "eps_decay": 0.95},
    {"n_iters": 15, "eps": 0.5, "eps_init": 0.1},  # eps_init below eps is eps
    {"n_iters": 30, "eps": 0.002},
]


def _kinks(s: Tensor, k: Tensor | float, options: dict[str, Any], mask: Tensor | None) -> Tensor:
    """Smallest distance of a row's scores from a kink, relative to eps: beside one, two roundings may disagree."""
    schedule = [max(options.get("eps_init", options["eps"]), options["eps"])]
    rows = k[..., None] if isinstance(k, Tensor) else torch.tensor(k, dtype=s.dtype)
    b, nearest = -s, torch.full(s.shape[:-1], torch.inf, dtype=s.dtype)
    low = -torch.finfo(s.dtype).max
    for t in range(options["n_iters"]):
        x = (s + b) / schedule[t]
        x = x if mask is None else x.masked_fill(~mask, low)
        a = schedule[t] * (rows.log() - x.logsumexp(-1, keepdim=True))
        b, gap = -(s + a).relu(), (s + a).abs() / schedule[t]
        gap = gap if mask is None else gap.masked_fill(~mask, torch.inf)
        nearest = torch.minimum(nearest, gap.amin(-1))
        schedule.append(max(schedule[t] * options.get("eps_decay", 1.0), options["eps"]))
    return nearest


@pytest.mark.skipif(INTERPRET, reason="float64 never reaches a kernel")
@pytest.mark.parametrize("shift", [0.0, -3.0, 2.0])
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: "-".join(f"{v}" for v in o.values()))
def test_float64_is_the_published_iteration(options: dict[str, Any], per_row: bool, masked: bool, shift: float) -> None:
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        s = (torch.randn(3, 60, generator=generator, dtype=torch.float64) + shift).requires_grad_()
        mask = torch.rand(3, 60, generator=generator) > 0.3 if masked else None
        k = torch.tensor([1.5, 7.25, 40.0], dtype=torch.float64, requires_grad=True) if per_row else 7.25
        inputs = (s, k) if isinstance(k, Tensor) else (s,)
        gy = torch.randn(3, 60, generator=generator, dtype=torch.float64)
        actual = onepass.coor_descent(s, k=k, mask=mask, **options)
        expected = theirs(s, k=k, mask=mask, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        away = _kinks(s.detach(), k.detach() if isinstance(k, Tensor) else k, options, mask) > 1e-9
        assert away.any()
        gy = gy * away[:, None]
        for a, e in zip(
            torch.autograd.grad(actual, inputs, gy), torch.autograd.grad(expected, inputs, gy), strict=True
        ):
            torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-8)


def test_scores_that_may_not_be_chosen() -> None:
    """-inf is a mask; a row without candidates is 0 and has no gradient; NaN there says nothing."""
    s = torch.randn(3, 12, requires_grad=True)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0] = False
    mask[1, 5:] = False
    y = onepass.coor_descent(s, n_iters=9, k=2, mask=mask)
    filled = torch.where(mask, s, float("-inf"))
    assert torch.equal(y, onepass.coor_descent(filled, n_iters=9, k=2))
    assert not y[0].any()
    assert not y[1, 5:].any()
    (ds,) = torch.autograd.grad(y, s, torch.where(mask, 1.0, torch.nan))
    assert not ds[~mask].any()
    assert ds.isfinite().all()
    poisoned = torch.where(mask, s, torch.nan)
    assert torch.equal(onepass.coor_descent(poisoned, n_iters=9, k=2, mask=mask), y)


def test_nan_and_infinite_scores() -> None:
    s = torch.randn(3, 12)
    s[0, 3] = torch.nan
    s[1, 4] = torch.inf
    y = onepass.coor_descent(s, n_iters=9, k=2)
    assert y[0].isnan().all()
    assert y[1, 4] == 1
    assert y[1:].isfinite().all()


@pytest.mark.skipif(INTERPRET, reason="a CPU's")
def test_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as all at once, with a k of their own and the gradient of it."""
    s, k = torch.randn(5, 30, requires_grad=True), torch.tensor([2.5, 17.0, 20.0, 1.0, 8.0], requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        y = onepass.coor_descent(s, k=k, **SCHEDULES[3])
        return y, *torch.autograd.grad(y.square().sum(), (s, k))

    whole = run()
    monkeypatch.setattr(arguments, "AT_ONCE", 64)
    assert all(map(torch.equal, whole, run()))


@pytest.mark.interpret
@pytest.mark.parametrize("options", SCHEDULES[2:4], ids=["constant", "schedule"])
def test_backward_of_long_rows_in_chunks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a length that the interpreter can bear."""
    from onepass.ops._shared import kernels_rows
    from onepass.ops.coor_descent import kernels

    monkeypatch.setattr(kernels_rows, "CHUNK", 1024)
    for module in (kernels_rows, kernels):
        monkeypatch.setattr(module, "TILE", 1024)
    monkeypatch.setattr(kernels, "BACKWARD_MAX_COLS", 256)
    s = torch.randn(3, 3000, requires_grad=True)
    k = torch.tensor([2.5, 100.3, 700.0], requires_grad=True)
    mask = torch.arange(3000) % 50 != 7
    y = onepass.coor_descent(s, k=k, mask=mask, **options)
    wide = [t.detach().double().requires_grad_() for t in (s, k)]
    expected = theirs(wide[0], k=wide[1], mask=mask, **options)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    gy = torch.randn(3, 3000) * (_kinks(wide[0].detach(), wide[1].detach(), options, mask) > 1e-5)[:, None]
    for a, e in zip(torch.autograd.grad(y, (s, k), gy), torch.autograd.grad(expected, wide, gy.double()), strict=True):
        assert (a - e).abs().max() <= 1e-4 * max(1.0, e.abs().max().item())
