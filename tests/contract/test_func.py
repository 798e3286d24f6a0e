"""Promise 5: torch.func's grad and vmap, and the loud failures beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import build, call, compare_gradients, float64, floats, gradients, replace, same_sums, spec_samples, terms
from harness import upstream as upstreams
from onepass.core.launch import INTERPRET
from onepass.core.spec import Sample, Spec

pytestmark = pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")


def _loss(fn: Any, sample: Sample, upstream: list[Tensor]) -> Tensor:
    outs = call(fn, sample)
    return torch.stack([(o * g.to(o)).sum() for o, g in zip(outs, upstream, strict=True)]).sum()


@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_grad(spec: Spec, name: str) -> None:
    sample = build(spec, name, "cpu", torch.float32)
    gy = upstreams(call(spec.op, sample))
    inputs = floats(sample)
    got = torch.func.grad(lambda tensors: _loss(spec.op, replace(sample, tensors), gy))(inputs)
    compare_gradients(spec, got, gradients(spec.reference, float64(sample)), torch.float32)


@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_vmap(spec: Spec, name: str) -> None:
    """Three copies of the first argument, mapped over, against a loop."""
    sample = build(spec, name, "cpu", torch.float32)
    x = sample.args[0]
    batch = torch.stack([x, x * 0.5, x + 1.0])
    mapped = torch.vmap(lambda t: tuple(call(spec.op, replace(sample, {0: t}))))(batch)
    for i, t in enumerate(batch):
        for m, e in zip(mapped, call(spec.op, replace(sample, {0: t})), strict=True):
            same_sums(m[i], e, terms(sample))
