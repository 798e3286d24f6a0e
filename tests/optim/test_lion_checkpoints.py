"""Saving and resuming: bit for bit, dtypes kept, checkpoints of other Lions."""

from __future__ import annotations

import copy
import io
from typing import Any

import lion_pytorch
import pytest
import torch
from torch import Tensor

from lion_params import clones, make_params
from onepass.ops.lion.definition import join
from onepass.optim import Lion
from onepass.optim.state import prepare_state

SHAPES = [(3, 4), (5,), (40_001,)]


def train(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range) -> None:
    for i in steps:
        for j, p in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * i + j)
            p.grad = torch.randn(p.shape, dtype=torch.float32, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(("library", "tolerance"), [("lion_pytorch", 1e-13), ("optimi", 1e-12), ("onepass.optim", 0.0)])
def test_checkpoints_of_others_go_on(library: str, tolerance: float) -> None:
    """And our own, codes too, from a file that keeps no order of memory, as safetensors."""
    a = [*make_params(torch.float64, SHAPES), torch.randn(80, 64).double().mT.requires_grad_()]
    options = {} if tolerance else {"state_dtype": "int8"}
    theirs = pytest.importorskip(library).Lion(a, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, **options)
    train(theirs, a, range(4))
    b = clones(a)
    ours = Lion(b, lr=1.0)
    torch.save(theirs.state_dict(), file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state in saved["state"].values():
        state.update((key, t.contiguous()) for key, t in state.items() if isinstance(t, Tensor))
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["betas"] == (0.8, 0.95)
    train(theirs, a, range(4, 9))
    train(ours, b, range(4, 9))
    for p, q in zip(a, b, strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance)


def test_optimi_compensation_becomes_a_remainder() -> None:
    optimi = pytest.importorskip("optimi")
    p = torch.randn(1000).bfloat16().requires_grad_()
    theirs = optimi.Lion([p], lr=1e-5, foreach=False, triton=False)
    train(theirs, [p], range(7))
    comp = theirs.state[p]["kahan_comp"].float()
    assert bool(comp.any())
    ours = Lion([p], lr=1e-5)
    ours.load_state_dict(theirs.state_dict())
    state = ours.state[p]
    prepare_state(state, p, ours.param_groups[0])
    assert list(state) == ["exp_avg", "remainder"]
    full = join(p.detach(), state["remainder"])
    # where the compensation is at most half a unit of the weight, 24 bits hold the sum
    fits = comp.abs() <= (p.detach().float().abs() * 2.0**-9)
    assert torch.allclose(full[fits], (p.detach().float() + comp)[fits], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize(
    ("p", "saved", "match"),
    [(torch.ones(4).half(), dict.fromkeys(("exp_avg", "kahan_comp"), torch.zeros(4).half()),
      "float16 parameter has a 'kahan_comp'.*delete the 'kahan_comp'"),
     (torch.ones(4096), {"exp_avg": torch.arange(4096.0) % 128}, "int8 codes but no scales.*: load whole tensors")],
)  # fmt: skip
def test_a_state_that_would_go_on_otherwise_is_refused(p: Tensor, saved: dict[str, Tensor], match: str) -> None:
    state = {"state": {0: saved}, "param_groups": [{"lr": 0.5, "beta1": 0.9, "beta2": 0.99, "params": [0]}]}
    with pytest.raises(ValueError, match=match):
        Lion([p.requires_grad_()]).load_state_dict(state)
    saved.popitem()
    Lion([p]).load_state_dict(state)


@pytest.mark.parametrize(
    ("dtype", "state", "group", "kept"),
    [
        # what stochastic rounding kept: a word per weight's stream, and options
        (torch.bfloat16, {"rounding": torch.tensor(7)}, {"low_precision": "stochastic", "seed": 3}, "remainder"),
        # optimi's with kahan_sum=False
        (torch.bfloat16, {"kahan_comp": None}, {"kahan_sum": False}, "remainder"),
        (torch.float16, {"kahan_comp": None}, {"kahan_sum": False}, ""),
        # timm's
        (torch.float32, {}, {"weight_decay": 0.0, "caution": False, "maximize": False, "foreach": None}, ""),
        (torch.float32, {}, {"weight_decay": 0.0, "caution": True}, ""),
    ],
    ids=["stochastic", "optimi bf16", "optimi fp16", "timm", "timm cautious"],
)
def test_states_of_others_and_of_modes_that_are_gone_go_on(
    dtype: torch.dtype, state: dict[str, Any], group: dict[str, Any], kept: str
) -> None:
    p = torch.ones(4, dtype=dtype, requires_grad=True)
    p.grad = torch.full_like(p, -1.0)
    saved, group = {"exp_avg": torch.full((4,), -100.0, dtype=dtype), **state}, {"betas": (0.9, 0.99), **group}
    optimizer = Lion([p], lr=1.0)
    optimizer.load_state_dict({"state": {0: saved}, "param_groups": [{"lr": 0.5, **group, "params": [0]}]})
    optimizer.step()
    assert [*optimizer.state[p]] == ["exp_avg", kept][: 1 + bool(kept)]
    assert torch.equal(p, torch.full_like(p, 1.5))
    found = optimizer.param_groups[0]
    assert found["cautious"] is group.get("caution", False)
    assert not {"seed", "caution"} & found.keys()


def test_a_dtype_that_the_group_asks_for_stays_after_a_checkpoint_of_others() -> None:
    p = torch.zeros(5000, requires_grad=True)
    theirs = lion_pytorch.Lion([p])
    train(theirs, [p], range(1))
    for dtype, there in (("int8", torch.float32), (torch.bfloat16, torch.bfloat16)):
        ours = Lion([p], state_dtype=dtype)
        ours.load_state_dict(theirs.state_dict())
        # codes are made by the step that needs them
        assert (ours.state[p]["exp_avg"].dtype, ours.param_groups[0]["state_dtype"]) == (there, dtype)


def test_load_hooks_see_and_change_the_state() -> None:
    p = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Lion([p], lr=0.5)
    train(optimizer, [p], range(1))
    seen = []

    def before(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {0: {**state["state"][0], "exp_avg": torch.full((3,), 2.0)}}}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["remainder"].dtype))
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p]["exp_avg"], torch.full((3,), 2.0))
    assert seen == [torch.int16]


OTHERS = ["AdamW", "Adam", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_optimizers_are_refused(name: str, steps: int) -> None:
    """Their rate and decay would become Lion's in silence; nothing of this one changes."""
    params = [torch.randn(s).requires_grad_() for s in SHAPES]
    other = getattr(torch.optim, name)(params, lr=3e-3)
    train(other, params, range(steps))
    lion = Lion(params, lr=1e-5, weight_decay=0.5)
    train(lion, params, range(1))
    before = copy.deepcopy(lion.state_dict())
    with pytest.raises(ValueError, match=r"another optimizer's state \((it has|no betas).*load the model alone"):
        lion.load_state_dict(other.state_dict())
    after = lion.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][i]["exp_avg"], s["exp_avg"]) for i, s in before["state"].items())
