"""Promise 4: gradients of every floating-point input agree with float64 autograd, and only those asked for exist."""

from __future__ import annotations

import pytest
import torch

from harness import (
    DEVICES,
    DEVICES_AND_DTYPES,
    build,
    call,
    compare_gradients,
    float64,
    floats,
    gradients,
    leaves,
    replace,
    same_sums,
    samples_in_turn,
    spec_samples,
    terms,
)
from onepass.core.spec import Spec


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_gradients(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = gradients(spec.reference, float64(sample))
    actual = gradients(spec.op, sample)
    compare_gradients(spec, actual, expected, dtype, {k: t.dtype for k, t in floats(sample).items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), samples_in_turn(0))
def test_each_gradient_alone_and_of_a_sum(spec: Spec, name: str, device: str) -> None:
    """One gradient alone is that beside all others; `.sum()`, whose gradient is expanded, gives that of ones."""
    sample = build(spec, name, device, torch.float32)
    together = gradients(spec.op, sample)
    for key in floats(sample):
        alone = gradients(spec.op, sample, wanted=[key])
        assert list(alone) == [key]
        if together[key] is not None:
            same_sums(alone[key], together[key], terms(sample), floor=(1e-6, 1e-6))
    inputs = leaves(sample)
    outs = [o for o in call(spec.op, replace(sample, inputs)) if o.requires_grad]
    if not outs:
        return
    total = torch.stack([o.sum() for o in outs]).sum()
    found = torch.autograd.grad(total, list(inputs.values()), retain_graph=True, allow_unused=True)
    ones = [torch.ones_like(o) for o in outs]
    for a, e in zip(found, torch.autograd.grad(outs, list(inputs.values()), ones, allow_unused=True), strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            same_sums(a, e, terms(sample), floor=(1e-6, 1e-6))
