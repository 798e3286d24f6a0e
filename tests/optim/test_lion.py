"""Lion as an optimizer: trajectories, options, groups, schedulers, layouts, errors."""

from __future__ import annotations

from typing import Any

import lion_pytorch
import lion_pytorch.cautious_lion
import pytest
import torch

from lion_params import clones, make_params, run
from onepass.ops.lion.definition import Row, join, reference
from onepass.ops.lion.torch_path import SMALL
from onepass.optim import Lion

# worked on alone, gathered, and neither
COMPILED_SHAPES = [(SMALL + 13,), (3, 5), (257, 300), (0,), ()]


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


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {}),
        ("cpu", {"state_dtype": torch.bfloat16}),
        ("cpu", {"foreach": False}),
        ("cpu", {"foreach": False, "state_dtype": torch.bfloat16}),
        ("cpu", {"fused": True}),
        pytest.param("cpu", {"fused": True, "cautious_weight_decay": True}, marks=pytest.mark.slow),
        pytest.param("cuda", {}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"state_dtype": torch.bfloat16}, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_bf16_with_remainder_is_fp32_bit_for_bit(device: str, options: dict[str, Any]) -> None:
    low = make_params(torch.bfloat16, COMPILED_SHAPES, device)
    # no multiple of 16 bytes
    low.append(torch.randn(100_004, device=device).bfloat16()[1:].requires_grad_())
    full = clones(low, torch.float32)
    options = {"lr": 3e-6, "weight_decay": 0.1, "state_dtype": torch.float32, **options}
    ours, oracle = Lion(low, low_precision="remainder", **options), Lion(full, **options)
    for _ in range(12):
        run(1, (ours, low), (oracle, full))
        for p, q in zip(low, full, strict=True):
            assert torch.equal(join(p.detach(), ours.state[p]["remainder"]), q)
            assert ours.state[p]["remainder"].dtype == torch.int16
    assert any(bool((q != p).any()) for p, q in zip(low, full, strict=True))


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


def test_a_rate_on_another_device_is_read() -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = Lion([p])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()


# gathered with others, and in tiles
@pytest.mark.parametrize("n", [1, SMALL // 4])
@pytest.mark.parametrize(
    ("device", "options"),
    [("cpu", {}), ("cpu", {"foreach": True}), ("cpu", {"foreach": False}), ("cpu", {"fused": True}),
     pytest.param("cuda", {}, marks=pytest.mark.gpu)],
    ids=str,
)  # fmt: skip
def test_ties_inf_nan_and_numbers_at_the_ends(device: str, options: dict[str, Any], n: int) -> None:
    inf, nan = float("inf"), float("nan")
    p = torch.ones(8 * n, device=device, requires_grad=True)
    optimizer = Lion([p], lr=0.25, **options)
    p.grad = torch.tensor([nan, inf, -inf, 0.0, 1e-42, -1e-42, 3e38, -3e38], device=device).repeat(n)
    optimizer.step()
    want = torch.tensor([nan, 0.75, 1.25, 1.0, 0.75, 1.25, 0.75, 1.25]).repeat(n)
    assert torch.equal(p.cpu().nan_to_num(7.0), want.nan_to_num(7.0))
    m = optimizer.state[p]["exp_avg"].cpu()
    assert torch.equal(m[1:4], torch.tensor([inf, -inf, 0.0]))
    assert m[0].isnan()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p[0].isnan()


def test_fused_on_a_cpu_is_the_definition() -> None:
    params = make_params(torch.float32, COMPILED_SHAPES)
    exact = [p.detach().double() for p in params]
    momenta = [torch.zeros_like(p) for p in exact]
    optimizer = Lion(params, 1e-2, (0.9137, 0.97), 0.3, fused=True, maximize=True)
    row = Row(1e-2, 0.3, 0.9137, 1 - 0.9137, 0.97, 1 - 0.97)
    for _ in range(3):
        run(1, (optimizer, params))
        for i, p in enumerate(params):
            assert p.grad is not None
            exact[i], momenta[i] = reference(exact[i], -p.grad.double(), momenta[i], row)
    for p, q, m in zip(params, exact, momenta, strict=True):
        assert torch.allclose(p.double(), q, rtol=1e-6, atol=1e-7)
        assert torch.allclose(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-7)


def test_rates_and_sizes_compile_nothing_again() -> None:
    from torch._dynamo.utils import counters

    def graphs() -> int:
        return int(counters["stats"]["unique_graphs"])

    def steps(shapes: list[tuple[int, ...]], lr: float) -> Lion:
        params = make_params(torch.float32, shapes)
        optimizer = Lion(params, lr=lr, fused=True)
        run(2, (optimizer, params))
        optimizer.param_groups[0]["lr"] = lr / 2
        run(1, (optimizer, params))
        return optimizer

    steps(COMPILED_SHAPES, 1e-2)
    before = graphs()
    assert before > 0
    steps([(SMALL * 3,), (SMALL, 2), (7,)], 1e-3)
    assert graphs() == before
