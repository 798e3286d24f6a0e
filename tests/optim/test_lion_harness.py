"""torch's own harness for optimizers: its `OptimizerInfo`, its error inputs, and the checks of its optimizer tests.

torch ships the declarations (torch.testing._internal.common_optimizers) and not the tests; these are the same checks,
driven by the same declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lion_params import assert_same, assert_same_states
from onepass.ops.lion.torch_path import SMALL
from onepass.optim import Lion

common = pytest.importorskip("torch.testing._internal.common_optimizers")
pytestmark = pytest.mark.peer


def inputs(device: str, dtype: torch.dtype | None = None) -> list[Any]:
    made = common.OptimizerInput
    cuda = [
        made(params=None, kwargs={"capturable": True, "weight_decay": 0.1}, desc="capturable"),
        made(params=None, kwargs={"capturable": True, "lr": torch.tensor(0.001)}, desc="capturable with tensor lr"),
    ]
    return [
        made(params=None, kwargs={}, desc="default"),
        made(params=None, kwargs={"lr": 1e-3}, desc="non-default lr"),
        made(params=None, kwargs={"lr": torch.tensor(0.001)}, desc="tensor lr"),
        made(params=None, kwargs={"betas": (0.8, 0.95)}, desc="non-default betas"),
        made(params=None, kwargs={"weight_decay": 0.1}, desc="nonzero weight decay"),
        made(params=None, kwargs={"weight_decay": 0.1, "maximize": True}, desc="maximize, weight decay"),
        made(params=None, kwargs={"weight_decay": 0.1, "decouple_lr": True}, desc="decoupled"),
        made(params=None, kwargs={"cautious": True}, desc="cautious"),
        made(params=None, kwargs={"cautious": 0.5, "cautious_weight_decay": True, "weight_decay": 0.1}, desc="both"),
        *(cuda if "cuda" in device else []),
    ]


INFO = common.OptimizerInfo(
    Lion,
    optim_inputs_func=inputs,
    optim_error_inputs_func=common.get_error_inputs_for_all_optims,
    supported_impls=("foreach", "differentiable", "fused"),
    not_og_supported_flags=(),
    has_capturable_arg=True,
    supports_fused_on=("cuda",),
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def all_inputs(device: str, skip: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    found = common._get_optim_inputs_including_global_cliquey_kwargs(device, torch.float32, INFO, skip=skip)
    kwargs = [i.kwargs for i in found]
    # torch leaves foreach out on the CPU; here it is a path there too
    kwargs += [{**k, "foreach": True} for k in kwargs if device == "cpu" and not k.get("differentiable")]
    return [k for k in kwargs if not (k.get("fused") and k.get("capturable") is False)]


def run(optimizer: Any, params: list[Tensor], steps: int, grad: Callable[[Tensor], Tensor] | None = None) -> None:
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p) if grad is None else grad(p)
        optimizer.step()


@on_devices
def test_errors(device: str) -> None:
    for bad in INFO.optim_error_inputs_func(device=device, dtype=torch.float32):
        given = bad.optimizer_error_input
        params = [torch.randn(1, device=device, requires_grad=True)] if given.params is None else given.params
        if issubclass(bad.error_type, Warning):
            with pytest.warns(bad.error_type, match=bad.error_regex):
                Lion(params, **given.kwargs)
        else:
            with pytest.raises(bad.error_type, match=bad.error_regex):
                Lion(params, **given.kwargs)


@on_devices
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_implementations_agree(device: str, flag: str) -> None:
    for given in INFO.optim_inputs_func(device=device):
        results, states = [], []
        for value in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(device).double()
            if flag == "fused":
                model = model.float()
            optimizer = Lion(model.parameters(), **{**given.kwargs, "foreach": False, flag: value})
            x = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], device=device, dtype=next(model.parameters()).dtype)
            for i in range(7):
                optimizer.zero_grad()
                model(x.view(3, 2)).sum().backward()
                if i == 3:
                    # a missing gradient, one of zeros
                    model[2].bias.grad = None
                    model[0].bias.grad.zero_()
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
            states.append([optimizer.state[p] for p in model.parameters()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        for s, t in zip(*states, strict=True):
            assert s.keys() == t.keys()
            for key in s:
                torch.testing.assert_close(s[key], t[key])


def test_named_parameters_and_their_names_in_a_state() -> None:
    model = nn.Linear(2, 3)
    optimizer = Lion(model.named_parameters())
    run(optimizer, list(model.parameters()), 1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    plain = Lion(model.parameters())
    plain.load_state_dict(state)
    named = Lion(model.named_parameters())
    named.load_state_dict(state)
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]


@on_devices
def test_complex_is_pairs_of_reals(device: str) -> None:
    for kwargs in all_inputs(device, skip=("differentiable",)):
        if kwargs.get("cautious") not in (None, False):
            continue
        a = torch.randn(10, 5, device=device, dtype=torch.complex64, requires_grad=True)
        real, imaginary = (part.clone().detach().requires_grad_() for part in (a.detach().real, a.detach().imag))
        one, two = Lion([a], **kwargs), Lion([real, imaginary], **kwargs)
        for _ in range(3):
            a.grad = torch.randn_like(a)
            real.grad, imaginary.grad = a.grad.real.clone(), a.grad.imag.clone()
            one.step()
            two.step()
            torch.testing.assert_close(torch.complex(real.detach(), imaginary.detach()), a.detach())


@on_devices
def test_defaults_take_the_path_of_the_device(device: str) -> None:
    p = torch.ones(100, device=device, requires_grad=True)
    optimizer = Lion([p])
    with patch("onepass.optim.step.plain_") as slow:
        run(optimizer, [p], 1)
    slow.assert_not_called()
    assert optimizer._work is not None
    assert bool(optimizer._work.fused) == (device == "cuda")
    assert bool(optimizer._work.foreach_cpu) == (device == "cpu")


@pytest.mark.parametrize("options", [{"state_dtype": "int8"}, {"fused": True}], ids=str)
def test_default_dtype_and_device_do_not_matter(options: dict[str, Any]) -> None:
    results = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "meta")):
        torch.manual_seed(0)
        params = [torch.randn(n, requires_grad=True) for n in (7, 5000, 2 * SMALL)]
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                optimizer = Lion(params, lr=1e-2, weight_decay=0.1, **options)
                run(optimizer, params, 3, lambda p: p.detach().cos())
        finally:
            torch.set_default_dtype(torch.float32)
        results.append((params, optimizer))
    (a, one), (b, other) = results
    assert_same(a, b)
    assert_same_states(one, a, other, b)


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("capturable", [False, True])
def test_mixed_devices_and_dtypes(capturable: bool, foreach: bool | None) -> None:
    params = [
        torch.ones(n, device=device, dtype=dtype, requires_grad=True)
        for n in (3, 5000) for device in ("cuda", "cpu") for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]  # fmt: skip
    # capturable: the rate lives on the first parameter's device
    optimizer = Lion(params, lr=0.5, capturable=capturable, foreach=foreach)
    run(optimizer, params, 1)
    for p in params:
        assert bool((p == 0.5).all())
