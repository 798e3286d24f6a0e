"""Promise 5: torch.compile(fullgraph=True), forward and backward, and export, all through the registered op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import (
    SPECS,
    Module,
    build,
    call,
    compare_gradients,
    float64,
    gradients,
    largest_small,
    leaves,
    replace,
    sample_names,
    spec_samples,
    specs,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import TOLERANCES, Spec

pytestmark = pytest.mark.skipif(INTERPRET, reason="compiled code calls the registered op, which is tested eagerly")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _typical(spec: Spec) -> str:
    """A sample with rows and columns, to compile for real; the first one where no name says so."""
    names = sample_names(SPECS.index(spec))
    return next((n for n in names if "row" in n or "3-d" in n), names[0])


def _two_of_each() -> list[Any]:
    """Of each operator the typical sample and the one of most arguments; slow: every third of the others."""
    chosen = {(spec.name, name) for spec in SPECS for name in (_typical(spec), largest_small(spec)[0])}
    two, others = (
        [p for p in spec_samples() if ((p.values[0].name, p.values[1]) in chosen) == i] for i in (True, False)
    )
    return two + [pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in others[::3]]


@pytest.mark.parametrize(("spec", "name"), _two_of_each())
def test_fullgraph(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    compiled = torch.compile(spec.op, fullgraph=True, backend="aot_eager")
    tolerance = TOLERANCES[torch.float32]
    outs = call(compiled, replace(sample, leaves(sample)))
    for a, e in zip(outs, call(spec.reference, float64(sample)), strict=True):
        torch.testing.assert_close(a.detach().cpu().double(), e, rtol=tolerance, atol=tolerance)
    compare_gradients(gradients(compiled, sample), gradients(spec.reference, float64(sample)), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("spec", specs())
def test_inductor(spec: Spec, device: str) -> None:
    """The real compiler, with neighbours that it fuses among themselves."""
    sample = build(spec, _typical(spec), device, torch.float32)

    def neighbours(*args: Any, **kwargs: Any) -> Any:
        out = spec.op(args[0] * 1.0, *args[1:], **kwargs)
        return out * 1.0 if isinstance(out, torch.Tensor) else out

    compiled = torch.compile(neighbours, fullgraph=True)
    compare_gradients(gradients(compiled, sample), gradients(spec.reference, float64(sample)), torch.float32)


@pytest.mark.parametrize("spec", specs())
def test_export(spec: Spec) -> None:
    sample = build(spec, _typical(spec), "cpu", torch.float32)
    exported = torch.export.export(Module(spec.op), sample.args, sample.kwargs)
    assert any("onepass" in str(node.target) for node in exported.graph.nodes)
    for a, e in zip(call(exported.module(), sample), call(spec.op, sample), strict=True):
        torch.testing.assert_close(a, e)
    trained = gradients(exported.module(), sample)  # although its arguments wanted none
    compare_gradients(trained, gradients(spec.reference, float64(sample)), torch.float32)
