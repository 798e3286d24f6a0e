"""`fused=True` on a CPU: the update compiled into one pass, held to the definition and to what the default promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lion_params import clones, make_params, run
from onepass.core.launch import INTERPRET
from onepass.ops.lion.reference import join, reference
from onepass.ops.lion.torch_path import SMALL
from onepass.optim import Lion

pytestmark = pytest.mark.skipif(INTERPRET, reason="interpreted, fused=True is the kernel")

# worked on alone, gathered, and neither
SHAPES = [(SMALL + 13,), (3, 5), (257, 300), (0,), ()]


def test_it_is_the_definition() -> None:
    params = make_params(torch.float32, SHAPES)
    exact = [p.detach().double() for p in params]
    momenta = [torch.zeros_like(p) for p in exact]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.9137, 0.97)}
    optimizer = Lion(params, fused=True, maximize=True, **options)
    for _ in range(3):
        run(1, (optimizer, params))
        for i, p in enumerate(params):
            assert p.grad is not None
            exact[i], momenta[i] = reference(exact[i], -p.grad.double(), momenta[i], **options)
    for p, q, m in zip(params, exact, momenta, strict=True):
        assert torch.allclose(p.double(), q, rtol=1e-6, atol=1e-7)
        assert torch.allclose(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cautious_weight_decay", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_remainder_is_fp32_bit_for_bit(cautious_weight_decay: bool) -> None:
    low = make_params(torch.bfloat16, SHAPES)
    full = clones(low, torch.float32)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "cautious_weight_decay": cautious_weight_decay}
    a = Lion(low, fused=True, state_dtype=torch.float32, **options)
    b = Lion(full, fused=True, **options)
    for _ in range(5):
        for p, q in zip(low, full, strict=True):
            p.grad = torch.randn(p.shape).bfloat16()
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(low, full, strict=True):
        assert torch.equal(join(p.detach(), a.state[p]["remainder"]), q)


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

    steps(SHAPES, 1e-2)
    before = graphs()
    assert before > 0
    steps([(SMALL * 3,), (SMALL, 2), (7,)], 1e-3)
    assert graphs() == before


def test_another_default_device_does_not_matter() -> None:
    p = torch.ones(2 * SMALL, requires_grad=True)
    p.grad = torch.ones_like(p)
    torch.set_default_device("meta")
    try:
        Lion([p], lr=0.25, fused=True).step()
    finally:
        torch.set_default_device(None)
    assert torch.equal(p, torch.full_like(p, 0.75))


@pytest.mark.parametrize("fused", [None, True])
def test_autograd_notices_a_large_write(fused: bool | None) -> None:
    p = torch.ones(2 * SMALL, requires_grad=True)
    loss = (p * p).sum()
    p.grad = torch.ones(2 * SMALL)
    Lion([p], fused=fused).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
