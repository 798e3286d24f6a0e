"""No operator has a forward-mode rule: a tangent must be refused, on every path, and not be lost in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass import layer_norm, rms_norm, weighted_sum
from onepass.core.launch import INTERPRET
from onepass.ops.norm import op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": layer_norm,
    "residual": lambda x: layer_norm(x, residual=x.new_ones(3, 8))[0],
    "rms_norm": lambda x: rms_norm(x, x.new_ones(8), offset=1.0),
    "weighted_sum": lambda x: weighted_sum(x, x.new_ones(8)),
}
WAYS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "compiled jvp": lambda call, x: torch.compile(lambda t: torch.func.jvp(call, (t,), (t,)), backend="eager")(x),
}
REFUSED = "(norm|weighted_sum): forward-mode derivatives are not implemented"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors_are_refused(name: str, requires_grad: bool, device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=requires_grad)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=REFUSED):
        CALLS[name](forward_ad.make_dual(x, torch.randn(3, 8, device=device)))


@pytest.mark.parametrize("name", CALLS)
def test_what_carries_no_tangent_is_computed(name: str) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with forward_ad.dual_level():
        y = CALLS[name](x)
    torch.testing.assert_close(y, CALLS[name](x))
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (y, CALLS[name](x))))


@pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_transforms_are_refused(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as torch's operations, which compiled norms are by default, they have derivatives of every kind
    monkeypatch.setattr(op, "COMPILED", "kernels")
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError, match=REFUSED):
        WAYS[way](CALLS[name], torch.randn(3, 8))


@pytest.mark.skipif(INTERPRET, reason="no kernel is run")
def test_compiled_norms_have_forward_mode_derivatives() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 8, dtype=torch.float64)
    y, dy = WAYS["compiled jvp"](CALLS["layer_norm"], x)
    expected = torch.func.jvp(lambda t: torch.nn.functional.layer_norm(t, (8,)), (x,), (x,))
    torch.testing.assert_close((y, dy), expected)
