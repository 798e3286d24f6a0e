"""torch's own samples of the operators that onepass has too: none refused, each judged against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import onepass

pytestmark = pytest.mark.peer

OURS: dict[str, Callable[..., Any]] = {
    "topk": onepass.topk,
    "nn.functional.layer_norm": onepass.layer_norm,
    "nn.functional.rms_norm": onepass.rms_norm,
}
INFOS = [pytest.param(info, OURS[info.name], id=info.name) for info in op_db if info.name in OURS]


def _samples(info: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    return list(info.sample_inputs("cpu", dtype, requires_grad=True))


def _judged(call: Callable[..., Any], sample: SampleInput) -> tuple[Any, list[Tensor]]:
    """What the call gives; its first result and the gradients of its sum of squares."""
    tensors = [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, Tensor)]
    found = call(sample.input, *sample.args, **sample.kwargs)
    y = found if isinstance(found, Tensor) else found[0]
    return found, [y.detach(), *torch.autograd.grad(y.square().sum(), tensors)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("info", "ours"), INFOS)
def test_samples(info: OpInfo, ours: Callable[..., Any], dtype: torch.dtype) -> None:
    samples = _samples(info, dtype)
    assert len(samples) >= 6
    for sample in samples:
        wide = sample.transform(lambda t: t.detach().double().requires_grad_() if isinstance(t, Tensor) else t)
        (found, ours_), (_, torchs_), (_, exact) = (
            _judged(call, given) for call, given in ((ours, sample), (info.op, sample), (info.op, wide))
        )
        for actual, theirs, true in zip(ours_, torchs_, exact, strict=True):
            assert actual.dtype == dtype
            assert actual.shape == true.shape
            farthest, torchs_farthest, largest = (
                float(t.abs().max()) if t.numel() else 0.0
                for t in (actual.double() - true, theirs.double() - true, true)
            )
            # float64's own roundings, and one of the result
            assert farthest <= 2 * torchs_farthest + torch.finfo(dtype).eps * largest + 1e-12
        if info.name == "topk":
            dim = sample.args[1] if len(sample.args) > 1 else -1
            assert torch.equal(found.values, sample.input.gather(dim, found.indices))


@pytest.mark.parametrize(("info", "ours"), INFOS)
def test_what_torch_refuses_is_refused(info: OpInfo, ours: Callable[..., Any]) -> None:
    for wrong in info.error_inputs("cpu") if info.error_inputs_func else ():
        sample = wrong.sample_input
        with pytest.raises((ValueError, TypeError), match=f"^{ours.__name__}: "):
            ours(sample.input, *sample.args, **sample.kwargs)
