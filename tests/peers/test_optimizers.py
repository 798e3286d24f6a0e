"""What torch's tests ask of every optimizer, of Lion: their inputs, schedulers, checkpoints and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims, optim_db

from onepass.optim import Lion

pytestmark = pytest.mark.peer

INFO = next(info for info in optim_db if info.optim_cls is AdamW)
# on "cuda" there are more of them: capturable, and a tensor as lr
INPUTS = [
    pytest.param({k: v for k, v in given.kwargs.items() if k not in ("amsgrad", "betas")}, id=given.desc)
    for given in INFO.optim_inputs_func("cuda")
]


def _problem(options: dict[str, Any]) -> tuple[Lion, list[Tensor], Callable[[], Tensor]]:
    """An optimizer, what it trains, and a closure whose loss is to fall, or to rise if it maximizes."""
    torch.manual_seed(0)
    x, params = torch.randn(5), [nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10))]
    optimizer = Lion(params, **({"lr": 0.01} | copy.deepcopy(options)))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (params[0].mv(x) + params[1]).square().sum() * (-1 if options.get("maximize") else 1)
        loss.backward()
        return loss.detach()

    return optimizer, params, closure


@pytest.mark.parametrize("options", INPUTS)
def test_goes_the_right_way_with_schedulers(options: dict[str, Any]) -> None:
    for makers in INFO.scheduler_inputs:
        optimizer, _, closure = _problem(options)
        schedulers, first = [make(optimizer) for make in makers], closure()
        for _ in range(40):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                scheduler.step(*[loss] * hasattr(scheduler, "best"))
        assert (closure() > first) == bool(options.get("maximize"))


@pytest.mark.parametrize("options", INPUTS)
def test_a_checkpoint_goes_on(options: dict[str, Any]) -> None:
    """Also one of a version that had fewer options."""
    optimizer, params, closure = _problem(options)
    other, others, closure_of_other = _problem(options)
    for _ in range(3):
        optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    for flag in set(INFO.not_og_supported_flags) - {"maximize"}:
        del saved["param_groups"][0][flag]
    other.load_state_dict(saved)
    for _ in range(3):
        optimizer.step(closure)
        other.step(closure_of_other)
    torch.testing.assert_close(others, params, rtol=0, atol=0)


REFUSED = get_error_inputs_for_all_optims("cpu", torch.float32)


@pytest.mark.parametrize("wrong", REFUSED, ids=[wrong.optimizer_error_input.desc for wrong in REFUSED])
def test_what_torchs_refuse_is_refused(wrong: Any) -> None:
    given = wrong.optimizer_error_input
    params = [nn.Parameter(torch.ones(1))] if given.params is None else given.params
    warned = issubclass(wrong.error_type, Warning)
    with (pytest.warns if warned else pytest.raises)(wrong.error_type, match=wrong.error_regex):
        Lion(params, **given.kwargs)
