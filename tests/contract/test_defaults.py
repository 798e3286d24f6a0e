"""Promise: torch's default dtype and default device change no result; they are for tensors that users make."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import DEVICES, build, call, gradients, leaves, replace, spec_samples
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample, Spec

DTYPES = [torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_default_dtype(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = _everything(spec, sample)
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            found = _everything(spec, sample)
        finally:
            torch.set_default_dtype(torch.float32)
        _same(found, expected)


@pytest.mark.skipif(INTERPRET, reason="the interpreter makes its own tensors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_default_device(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = _everything(spec, sample)
    with torch.device("meta"):
        outs = call(spec.op, sample)
        inputs = leaves(sample)
        again = call(spec.op, replace(sample, inputs))
    _same(outs, expected[: len(outs)])
    _same([o.detach() for o in again], expected[: len(outs)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_default_dtype_of_shapes_alone(spec: Spec, name: str, dtype: torch.dtype) -> None:
    """A compiled program is made from what an operator says of its results, on tensors without data."""
    expected = call(spec.op, build(spec, name, "cpu", dtype))
    sample = build(spec, name, "cpu", dtype)
    meta = replace(sample, {k: v.to("meta") for k, v in _tensors(sample).items()})
    torch.set_default_dtype(torch.float64)
    try:
        found = call(spec.op, meta)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [o.dtype for o in found] == [o.dtype for o in expected]


def _tensors(sample: Sample) -> dict[int | str, Tensor]:
    both = [*enumerate(sample.args), *sample.kwargs.items()]
    return {k: v for k, v in both if isinstance(v, Tensor)}
