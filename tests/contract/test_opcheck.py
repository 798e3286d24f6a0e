"""Promise 5: every registered op passes torch's own checks (schema, fake, autograd registration, AOT dispatch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from harness import SPECS, Calls, build, floats, gradients, largest_small, maker, outputs
from onepass.core.launch import INTERPRET
from onepass.ops.experts.choice import choose_experts
from onepass.ops.experts.op import expert_order, experts

pytestmark = pytest.mark.skipif(INTERPRET, reason="the dispatcher is the same in both jobs")

Make = Callable[..., Tensor]


def _sample(spec: Any, name: str, needs: str, make: Make) -> None:
    sample = build(spec, name, make(1).device.type, torch.float32)
    wanted = [*floats(sample)]
    gradients(spec.op, sample, wanted[-1:] if needs == "last" else wanted)


def _rows(spec: Any, name: str, make: Make) -> None:
    for out in outputs(spec.of_rows(make, 10)[name](make(3, 10).requires_grad_())):
        if out.requires_grad:  # codes have no gradient
            out.sum().backward(retain_graph=True)


def _experts(gated: bool, make: Make) -> None:
    # every choice is of an expert: what else lies in a row is arbitrary, and opcheck compares all results
    x, *matrices = (make(*s).requires_grad_() for s in ((9, 8), (9, 2), (3, 8, 16), (3, 8 if gated else 16, 8)))
    indices = torch.arange(18, device=x.device).view(9, 2) % 3
    experts(x, indices, *matrices, activation="swiglu" if gated else "gelu").sum().backward()
    expert_order(indices, 3)


def _choice(score_func: str, make: Make) -> None:
    u, weight = make(9, 8).requires_grad_(), make(4, 8).requires_grad_()
    found = choose_experts(u, weight, make(4), u[:, 0] > -1 if score_func == "softmax" else None, 2, score_func, True)
    found[0].square().sum().backward()


def _runs() -> Iterator[tuple[str, Callable[[Make], Any], bool]]:
    """(name, run, slow): of each operator the two samples of most arguments; slow: a call of rows with each option."""
    for spec in SPECS:
        for name, needs in zip(largest_small(spec) if spec.name != "experts" else (), ("all", "last"), strict=False):
            yield f"{spec.name}-{name}-{needs}", partial(_sample, spec, name, needs), False
        for name in spec.of_rows(maker("cpu", torch.float32), 10):
            yield f"{name}-rows", partial(_rows, spec, name), True
    for gated in (False, True):
        yield f"experts-{gated}", partial(_experts, gated), False
        yield f"choice-{gated}", partial(_choice, ("sigmoid", "softmax")[gated]), gated


RUNS = {name: (run, slow) for name, run, slow in _runs()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * slow) for n, (_, slow) in RUNS.items()])
def test_opcheck(name: str, device: str) -> None:
    with Calls() as calls:
        RUNS[name][0](maker(device, torch.float32))
    for op, args in dict(calls.found).items():
        needs = "backward" not in str(op)
        opcheck(op, tuple(
            a.detach().clone().requires_grad_(needs and a.requires_grad) if isinstance(a, Tensor) else a for a in args
        ))  # fmt: skip


def test_every_operator_is_checked() -> None:
    with Calls() as calls:
        for run, _ in RUNS.values():
            run(maker("cpu", torch.float32))
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("onepass::")}
    # those of whole layers: tests/fused/test_operators.py
    assert {n for n in registered if "routed" not in n} == {op._name for op, _ in calls.found}
