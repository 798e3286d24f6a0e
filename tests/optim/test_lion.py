"""Lion as an optimizer of torch: steps beside others', layouts, hooks, compile, bad options."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lion_pytorch
import lion_pytorch.cautious_lion
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lion_params import assert_same, assert_same_states, clones, make_params, run, set_grads
from onepass.ops.lion.definition import Row, join, reference
from onepass.ops.lion.torch_path import SMALL
from onepass.optim import Lion, clip_grad_norm
from onepass.optim.lion import _lr_to_device
from onepass.optim.options import cautious_factor

# worked on alone, gathered, and neither
COMPILED_SHAPES = [(SMALL + 13,), (3, 5), (257, 300), (0,), ()]


@pytest.mark.parametrize("cautious", [True, 0.25])
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
    ("device", "options"), [
        ("cpu", {}), ("cpu", {"state_dtype": torch.bfloat16}),
        ("cpu", {"foreach": False}), ("cpu", {"foreach": False, "state_dtype": torch.bfloat16}),
        pytest.param("cpu", {"fused": True}, marks=pytest.mark.slow),
        pytest.param("cpu", {"fused": True, "cautious_weight_decay": True}, marks=pytest.mark.slow),
        *(pytest.param("cuda", o, marks=pytest.mark.gpu) for o in ({}, {"state_dtype": torch.bfloat16})),
    ], ids=str,
)  # fmt: skip
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
    assert torch.equal(m[:4].nan_to_num(7.0, inf, -inf), torch.tensor([7.0, inf, -inf, 0.0]))
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


def test_gradients_are_not_kept_alive() -> None:
    p = torch.ones(10, requires_grad=True)
    optimizer = Lion([p])
    p.grad = torch.ones(10)
    gone = weakref.ref(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert gone() is None


@pytest.mark.parametrize(("n", "fused"), [(3, None), (2 * SMALL, None), (2 * SMALL, True)])
def test_autograd_notices_the_write(n: int, fused: bool | None) -> None:
    p = torch.ones(n, requires_grad=True)
    loss = (p * p).sum()
    p.grad = torch.ones(n)
    Lion([p], fused=fused).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_differentiable_step() -> None:
    def final_loss(lr: Tensor, wd: Tensor, start: Tensor) -> Tensor:
        p = start.clone()
        optimizer = Lion([p], lr=lr, weight_decay=wd, differentiable=True)
        for _ in range(2):
            p.grad = torch.cos(torch.arange(3, dtype=torch.float64))
            optimizer.step()
        return (p * p).sum()

    inputs = tuple(torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.1, 0.2, [1.0, -2.0, 0.5]))
    assert torch.autograd.gradcheck(final_loss, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_clips_unscales_and_skips(dtype: torch.dtype) -> None:
    a = make_params(dtype, [(3, 4), (5,)])
    b = clones(a)
    eager, compiled = (Lion(p, lr=torch.tensor([1e-2]), weight_decay=0.1, state_dtype=torch.float32) for p in (a, b))
    compiled.step = torch.compile(compiled.step, backend="aot_eager")  # type: ignore[method-assign]
    for i in range(6):
        set_grads(a, b, scale=float("inf") if i == 4 else 1.0)
        for optimizer, params in ((eager, a), (compiled, b)):
            if i in (1, 2):
                clip_grad_norm(params, 0.5)
            if i < 3:
                optimizer.step()
            else:
                # what GradScaler gives to `fused=True`
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(i == 4))
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf
            assert optimizer.clip_coefficient is None
        assert_same(a, b)
        assert_same_states(eager, a, compiled, b)
        assert all(bool(p.isfinite().all()) for p in a)


def test_a_state_on_another_device_is_refused() -> None:
    """A kernel would read another device's memory."""
    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = Lion([p], lr=0.25)
    optimizer.step()
    for key in ("exp_avg", "remainder"):
        kept = optimizer.state[p][key]
        optimizer.state[p][key] = kept.to("meta")
        with pytest.raises(ValueError, match=f"a parameter is on cpu and its state {key} on meta"):
            optimizer.step()
        optimizer.state[p][key] = kept
    # of no concern to a kernel: what AdamW's checkpoint has beside exp_avg
    optimizer.state[p]["step"] = torch.ones((), device="meta")
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lr": "1e-3"}, TypeError, "Invalid learning rate: '1e-3'; a number or a tensor"),
        ({"betas": 0.9}, ValueError, "Invalid betas: 0.9; Lion takes two numbers"),
        ({"betas": (0.9,)}, ValueError, "Invalid betas"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0; lr must be ≥ 0"),
        ({"lr": float("nan")}, ValueError, "Invalid learning rate: nan; lr must be ≥ 0"),
        ({"weight_decay": None}, TypeError, "Invalid weight_decay value: None; a number or a tensor"),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.99)}, ValueError, "Invalid beta parameter at index 0: 1.0; betas must be ≥ 0 and < 1"),
        ({"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -0.5}, ValueError, "Invalid weight_decay value: -0.5; weight_decay must be ≥ 0"),
        ({"cautious": 1.5}, ValueError, r"Invalid cautious value: 1.5; a bool or a factor in \[0, 1\]"),
        ({"state_dtype": "int4"}, ValueError, r"Invalid state_dtype: 'int4'; accepted: \(None, torch.float32,"),
        ({"state_dtype": "int8", "differentiable": True}, ValueError, "'int8' is not differentiable"),
        ({"low_precision": "sr"}, ValueError, r"low_precision: 'sr'; accepted: \('auto', 'none', 'remainder'\)"),
        ({"fused": True, "differentiable": True}, RuntimeError, "`fused` does not support `differentiable`"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
        ({"differentiable": True, "low_precision": "remainder"}, ValueError, "not differentiable"),
        ({"decouple_lr": True, "lr": 0.0}, ValueError, "give the param group a 'peak_lr'"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Lion([torch.ones(2, requires_grad=True)], **options)
    good = Lion([torch.ones(2, requires_grad=True)], differentiable=False)
    with pytest.raises(error, match=match):
        good.add_param_group({"params": [torch.ones(2, requires_grad=True)], **options})
    assert len(good.param_groups) == 1


def test_bad_parameters() -> None:
    with pytest.raises(TypeError, match="floating-point or complex tensors, got torch"):
        Lion([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="takes bfloat16 parameters, got float16"):
        Lion([torch.ones(2, dtype=torch.float16)], low_precision="remainder")
    for dtype in (torch.bfloat16, "int8"):
        with pytest.raises(ValueError, match="no complex form"):
            Lion([torch.ones(2, dtype=torch.complex64)], state_dtype=dtype)
    with pytest.raises(ValueError, match="empty parameter list"):
        Lion([])
    ones = torch.ones(2, dtype=torch.complex64)
    for p, momentum, error in ((ones.conj(), ones, ValueError), (ones.clone(), ones.real, TypeError)):
        optimizer = Lion([p])
        p.grad, optimizer.state[p]["exp_avg"] = ones, momentum
        with pytest.raises(error, match=r"lazily conjugated|all or none of them a complex dtype"):
            optimizer.step()


def test_a_step_is_named_in_profiles_and_runs_hooks() -> None:
    """Also those that come and go after the first step, which torch's own wrapper is left out of."""
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = Lion([p])
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#Lion.step" in {event.key for event in profile.key_averages()}
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
    ]
    for handle in handles:
        optimizer.step()
        handle.remove()
    optimizer.step()
    assert seen == [
        "before all", "before", "after", "after all", "before all", "after", "after all", "before all", "after all",
        "after all",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtypes", "kept"),
    [
        ((torch.float32,), torch.float32), ((torch.bfloat16,), torch.float32), ((torch.float64,), torch.float64),
        ((torch.complex128,), torch.float64), ((torch.float32, torch.float64), torch.float64),
    ],
)  # fmt: skip
def test_a_learning_rate_on_the_device_is_as_exact_as_the_weights(
    dtypes: tuple[torch.dtype, ...], kept: torch.dtype
) -> None:
    # what stands for tensors on a GPU
    params = [SimpleNamespace(is_cuda=True, device="cpu", dtype=dtype) for dtype in dtypes]
    decay = torch.tensor(0.1, dtype=torch.float64)
    group: dict[str, Any] = {"params": params, "capturable": True, "lr": 1e-4, "weight_decay": decay}
    _lr_to_device(group)
    for key, value in (("lr", 1e-4), ("weight_decay", 0.1)):
        assert group[key].dtype == kept
        assert group[key].item() == torch.tensor(value, dtype=kept).item()


@pytest.mark.parametrize(("m", "g"), [(1e22, -1e24), (-1e22, 1e23), (1e24, -1e22), (3e38, -3e38)])
def test_signs_of_huge_terms_with_foreach_given(foreach: bool, m: float, g: float) -> None:
    """The docstring names what the default on a CPU does beyond 4.7e21."""
    p = torch.zeros(3, requires_grad=True)
    optimizer = Lion([p], lr=1.0, foreach=foreach)
    p.grad, optimizer.state[p]["exp_avg"] = torch.full((3,), g), torch.full((3,), m)
    optimizer.step()
    assert (p == (-1 if 0.9 * m + 0.1 * g > 0 else 1)).all()


def steps(optimizer: Lion, params: list[Tensor], n: int) -> None:
    for _ in range(n):
        for p in params:
            p.grad = p.detach().cos()
        optimizer.step()


def test_named_parameters_and_their_names_in_a_state() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = Lion(model.named_parameters())
    steps(optimizer, list(model.parameters()), 1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    Lion(model.parameters()).load_state_dict(state)
    named = Lion(model.named_parameters())
    named.load_state_dict(state)
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


def test_defaults_take_the_path_of_the_device(device: str) -> None:
    p = torch.ones(100, device=device, requires_grad=True)
    optimizer = Lion([p])
    with patch("onepass.optim.step.plain_") as slow:
        steps(optimizer, [p], 1)
    slow.assert_not_called()
    assert optimizer._work is not None
    assert bool(optimizer._work.fused) == (device == "cuda")
    assert bool(optimizer._work.tiled) == (device == "cpu")


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"fused": True}], ids=str)
def test_default_dtype_and_device_do_not_matter(options: dict[str, Any]) -> None:
    results = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "meta")):
        torch.manual_seed(0)
        params = [torch.randn(n, requires_grad=True) for n in (7, 5000, 2 * SMALL)]
        torch.set_default_dtype(dtype)
        with torch.device(device):
            optimizer = Lion(params, lr=1e-2, weight_decay=0.1, **options)
            steps(optimizer, params, 3)
        results.append((params, optimizer))
    (a, one), (b, other) = results
    assert_same(a, b)
    assert_same_states(one, a, other, b)


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [None, False])
def test_mixed_devices_and_dtypes(capturable: bool, foreach: bool | None) -> None:
    params = [
        torch.ones(n, device=device, dtype=dtype, requires_grad=True)
        for n in (3, 5000) for device in ("cuda", "cpu") for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]  # fmt: skip
    # capturable: the rate lives on the first parameter's device
    steps(Lion(params, lr=0.5, capturable=capturable, foreach=foreach), params, 1)
    for p in params:
        assert bool((p == 0.5).all())


def test_bools_of_numpy_are_bools() -> None:
    values = False, 1.0, 1, np.False_, True, 0.0, np.True_
    assert [cautious_factor({"cautious": value}) for value in values] == [None, None, None, None, 0.0, 0.0, 0.0]


def test_an_array_as_rate_meets_tensors_of_any_device() -> None:
    p = torch.zeros(4, device="meta", requires_grad=True)
    p.grad = torch.zeros_like(p)
    Lion([p], lr=np.array(0.125)).step()  # type: ignore[arg-type]
