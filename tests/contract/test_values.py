"""Promise 1 and 2: CPU and CUDA agree with the float64 definition in every dtype."""

from __future__ import annotations

import pytest
import torch

from harness import DEVICES_AND_DTYPES, build, call, close, float64, spec_samples
from onepass.core.spec import Spec


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_values(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    """What is given is left alone."""
    sample = build(spec, name, device, dtype)
    before = float64(build(spec, name, device, dtype))
    actual = call(spec.op, sample)
    for was, now in zip(before.args, float64(sample).args, strict=True):
        if isinstance(was, torch.Tensor):
            torch.testing.assert_close(was, now, rtol=0, atol=0, equal_nan=True)
    expected = call(spec.reference, before)
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.device.type == device
        close(a, e, *spec.tolerances[dtype], f"output {i}")
