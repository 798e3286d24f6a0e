"""Promise 3: transposed, sliced, stepped and expanded inputs give what a contiguous copy gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness import DEVICES, build, call, compare_gradients, float64, floats, gradients, replace, spec_samples
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


LAYOUTS = [_transposed, _stepped, _sliced, _expanded]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize(("spec", "name"), spec_samples())
def test_strides(spec: Spec, name: str, layout: Callable[[Tensor], Tensor], device: str) -> None:
    sample = build(spec, name, device, torch.float32)
    strided = replace(sample, {k: layout(t) for k, t in floats(sample).items()})
    rtol, atol = spec.tolerances[torch.float32]
    for a, e in zip(call(spec.op, strided), call(spec.reference, float64(strided)), strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=rtol, atol=atol)
    if layout is not _expanded:  # an expanded leaf has no gradient layout of its own
        compare_gradients(spec, gradients(spec.op, strided), gradients(spec.reference, float64(strided)), torch.float32)
