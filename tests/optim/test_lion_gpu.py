"""The fused path on CUDA against the definition: dtypes, layouts, many groups, GradScaler, no waiting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from lion_params import update_lists_
from onepass.ops.lion.op import NONE
from onepass.ops.lion.reference import join, reference
from onepass.ops.lion.torch_path import Row
from onepass.optim import Lion

pytestmark = pytest.mark.gpu

SHAPES = [(3, 4), (5,), (0,), (), (1023,), (1024,), (1025,), (130, 300), (1 << 20,), (999_999,)]
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# no 16-bit numbers are an exact tie with these
BETAS = (0.9137, 0.99)


def make(dtype: torch.dtype, shapes: Any = SHAPES, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(s, device="cuda") * scale).to(dtype) for s in shapes]


def near(got: Tensor, want: Tensor, ulp: float) -> bool:
    return bool(((got.double() - want).abs() <= want.abs() * ulp * 1.01 + 1e-6).all())


def row(lr: float, wd: float, b1: float, b2: float) -> Row:
    return Row(lr, wd, b1, 1 - b1, b2, 1 - b2, 1.0, 0.0)


@pytest.mark.parametrize(
    "dtypes", [*itertools.product(HALF_ULP, repeat=3)], ids=lambda d: "-".join(str(t)[6:] for t in d)
)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_every_dtype_mix_and_alignment(dtypes: tuple[torch.dtype, ...], offset: int) -> None:
    sizes = [1, 7, 1023, 1024, 1025, 70_000]
    params, grads, momenta = (
        [(torch.randn(n + offset, device="cuda") * s).to(t)[offset:] for n in sizes]
        for t, s in zip(dtypes, (1.0, 1.0, 0.1), strict=True)
    )
    want = [
        reference(p.double(), g.double(), m.double(), lr=1e-3, weight_decay=0.1, betas=BETAS)
        for p, g, m in zip(params, grads, momenta, strict=True)
    ]
    update_lists_(params, grads, momenta, [], [0] * len(sizes), [row(1e-3, 0.1, *BETAS)], NONE)
    for p, m, (new_p, new_m) in zip(params, momenta, want, strict=True):
        assert near(p, new_p, HALF_ULP[dtypes[0]] + 2.0**-23)
        assert near(m, new_m, HALF_ULP[dtypes[2]] + 2.0**-23)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("momentum", [torch.float32, torch.bfloat16])
def test_remainder_is_fp32_bit_for_bit(offset: int, momentum: torch.dtype) -> None:
    low = [t[offset:].requires_grad_() for t in make(torch.bfloat16, [(n + offset,) for n in (5, 1024, 100_003)])]
    full = [p.detach().float().requires_grad_() for p in low]
    ours = Lion(low, lr=3e-6, weight_decay=0.1, state_dtype=momentum)
    oracle = Lion(full, lr=3e-6, weight_decay=0.1, state_dtype=momentum)
    for _ in range(20):
        for p, q in zip(low, full, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        oracle.step()
    for p, q in zip(low, full, strict=True):
        assert torch.equal(join(p.detach(), ours.state[p]["remainder"]), q)


def test_together_is_one_at_a_time_is_cpu() -> None:
    a = [p.requires_grad_() for p in make(torch.float32)]
    b = [p.detach().clone().requires_grad_() for p in a]
    c = [p.detach().cpu().requires_grad_() for p in a]
    together, on_cpu = Lion(a, lr=1e-2, weight_decay=0.1, betas=BETAS), Lion(c, lr=1e-2, weight_decay=0.1, betas=BETAS)
    apart = [Lion([p], lr=1e-2, weight_decay=0.1, betas=BETAS) for p in b]
    for _ in range(3):
        for p, q, r in zip(a, b, c, strict=True):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.cpu()
        for optimizer in (together, on_cpu, *apart):
            optimizer.step()
    for p, q, r in zip(a, b, c, strict=True):
        assert torch.equal(p, q)
        # a sign can differ where u is a rounding error
        assert ((p.cpu() - r).abs() > 1e-6).double().mean() < 1e-4 if p.numel() else True


def test_many_groups_and_many_small_tensors() -> None:
    a = [p.requires_grad_() for p in make(torch.float32, [(n,) for n in range(1, 400)])]
    b = [p.detach().double().requires_grad_() for p in a]
    groups = [
        [{"params": [p], "lr": 1e-3 * (1 + i % 7), "weight_decay": 0.01 * (i % 3), "maximize": i % 2 == 0}
         for i, p in enumerate(ps)]
        for ps in (a, b)
    ]  # fmt: skip
    fused, exact = Lion(groups[0], betas=BETAS), Lion(groups[1], betas=BETAS)
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
        fused.step()
        exact.step()
    wrong = sum(int(((p.double() - q).abs() > 1e-5).sum()) for p, q in zip(a, b, strict=True))
    assert wrong <= 2


def test_special_gradients() -> None:
    inf, nan = float("inf"), float("nan")
    g = torch.tensor([nan, inf, -inf, 0.0, 1e-42, -1e-42, 3e38, -3e38], device="cuda")
    for n in (1, 200):
        p = torch.ones(8 * n, device="cuda", requires_grad=True)
        p.grad = g.repeat(n)
        optimizer = Lion([p], lr=0.25)
        optimizer.step()
        want = torch.tensor([nan, 0.75, 1.25, 1.0, 0.75, 1.25, 0.75, 1.25], device="cuda").repeat(n)
        assert torch.equal(p.nan_to_num(7.0), want.nan_to_num(7.0))
        m = optimizer.state[p]["exp_avg"]
        assert m[0].isnan()
        assert m[1] == inf


def test_fused_true_refuses_what_it_cannot_do() -> None:
    p = torch.ones(4, 6, device="cuda")[:, ::2].requires_grad_()
    p.grad = torch.ones(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="`fused=True` requires dense parameters"):
        Lion([p], fused=True).step()
    Lion([p], lr=0.5).step()
    assert torch.equal(p, torch.full((4, 3), 0.5, device="cuda"))
    for dtype in (torch.float64, torch.complex128):
        p = torch.ones(3, device="cuda", dtype=dtype, requires_grad=True)
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="`fused=True` requires dense parameters of supported dtypes"):
            Lion([p], fused=True).step()
        Lion([p], lr=0.5).step()
        assert torch.equal(p, torch.full_like(p, 0.5))


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"cautious": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fallbacks_agree(options: dict[str, Any], dtype: torch.dtype) -> None:
    a = [p.requires_grad_() for p in make(dtype, SHAPES[:8])]
    b = [p.detach().cpu().requires_grad_() for p in a]
    ours = Lion(a, lr=1e-2, weight_decay=0.1, betas=BETAS, **options)
    on_cpu = Lion(b, lr=1e-2, weight_decay=0.1, betas=BETAS, cautious=options.get("cautious", False))
    for _ in range(3):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.cpu()
        ours.step()
        on_cpu.step()
    for p, q in zip(a, b, strict=True):
        if p.numel():
            assert ((p.cpu().double() - q.double()).abs() > 1e-2 * q.double().abs() + 1e-4).double().mean() < 1e-3


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, None), (torch.float32, True), (torch.float16, True)])
def test_grad_scaler(dtype: torch.dtype, fused: bool | None) -> None:
    p = torch.ones(3000, dtype=dtype, device="cuda", requires_grad=True)
    q = p.detach().clone().requires_grad_()
    scaled, plain = (Lion([x], lr=0.25, state_dtype=torch.float32, betas=BETAS, fused=fused) for x in (p, q))
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for i in range(4):
        scaler.scale(torch.ones((), device="cuda"))
        g = torch.randn_like(q)
        p.grad = g * scaler.get_scale()
        if i == 1:
            p.grad[17] = float("inf")
        scaler.step(scaled)
        if i != 1:
            q.grad = g
            plain.step()
        scaler.update()
        assert torch.equal(p, q)
        assert torch.equal(scaled.state[p]["exp_avg"], plain.state[q]["exp_avg"])


def test_the_scalers_step_does_not_wait_with_fused() -> None:
    """Without it GradScaler reads found_inf itself; the kernel is taken either way."""
    for fused in (None, True):
        p = torch.ones(3000, device="cuda", requires_grad=True)
        optimizer = Lion([p], lr=0.25, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)

        def step(p: Tensor = p, optimizer: Lion = optimizer, scaler: Any = scaler) -> None:
            p.grad = scaler.scale(torch.ones_like(p))
            scaler.step(optimizer)
            scaler.update()

        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            if fused:
                step()
            else:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert optimizer.current_work()[0].all_fused


def test_step_does_not_wait_for_the_device() -> None:
    params = [p.requires_grad_() for p in make(torch.bfloat16)]
    optimizer = Lion(params, lr=torch.tensor(1e-3, device="cuda"))
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * i
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_extra_memory() -> None:
    params = [torch.randn(1 << 22, device="cuda").requires_grad_() for _ in range(8)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = Lion(params)
    torch.cuda.synchronize()
    # what was asked for: the allocator hands out up to a megabyte more with a large block
    key = "requested_bytes.all."
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[key + "current"]
    optimizer.step()
    states = sum(p.numel() * 4 for p in params)
    assert torch.cuda.memory_stats()[key + "peak"] - before - states < 1 << 20


def test_states_follow_a_moved_model_through_their_state_dict() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = Lion(model.parameters(), lr=0.25)
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if optimizer.state:
            with pytest.raises(ValueError, match=r"its state exp_avg on c.*load_state_dict"):
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        before = model.weight.detach().clone()
        optimizer.step()
        assert torch.equal(model.weight, before - 0.25)


def test_a_default_device_of_cuda() -> None:
    torch.set_default_device("cuda")
    try:
        p = torch.ones(5, requires_grad=True)
        p.grad = torch.ones(5)
        optimizer = Lion([p], lr=0.25, capturable=True)
        optimizer.step()
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert torch.equal(p, torch.full_like(p, 0.5))


def test_more_than_2_to_31_elements() -> None:
    n = 2**31 + 1025
    if torch.cuda.mem_get_info()[0] < 4 * 2 * n:
        pytest.skip("needs 18 GiB")
    p, g, m = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    g[-3:] = 1.0
    g[7] = -1.0
    update_lists_([p], [g], [m], [], [0], [row(0.5, 0.0, 0.9, 0.99)], NONE)
    assert torch.equal(p[-4:].float().cpu(), torch.tensor([0.0, -0.5, -0.5, -0.5]))
    assert p[7] == 0.5
    assert p.count_nonzero() == 4


def test_other_devices_are_guarded() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    params = [torch.ones(3, device=f"cuda:{i}", requires_grad=True) for i in (0, 1)]
    for p in params:
        p.grad = torch.ones_like(p)
    Lion(params, lr=0.5).step()
    for p in params:
        assert torch.equal(p.cpu(), torch.full((3,), 0.5))
