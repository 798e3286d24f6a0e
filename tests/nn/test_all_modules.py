"""What every module of `onepass.nn` owes the programs around it: meta devices, factory arguments, copies, files.

The modules are those that `onepass.nn` exports: a new one must be added to `CASES`.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onepass.nn as onn

DIM, K = 16, 4
ATTENTION: dict[str, Any] = {"heads": 2, "dim_head": 8}
LOCAL: dict[str, Any] = {**ATTENTION, "window": 8}


class Case(NamedTuple):
    """A module: `build(**factory)` makes it; with `k`, it is called as a router is.

    `in_order`: its constructor draws parameters in the order of `modules()`.
    """

    name: str
    build: Callable[..., nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((2, 24, DIM),)
    k: int | None = None
    in_order: bool = True


def _routed(**factory: Any) -> onn.Routed:
    linear = (nn.Linear(DIM, DIM, **factory) for _ in range(2))
    return onn.Routed(*linear, onn.Router(DIM, **factory), k=K)


def _own_routers(**factory: Any) -> onn.RoutedAttention:
    """Routers made by the caller, before the module draws its own parameters."""
    q, kv = (onn.Router(DIM, kind="sigmoid", **factory) for _ in range(2))
    return onn.RoutedAttention(DIM, K, 2 * K, router_q=q, router_kv=kv, **LOCAL, **factory)


CASES = [
    Case("LayerNorm", lambda **f: onn.LayerNorm(DIM, **f)),
    Case("LayerNorm", lambda **f: onn.LayerNorm((24, DIM), bias=False, stable=True, **f)),
    Case("LayerNorm", lambda **f: onn.LayerNorm(DIM, elementwise_affine=False, **f)),
    Case("RMSNorm", lambda **f: onn.RMSNorm(DIM, **f)),
    Case("RMSNorm", lambda **f: onn.RMSNorm(DIM, elementwise_affine=False, eps=1e-3, **f)),
    Case("WeightedSum", lambda **f: onn.WeightedSum(DIM, **f)),
    Case("WeightedSum", lambda **f: onn.WeightedSum(DIM, 3, **f)),
    Case("Router", lambda **f: onn.Router(DIM, **f), k=K),
    Case("Router", lambda **f: onn.Router(DIM, 3, kind="sigmoid", gate="straight_through", **f), k=K),
    Case("CausalRouter", lambda **f: onn.CausalRouter(DIM, block=8, memory=16, **f), k=K),
    Case("Experts", lambda **f: onn.Experts(DIM, 4, **f)),
    Case("Experts", lambda **f: onn.Experts(DIM, 4, activation="swiglu", shared_dim=8, **f)),
    Case("LocalAttention", lambda **f: onn.LocalAttention(DIM, **LOCAL, **f)),
    Case("LocalAttention", lambda **f: onn.LocalAttention(DIM, causal=True, **LOCAL, **f)),
    Case("Routed", _routed),
    Case("RoutedFeedForward", lambda **f: onn.RoutedFeedForward(DIM, K, **f)),
    Case("RoutedFeedForward", lambda **f: onn.RoutedFeedForward(DIM, 0.25, bias=False, **f)),
    Case("RoutedAttention", lambda **f: onn.RoutedAttention(DIM, K, 2 * K, **LOCAL, **f)),
    Case("RoutedAttention", lambda **f: onn.RoutedAttention(DIM, K, 2 * K, causal=True, light_heads=1, **LOCAL, **f)),
    Case("RoutedAttention", _own_routers, in_order=False),
    Case(
        "RoutedCrossAttention", lambda **f: onn.RoutedCrossAttention(DIM, K, 2 * K, **ATTENTION, **f),
        ((2, 24, DIM), (2, 40, DIM)),
    ),
    Case(
        "RoutedCrossAttention", lambda **f: onn.RoutedCrossAttention(DIM, K, 0.5, dim_context=24, **ATTENTION, **f),
        ((2, 24, DIM), (2, 40, 24)),
    ),
    Case("RoutedBlock", lambda **f: onn.RoutedBlock(DIM, K, **LOCAL, **f)),
    # the feed-forward's router is drawn before its branches
    Case("RoutedBlock", lambda **f: onn.RoutedBlock(DIM, K, causal=True, **LOCAL, **f), in_order=False),
    Case("TransformerBlock", lambda **f: onn.TransformerBlock(DIM, dim_head=8, **f)),
    Case("TransformerBlock", lambda **f: onn.TransformerBlock(DIM, causal=True, hidden_dim=8, **LOCAL, **f)),
    Case("TransformerBlock", lambda **f: onn.TransformerBlock(DIM, dim_head=8, num_experts=4, **f)),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=[f"{i}-{case.name}" for i, case in enumerate(CASES)])


def exported() -> dict[str, type[nn.Module]]:
    found = {name: getattr(onn, name) for name in onn.__all__}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, nn.Module)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def assert_same_tensors(a: nn.Module, b: nn.Module) -> None:
    # what a forward in training counts is no state
    first, second = ({name: t for name, t in tensors_of(m).items() if "tokens_per_expert" not in name} for m in (a, b))
    assert first.keys() == second.keys()
    for name, t in first.items():
        assert torch.equal(t, second[name]), name


def reset(module: nn.Module) -> None:
    """What FSDP and its like do after `to_empty`."""
    for m in module.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


def inputs_of(case: Case) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for shape in case.shapes]
    return tensors if case.k is None else [*tensors, case.k]


def run(module: nn.Module, case: Case) -> list[Tensor]:
    """All outputs of a call in training, and the gradients of all parameters."""
    out = module(*inputs_of(case))
    outputs = [out] if isinstance(out, Tensor) else list(out)
    params = list(module.parameters())
    loss = torch.stack([t.square().sum() for t in outputs if t.is_floating_point()]).sum()
    grads = torch.autograd.grad(loss, params) if params else []
    return [t.detach() for t in (*outputs, *grads)]


def assert_runs_alike(a: nn.Module, b: nn.Module, case: Case) -> None:
    assert_same_tensors(a, b)
    assert repr(a) == repr(b)
    for x, y in zip(run(a, case), run(b, case), strict=True):
        assert torch.equal(x, y)


def test_every_exported_module_is_here() -> None:
    assert {case.name for case in CASES} == set(exported())
    for case in CASES:
        assert type(case.build()) is exported()[case.name]


@every_case
def test_meta_device_then_reset(case: Case) -> None:
    """Built on meta, materialised, reset: the values are those of a module built in place."""
    with torch.device("meta"):
        module = case.build()
    assert all(t.is_meta for t in tensors_of(module).values())
    module.to_empty(device="cpu")
    with torch.no_grad():
        for t in tensors_of(module).values():
            t.fill_(float("nan"))  # stands for whatever was in memory
    torch.manual_seed(3)
    reset(module)
    left = [name for name, t in tensors_of(module).items() if t.isnan().any()]
    assert not left, f"left uninitialised: {left}"

    again = case.build()
    torch.manual_seed(3)
    reset(again)
    assert_same_tensors(module, again)
    torch.manual_seed(3)
    direct = case.build()
    if case.in_order:
        assert_same_tensors(module, direct)
    for name, t in tensors_of(direct).items():  # constants stay what the constructor makes them
        if t.numel() > 1 and bool((t == t.flatten()[0]).all()):
            assert torch.equal(t, tensors_of(module)[name]), name
    assert_runs_alike(module, again, case)


@every_case
def test_each_module_resets_what_it_owns_alone(case: Case) -> None:
    """A wrapper calls `reset_parameters` module by module: nothing may be drawn twice, nor another's be touched."""
    module = case.build()
    for m in module.modules():
        own = {id(t) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
        if own:
            assert hasattr(m, "reset_parameters"), type(m).__name__
        if not hasattr(m, "reset_parameters"):
            continue
        with torch.no_grad():
            for t in tensors_of(module).values():
                t.fill_(float("nan"))
        m.reset_parameters()
        for name, t in tensors_of(module).items():
            assert bool(t.isnan().all()) == (id(t) not in own), name


@every_case
def test_factory_arguments(case: Case) -> None:
    for device, dtype in (("meta", torch.bfloat16), ("cpu", torch.float64), ("cpu", None)):
        module = case.build(device=device, dtype=dtype)
        for name, t in tensors_of(module).items():
            # biases of experts move by a thousandth
            wanted = torch.float32 if name.endswith(("expert_bias", "tokens_per_expert")) else dtype
            assert (t.device.type, t.dtype) == (device, wanted or torch.get_default_dtype()), name
    # what takes no module from its caller takes them itself
    given = {"device", "dtype"} & set(inspect.signature(exported()[case.name]).parameters)
    assert given == (set() if case.name == "Routed" else {"device", "dtype"})


@every_case
def test_copies_and_files(case: Case) -> None:
    """Also after a call, when something may be remembered: deepcopy, pickle, torch.save of the module."""
    module = case.build()
    for _ in range(2):
        torch.save(module, file := io.BytesIO())
        file.seek(0)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
            assert not {id(t) for t in tensors_of(twin).values()} & {id(t) for t in tensors_of(module).values()}
            assert_runs_alike(module, twin, case)


@every_case
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_dict_through_a_file_of_weights(case: Case, device: str) -> None:
    module, file = case.build(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {name for name in tensors_of(module) if not name.endswith("tokens_per_expert")}
    with torch.device(device):
        other = case.build()
    other.load_state_dict(state, assign=device == "meta")
    assert_runs_alike(module, other, case)
