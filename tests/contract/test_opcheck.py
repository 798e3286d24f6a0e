"""Promise 5: every registered op passes torch's own checks (schema, fake, autograd registration, AOT dispatch)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.library import opcheck

from harness import SPECS
from onepass.core.launch import INTERPRET
from onepass.core.spec import Spec

pytestmark = pytest.mark.skipif(INTERPRET, reason="the dispatcher is the same in both jobs")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _checks() -> list[Any]:
    """(spec, place in its list): the first two of each registered op; the others are slow."""
    found, seen = [], Counter[str]()
    for spec in SPECS:
        for i, (op, _) in enumerate(spec.opchecks()):
            seen[str(op)] += 1
            marks = [pytest.mark.slow] if seen[str(op)] > 2 else []
            found.append(pytest.param(spec, i, id=f"{spec.name}-{i}", marks=marks))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "i"), _checks())
def test_opcheck(spec: Spec, i: int, device: str) -> None:
    op, args = list(spec.opchecks())[i]
    opcheck(op, tuple(
        a.detach().to(device).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args
    ))  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_operator_declares_opchecks(spec) -> None:
    assert list(spec.opchecks())
