"""Promises 1 to 3: values and gradients are those of the definition in float64, in any layout; bad input is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import (
    DEVICES_AND_DTYPES,
    SPECS,
    build,
    call,
    close,
    compare_gradients,
    float64,
    floats,
    gradients,
    in_turn,
    leaves,
    replace,
    same_sums,
    samples_in_turn,
    spec_samples,
    terms,
    upstream,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import TOLERANCES, BadCall, Spec


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
        close(a, e, TOLERANCES[dtype], TOLERANCES[dtype], f"output {i}")


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_gradients(spec: Spec, name: str, device: str, dtype: torch.dtype) -> None:
    sample = build(spec, name, device, dtype)
    expected = gradients(spec.reference, float64(sample))
    actual = gradients(spec.op, sample)
    compare_gradients(actual, expected, dtype, {k: t.dtype for k, t in floats(sample).items()})


@pytest.mark.parametrize(("spec", "name"), samples_in_turn(0))
def test_each_gradient_alone(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    together = gradients(spec.op, sample)
    for key in floats(sample):
        alone = gradients(spec.op, sample, wanted=[key])
        assert list(alone) == [key]
        if together[key] is not None:
            same_sums(alone[key], together[key], terms(sample), floor=(1e-6, 1e-6))


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() >= 2 else _stepped(t)


def _stepped(t: Tensor) -> Tensor:
    """Every second column of a wider tensor; what lies between is NaN."""
    if not t.dim():
        return t
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    return wide[..., ::2].copy_(t)


def _sliced(t: Tensor) -> Tensor:
    """A window of wider rows at an odd offset: rows start unaligned."""
    if not t.dim():
        return t
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype, device=t.device)
    return wide[..., 3 : 3 + t.shape[-1]].copy_(t)


def _expanded(t: Tensor) -> Tensor:
    """All rows are one row (changes the values: the reference sees the same)."""
    return t[:1].expand(t.shape) if t.dim() >= 2 and t.shape[0] else t


def _negated(t: Tensor) -> Tensor:
    """A view such as `z.conj().imag`: its memory has the other sign."""
    return torch._neg_view(-t)


LAYOUTS = [_negated, _transposed, _stepped, _sliced]


@pytest.mark.parametrize(("spec", "name"), samples_in_turn(2))
def test_strides(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    tolerance = TOLERANCES[torch.float32]
    wide = float64(sample)
    values, grads = call(spec.reference, wide), gradients(spec.reference, wide)
    # the interpreter takes a millisecond a program
    for layout in [in_turn(LAYOUTS, spec, name)] if INTERPRET else LAYOUTS:
        strided = replace(sample, {k: layout(t) for k, t in floats(sample).items()})
        for a, e in zip(call(spec.op, strided), values, strict=True):
            close(a, e, tolerance, tolerance, layout.__name__)
        compare_gradients(gradients(spec.op, strided), grads, torch.float32)
    # an expanded leaf has no gradient layout of its own
    expanded = replace(sample, {k: _expanded(t) for k, t in floats(sample).items()})
    for a, e in zip(call(spec.op, expanded), call(spec.reference, float64(expanded)), strict=True):
        close(a, e, tolerance, tolerance, "expanded")


# whose first result backward reads
KEPT = ("score", "causal_choice", "span_attention", "rotary_attention")


@pytest.mark.parametrize(("spec", "name"), samples_in_turn(0))
def test_results_are_the_callers(spec: Spec, name: str, device: str) -> None:
    """They may be changed in place; upstream gradients have any layout, and are left as they were."""
    sample = build(spec, name, device, torch.float32)
    inputs = leaves(sample)
    outs = [o for o in call(spec.op, replace(sample, inputs)) if o.requires_grad]
    gy = [g.to(o) for o, g in zip(outs, upstream(outs), strict=True)]

    def grads(outs: list[Tensor], gy: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(outs, [*inputs.values()], gy, retain_graph=True, materialize_grads=True)
        return [g.detach() for g in found]

    if not outs:
        return
    plain = grads(outs, gy)
    for layout in [in_turn(LAYOUTS, spec, name)] if INTERPRET else LAYOUTS:
        given = [layout(g) for g in gy]
        torch.testing.assert_close(grads(outs, given), plain, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, given, gy)), layout.__name__
    ones = [torch.ones((), device=device).expand(o.shape) for o in outs]
    torch.testing.assert_close(grads(outs, ones), grads(outs, [o.contiguous() for o in ones]), rtol=1e-5, atol=1e-5)
    doubled = grads(outs, [2 * gy[0], *gy[1:]])
    try:
        outs[0].mul_(2)
        torch.testing.assert_close(grads(outs, gy), doubled, rtol=1e-5, atol=1e-5)
    except RuntimeError as error:
        # what backward reads torch guards
        if spec.name not in KEPT or "inplace" not in str(error):
            raise


@pytest.mark.parametrize("bad", [pytest.param(b, id=f"{spec.name}-{b.name}") for spec in SPECS for b in spec.bad_calls])
def test_refused(bad: BadCall) -> None:
    with pytest.raises(bad.error, match=bad.match):
        bad.call()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_operator_declares_bad_calls(spec) -> None:
    assert spec.bad_calls
