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
    spec_samples,
    terms,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import Spec


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_gradients(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = gradients(spec.reference, float64(sample))
    actual = gradients(spec.op, sample)
    compare_gradients(spec, actual, expected, dtype, {k: t.dtype for k, t in floats(sample).items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_each_gradient_alone(spec: Spec, name: str, device: str) -> None:
    """Asking for one gradient gives the same numbers as asking for all of them."""
    sample = build(spec, name, device, torch.float32)
    together = gradients(spec.op, sample)
    for key in floats(sample):
        alone = gradients(spec.op, sample, wanted=[key])
        assert list(alone) == [key]
        if together[key] is not None:
            same_sums(alone[key], together[key], terms(sample), floor=(1e-6, 1e-6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_stride_0_upstream(spec: Spec, name: str, device: str) -> None:
    """`.sum().backward()` hands backward an expanded gradient."""
    sample = build(spec, name, device, torch.float32)
    inputs = leaves(sample)
    outs = [o for o in call(spec.op, replace(sample, inputs)) if o.requires_grad]
    wide = float64(sample)
    reference_inputs = leaves(wide)
    reference_outs = [o for o in call(spec.reference, replace(wide, reference_inputs)) if o.requires_grad]
    if not outs:
        return
    torch.stack([o.sum() for o in outs]).sum().backward()
    torch.stack([o.sum() for o in reference_outs]).sum().backward()
    compare_gradients(
        spec,
        {k: t.grad for k, t in inputs.items()},
        {k: t.grad for k, t in reference_inputs.items()},
        torch.float32,
    )


@pytest.mark.skipif(INTERPRET, reason="float64 never reaches a kernel")
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_gradcheck(spec: Spec, name: str) -> None:
    sample = build(spec, name, "cpu", torch.float64)
    inputs = leaves(sample)
    if spec.surrogate:
        pytest.skip("its gradients are not the slopes of its values")
    if not inputs or sum(t.numel() for t in inputs.values()) > 300 or not all(t.numel() for t in inputs.values()):
        pytest.skip("gradcheck perturbs every element: small samples only")
    keys = list(inputs)

    def fn(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call(spec.op, replace(sample, dict(zip(keys, tensors, strict=True)))))

    assert torch.autograd.gradcheck(fn, tuple(t.contiguous() for t in inputs.values()), fast_mode=True)
