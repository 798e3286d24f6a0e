"""Promise 5: every registered op passes torch's own checks (schema, fake, autograd registration, AOT dispatch)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from harness import SPECS
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="the dispatcher is the same in both jobs")

CHECKS = [
    pytest.param(i, j, id=f"{spec.name}-{j}") for i, spec in enumerate(SPECS) for j, _ in enumerate(spec.opchecks())
]


def _move(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    return tuple(
        a.detach().to(device).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args
    )


@pytest.mark.parametrize(("i", "j"), CHECKS)
def test_opcheck(i: int, j: int) -> None:
    op, args = list(SPECS[i].opchecks())[j]
    opcheck(op, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("i", "j"), CHECKS)
def test_opcheck_cuda(i: int, j: int) -> None:
    op, args = list(SPECS[i].opchecks())[j]
    opcheck(op, _move(args, "cuda"))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_operator_declares_opchecks(spec) -> None:
    assert list(spec.opchecks())
