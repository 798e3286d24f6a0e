"""Lion as an optimizer: trajectories, options, groups, schedulers, layouts, errors."""

from __future__ import annotations

from typing import Any

import lion_pytorch
import lion_pytorch.cautious_lion
import pytest
import torch

from lion_params import assert_same, clones, make_params, run, set_grads
from onepass.core.launch import INTERPRET
from onepass.ops.lion.reference import join
from onepass.optim import Lion


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("decoupled", [False, True])
def test_is_lion_pytorch_in_float64(foreach: bool | None, weight_decay: float, decoupled: bool) -> None:
    a = make_params(torch.float64)
    b = clones(a)
    theirs = lion_pytorch.Lion(a, lr=1e-2, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
    ours = Lion(b, lr=1e-2, weight_decay=weight_decay, decouple_lr=decoupled, foreach=foreach)
    for _ in range(10):
        run(1, (theirs, a), (ours, b))
        for x, y in zip(a, b, strict=True):
            assert torch.allclose(x, y, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("cautious", [True, 0.25])
@pytest.mark.parametrize("cautious_decay", [False, True])
def test_cautious_is_lion_pytorchs(cautious: float, cautious_decay: bool) -> None:
    a = make_params(torch.float64, [(3, 4), (5,), (40,)])
    b = clones(a)
    theirs = lion_pytorch.cautious_lion.Lion(
        a, lr=1e-2, weight_decay=0.3, cautious_factor=float(cautious is not True) * cautious, cautious_wd=cautious_decay
    )
    ours = Lion(b, lr=1e-2, weight_decay=0.3, cautious=cautious, cautious_weight_decay=cautious_decay)
    run(6, (theirs, a), (ours, b))
    # theirs computes the masked decay in fp32
    tolerance = 1e-7 if cautious_decay else 1e-13
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("foreach", [None, False])
def test_cautious_weight_decay_alone(foreach: bool | None) -> None:
    p = torch.tensor([2.0, -2.0, 2.0], requires_grad=True)
    optimizer = Lion([p], lr=0.5, weight_decay=0.5, cautious_weight_decay=True, foreach=foreach)
    p.grad = torch.tensor([1.0, 1.0, 0.0])
    optimizer.step()
    # towards zero: sign and decay; away: sign alone; no update: no decay
    assert torch.equal(p, torch.tensor([1.0, -2.5, 2.0]))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_bf16_with_remainder_is_fp32_bit_for_bit(foreach: bool | None, state_dtype: torch.dtype) -> None:
    low = make_params(torch.bfloat16)
    full = clones(low, torch.float32)
    ours = Lion(low, lr=3e-6, weight_decay=0.1, low_precision="remainder", state_dtype=state_dtype, foreach=foreach)
    oracle = Lion(full, lr=3e-6, weight_decay=0.1, state_dtype=state_dtype, foreach=foreach)
    for _ in range(12):
        run(1, (ours, low), (oracle, full))
        for p, q in zip(low, full, strict=True):
            assert torch.equal(join(p.detach(), ours.state[p]["remainder"]), q)
            assert ours.state[p]["remainder"].dtype == torch.int16
    assert any(bool((q != p).any()) for p, q in zip(low, full, strict=True))


@pytest.mark.skipif(INTERPRET, reason="thousands of steps; and interpreted conversions to bf16 truncate")
def test_weight_decay_survives_bf16_and_tiny_rates() -> None:
    # a plain bf16 weight can't lose 1e-5 of itself; with a remainder it must
    p = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Lion([p], lr=1e-4, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    for _ in range(2000):
        optimizer.step()
    full = join(p.detach(), optimizer.state[p]["remainder"])
    assert torch.allclose(full - 1, torch.full((1000,), (1 - 1e-5) ** 2000 - 1), rtol=1e-3)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_fp32_decay_at_tiny_lr_times_wd(foreach: bool | None) -> None:
    # 1 − 1e-7 in fp32 is 1 − 1.19e-7: with that factor the weights together would lose 19 % too much
    p = (1 + torch.rand(1 << 16)).requires_grad_()
    before = p.detach().double()
    optimizer = Lion([p], lr=1e-6, weight_decay=0.1, foreach=foreach)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    lost = (before - p.detach().double()).sum() / (before.sum() * 1e-7)
    assert abs(lost - 1) < 0.05
    wrong = (before - (before.float() * (1 - torch.tensor(1e-6) * 0.1)).double()).sum() / (before.sum() * 1e-7)
    assert abs(wrong - 1) > 0.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_differ_in_everything(dtype: torch.dtype) -> None:
    options: list[dict[str, Any]] = [
        {"lr": 1e-2, "betas": (0.8, 0.9)},
        {"lr": 2e-2, "weight_decay": 0.3, "maximize": True},
        {"lr": 1e-1, "decouple_lr": True, "weight_decay": 0.01, "peak_lr": 0.2},
        {"cautious": True},
        {"foreach": False, "cautious_weight_decay": True, "weight_decay": 0.5},
        {"state_dtype": torch.bfloat16},
    ]
    a = make_params(dtype, [(7,), (50,)] * len(options))
    b = clones(a)
    grouped = Lion([{"params": a[2 * i : 2 * i + 2], **o} for i, o in enumerate(options)], lr=1e-3)
    apart = [
        Lion([{"params": b[2 * i : 2 * i + 2], **o}], lr=1e-3)
        for i, o in enumerate(options)
    ]  # fmt: skip
    for _ in range(4):
        set_grads(a, b)
        grouped.step()
        for optimizer in apart:
            optimizer.step()
    assert_same(a, b)


def test_decouple_lr_is_per_group() -> None:
    a = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = Lion([{"params": a[:1], "lr": 0.1}, {"params": a[1:], "lr": 0.01}], weight_decay=0.5, decouple_lr=True)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    for p in a:
        p.grad = torch.zeros(3)
    optimizer.step()
    # half the peak rate: half the decay, whatever the rate is
    assert torch.allclose(a[0], torch.full((3,), 0.75))
    assert torch.allclose(a[1], torch.full((3,), 0.75))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_and_weight_decay(shape: tuple[int, ...]) -> None:
    a = make_params()
    b = clones(a)
    tensors = Lion(a, lr=torch.full(shape, 1e-2), weight_decay=torch.full(shape, 0.25))
    numbers = Lion(b, lr=float(torch.tensor(1e-2)), weight_decay=0.25)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(tensors, 0.5)
    for i in range(3):
        numbers.param_groups[0]["lr"] = float(torch.tensor(1e-2)) * 0.5**i
        run(1, (tensors, a), (numbers, b))
        scheduler.step()
    assert_same(a, b)


def test_a_rate_on_another_device_is_read() -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = Lion([p])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()


def test_lambda_lr_and_edits_of_groups() -> None:
    a = make_params(torch.float64)
    b = clones(a)
    theirs, ours = lion_pytorch.Lion(a, lr=1e-2), Lion(b, lr=1e-2)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)) for o in (theirs, ours)]
    for i in range(6):
        if i == 2:
            for o in (theirs, ours):
                o.param_groups[0]["weight_decay"] = 0.5
        if i == 4:
            extra = torch.randn(4, dtype=torch.float64)
            for o, params in ((theirs, a), (ours, b)):
                params.append(extra.clone().requires_grad_())
                o.add_param_group({"params": [params[-1]], "lr": 0.3})
        run(1, (theirs, a), (ours, b))
        if i < 4:
            for scheduler in schedulers:
                scheduler.step()
    for x, y in zip(a, b, strict=True):
        assert torch.allclose(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_ties_inf_and_nan(foreach: bool | None) -> None:
    p = torch.ones(4, requires_grad=True)
    optimizer = Lion([p], lr=0.25, foreach=foreach)
    p.grad = torch.tensor([0.0, float("inf"), float("-inf"), float("nan")])
    optimizer.step()
    assert torch.equal(p[:3], torch.tensor([1.0, 0.75, 1.25]))
    assert p[3].isnan()
    m = optimizer.state[p]["exp_avg"]
    assert torch.equal(m[:3], torch.tensor([0.0, float("inf"), float("-inf")]))
    assert m[3].isnan()
    p.grad = torch.zeros(4)
    optimizer.step()
    assert p[3].isnan()


def test_nan_reaches_a_bf16_weight_with_remainder() -> None:
    p = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Lion([p], lr=0.25)
    p.grad = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    optimizer.step()
    assert p[0].isnan()
    assert p[1] == 0.75
