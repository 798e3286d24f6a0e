"""Promise: torch's default dtype and default device change no result; they are for tensors that users make.

test_modes has what an operator says of its results on tensors without data.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import DEVICES, build, call, gradients, in_turn, leaves, replace, samples_in_turn
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample, Spec


def _everything(spec: Spec, sample: Sample) -> list[Tensor | None]:
    return [*call(spec.op, sample), *gradients(spec.op, sample).values()]


def _same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        if a is None or e is None:
            assert a is e
            continue
        assert (a.dtype, a.device) == (e.dtype, e.device)
        assert torch.equal(a.nan_to_num(7.0), e.nan_to_num(7.0))


# interpreted bf16 is not a GPU's
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRET else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), samples_in_turn(1))
def test_defaults(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = _everything(spec, sample)
    defaults = (torch.bfloat16, torch.float64)
    for default in [in_turn(defaults, spec, name)] if INTERPRET else defaults:
        torch.set_default_dtype(default)
        try:
            found = _everything(spec, sample)
            if not INTERPRET:  # which makes its own tensors
                with torch.device("meta"):
                    outs = call(spec.op, replace(sample, leaves(sample)))
                _same([o.detach() for o in outs], expected[: len(outs)])
        finally:
            torch.set_default_dtype(torch.float32)
        _same(found, expected)
