"""Promise 5: Jacobians and batches of gradients, by every rule for a batch that an operator has, against float64.

A batch may have no, one or two elements, lie in front or at the end, and be one of some arguments alone. Under
TRITON_INTERPRET=1 the kernels get what the rules hand over, and read it by address.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from harness import (
    SPECS,
    build,
    call,
    close,
    float64,
    floats,
    gradients,
    in_turn,
    replace,
    spec_samples,
    specs,
    upstream,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import GRADIENT, TOLERANCES, Spec

Tensors = dict[int | str, Tensor]

# a Jacobian has a row per output, and the interpreter takes a millisecond per program
SMALL = 20 if INTERPRET else 90
# rows and columns of the smallest argument: columns come in pairs, queries with their keys and values
NARROWEST = {"rotary": (1, 2), "rotary_attention": (3, 2), "qk_norm_rope": (1, 2)}
# which arguments are batched, whether upstream gradients are, where the batch lies, whose gradients are wanted
CASES = (
    ("none", True, "in front", "first"), ("none", True, "at the end", "all"), ("first", False, "in front", "all"),
    ("first", True, "at the end", "first"), ("others", True, "in front", "all"), ("all", False, "at the end", "all"),
    ("all", True, "in front", "first"),
)  # fmt: skip


def _small() -> list[Any]:
    return [
        p for p in spec_samples()
        if sum(t.numel() for t in floats(build(*p.values, "cpu", torch.float32)).values()) <= SMALL
    ]  # fmt: skip


@pytest.mark.parametrize("spec", specs())
def test_the_narrowest_cases_are_among_the_samples(spec: Spec) -> None:
    """One row, no rows, one column."""
    samples = [build(spec, p.values[1], "cpu", torch.float32) for p in spec_samples() if p.values[0] is spec]
    shapes = [s.args[0].shape for s in samples]
    rows, narrowest = NARROWEST.get(spec.name, (1, 1))
    assert any(math.prod(shape[:-1]) == rows for shape in shapes), "no sample of one row"
    assert any(not math.prod(shape[:-1]) for shape in shapes), "no sample without rows"
    assert any(shape[-1] == narrowest and math.prod(shape) for shape in shapes), "no sample of one column"


def _compare(actual: Tensor, expected: Tensor, what: str) -> None:
    if not expected.numel():
        assert actual.shape == expected.shape
        return
    tolerance = GRADIENT * TOLERANCES[torch.float32]
    scale = max(1.0, float(expected.abs().max()))
    close(actual, expected, tolerance, tolerance * scale, what)


@pytest.mark.skipif(INTERPRET, reason="batches of gradients hand the kernels the same")
@pytest.mark.parametrize(("spec", "name"), _small())
def test_jacobians(spec: Spec, name: str) -> None:
    sample = build(spec, name, "cpu", torch.float32)
    inputs, wide = floats(sample), float64(sample)
    exact = floats(wide)

    def definition(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(spec.reference, replace(wide, dict(zip(exact, tensors, strict=True)))))

    if not all(t.numel() for t in (*inputs.values(), *call(spec.op, sample))):
        pytest.skip("a Jacobian without elements")
    expected = jacobian(definition, tuple(exact.values()))
    for keys in {(k,) for k in inputs} | {tuple(inputs)}:
        wanted = {k: inputs[k] for k in keys}
        actual = torch.func.jacrev(lambda tensors: tuple(call(spec.op, replace(sample, tensors))))(wanted)
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            for key in wanted:
                _compare(ours[key], theirs[[*inputs].index(key)], f"output {i} by {key} of {keys}")


def _cases(spec: Spec, name: str, size: int) -> Iterator[tuple[str, bool, str, str]]:
    """All for batches of two; for smaller batches, and under the interpreter, samples take turns."""
    for i, case in enumerate(CASES):
        if (size == 2 and not INTERPRET) or in_turn(range(3), spec, name) == i % 3:
            yield case


@pytest.mark.parametrize("size", [2] if INTERPRET else [0, 1, 2])
@pytest.mark.parametrize(("spec", "name"), _small())
def test_batches_of_gradients(spec: Spec, name: str, size: int) -> None:
    """vmap of a vjp, for whatever is batched: per-sample gradients, and many upstream gradients of one call."""
    sample = build(spec, name, "cpu", torch.float32)
    inputs = floats(sample)
    gy = [g.float() for g in upstream(call(spec.op, sample))]

    for batched, many, place, whose in _cases(spec, name, size):
        keys = {"none": [], "first": list(inputs)[:1], "others": list(inputs)[1:], "all": list(inputs)}[batched]
        if not keys and not many:
            continue

        wanted = list(inputs)[: 1 if whose == "first" else None]

        def pull(tensors: Tensors, gy: list[Tensor], wanted: list[int | str] = wanted) -> Tensors:
            known = replace(sample, tensors)
            found = torch.func.vjp(lambda given: call(spec.op, replace(known, given)), {k: tensors[k] for k in wanted})
            return found[1](gy)[0]  # type: ignore[no-any-return]

        def stack(t: Tensor, place: str = place) -> Tensor:
            elements = [t, 0.5 * t][:size]
            dim = t.dim() if place == "at the end" else 0
            return torch.stack(elements, dim) if size else t.new_empty((*t.shape[:dim], 0, *t.shape[dim:]))

        dims = {k: (t.dim() if place == "at the end" else 0) if k in keys else None for k, t in inputs.items()}
        g_dims = [(g.dim() if place == "at the end" else 0) if many else None for g in gy]
        tensors = {k: stack(t) if k in keys else t for k, t in inputs.items()}
        got = torch.vmap(pull, in_dims=(dims, g_dims))(tensors, [stack(g) if many else g for g in gy])
        for k in wanted:
            assert got[k].shape == (size, *inputs[k].shape)
        for i, factor in enumerate((1, 0.5)[:size]):
            element = {k: factor * t if k in keys else t for k, t in inputs.items()}
            up = [factor * g if many else g for g in gy]
            expected = gradients(spec.reference, float64(replace(sample, element)), gy=up)
            for k in wanted:
                exact = torch.zeros_like(got[k][i]).double() if expected.get(k) is None else expected[k]
                _compare(got[k][i], exact, f"{batched} batched {place}, element {i}, argument {k}")


def test_the_samples_of_every_operator_are_tried() -> None:
    assert {p.values[0].name for p in _small()} == {spec.name for spec in SPECS}
