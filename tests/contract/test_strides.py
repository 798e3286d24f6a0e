"""Promise 3: transposed, sliced, stepped and expanded inputs give what a contiguous copy gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness import (
    DEVICES,
    build,
    call,
    close,
    compare_gradients,
    float64,
    floats,
    gradients,
    in_turn,
    replace,
    samples_in_turn,
)
from onepass.core.launch import INTERPRET
from onepass.core.spec import Spec


def _transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() >= 2 else _stepped(t)


def _stepped(t: Tensor) -> Tensor:
    """Every second column of a wider tensor; what lies between is NaN."""
    if not t.dim():
        return t
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    view = wide[..., ::2]
    return view.copy_(t)


def _sliced(t: Tensor) -> Tensor:
    """A window of wider rows at an odd offset: rows start unaligned."""
    if not t.dim():
        return t
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), torch.nan, dtype=t.dtype, device=t.device)
    return wide[..., 3 : 3 + t.shape[-1]].copy_(t)


def _expanded(t: Tensor) -> Tensor:
    """All rows are one row (changes the values: the reference sees the same)."""
    return t[:1].expand(t.shape) if t.dim() >= 2 and t.shape[0] else t


LAYOUTS = [_transposed, _stepped, _sliced]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("spec", "name"), samples_in_turn(2))
def test_strides(spec: Spec, name: str, device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    rtol, atol = spec.tolerances[torch.float32]
    wide = float64(sample)
    values, grads = call(spec.reference, wide), gradients(spec.reference, wide)
    # the interpreter takes a millisecond a program
    for layout in [in_turn(LAYOUTS, spec, name)] if INTERPRET else LAYOUTS:
        strided = replace(sample, {k: layout(t) for k, t in floats(sample).items()})
        for a, e in zip(call(spec.op, strided), values, strict=True):
            close(a, e, rtol, atol, layout.__name__)
        compare_gradients(spec, gradients(spec.op, strided), grads, torch.float32)
    # an expanded leaf has no gradient layout of its own
    expanded = replace(sample, {k: _expanded(t) for k, t in floats(sample).items()})
    for a, e in zip(call(spec.op, expanded), call(spec.reference, float64(expanded)), strict=True):
        close(a, e, rtol, atol, "expanded")
