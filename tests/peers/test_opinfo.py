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
from harness import DEVICES_AND_DTYPES

pytestmark = pytest.mark.peer

OURS: dict[str, Callable[..., Any]] = {
    "topk": onepass.topk,
    "nn.functional.layer_norm": onepass.layer_norm,
    "nn.functional.rms_norm": onepass.rms_norm,
}
INFOS = [pytest.param(info, OURS[info.name], id=info.name) for info in op_db if info.name in OURS]


def _judged(call: Callable[..., Any], sample: SampleInput, dtype: torch.dtype) -> tuple[Any, Tensor, list[Tensor]]:
    """What the call gives, upstream gradients that the dtype holds; its first result and its gradients."""
    tensors = [t for t in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(t, Tensor)]
    found = call(sample.input, *sample.args, **sample.kwargs)
    y = found if isinstance(found, Tensor) else found[0]
    upstream = torch.linspace(-1, 1, y.numel(), dtype=dtype).to(y).view_as(y)
    return found, upstream, [y.detach(), *torch.autograd.grad(y, tensors, upstream)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize(("info", "ours"), INFOS)
def test_samples(info: OpInfo, ours: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    samples = list(info.sample_inputs(device, dtype, requires_grad=True))
    assert len(samples) >= 6
    for sample in samples:
        wide = sample.transform(lambda t: t.detach().double().requires_grad_() if isinstance(t, Tensor) else t)
        (found, upstream, ours_), (*_, torchs_), (*_, exact) = (
            _judged(call, given, dtype) for call, given in ((ours, sample), (info.op, sample), (info.op, wide))
        )
        if info.name == "topk":
            # among equal scores torch's choice is free: the gradient is that of our indices
            dim = sample.args[1] if len(sample.args) > 1 else -1
            y = sample.input.gather(dim, found.indices)
            assert torch.equal(found.values, y)
            exact[1] = torchs_[1] = torch.autograd.grad(y, sample.input, upstream)[0].double()
        for actual, theirs, true in zip(ours_, torchs_, exact, strict=True):
            assert actual.dtype == dtype
            assert actual.shape == true.shape
            three = (actual.double() - true, theirs.double() - true, true)
            farthest, torchs_farthest, largest = (float(t.abs().max()) if t.numel() else 0.0 for t in three)
            # one rounding of the result, and those of terms of about 1 that cancel: of 1/√eps where rows are constant
            least = (1e-12 if dtype == torch.float64 else 1e-6) * (1 if largest else 1e-5**-0.5)
            assert farthest <= 2 * torchs_farthest + torch.finfo(dtype).eps * largest + least


@pytest.mark.parametrize(("info", "ours"), INFOS)
def test_what_torch_refuses_is_refused(info: OpInfo, ours: Callable[..., Any]) -> None:
    for wrong in info.error_inputs("cpu") if info.error_inputs_func else ():
        sample = wrong.sample_input
        with pytest.raises((ValueError, TypeError), match=f"^{ours.__name__}: "):
            ours(sample.input, *sample.args, **sample.kwargs)
