"""vmap over rows that share their weights is one call of the op, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onepass import layer_norm, rms_norm, weighted_sum
from onepass.core.launch import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="torch.func reaches the registered op, which is tested eagerly")


class _Calls(TorchDispatchMode):
    """Names of the onepass ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "onepass":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted_sum": weighted_sum,
    "vectors": lambda x, w: weighted_sum(x, torch.stack([w, 2 * w])),
    "layer_norm": lambda x, w: layer_norm(x, w, w),
    "rms_norm": rms_norm,
    "stable": lambda x, w: layer_norm(x, w, stable=True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(5, 2, 3, 8), (5, 8), (5, 0, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_call_for_the_whole_batch(name: str, shape: tuple[int, ...], dim: int) -> None:
    call, batch, w = CALLS[name], torch.randn(shape), torch.randn(8)
    rows = batch.movedim(0, dim) if dim < len(shape) - 1 else batch
    dim = dim if dim < len(shape) - 1 else 0
    with _Calls() as calls:
        y = torch.vmap(call, in_dims=(dim, None))(rows, w)
    assert len(calls.names) == 1
    torch.testing.assert_close(y, torch.stack([call(x, w) for x in batch]))

    grad = torch.func.grad(lambda x: call(x, w).square().sum())
    with _Calls() as calls:
        dx = torch.vmap(grad, in_dims=dim)(rows)
    assert len(calls.names) == 2
    torch.testing.assert_close(dx, torch.stack([grad(x) for x in batch]))


@pytest.mark.parametrize("name", CALLS)
def test_each_element_has_its_own_weight_gradient(name: str) -> None:
    call, batch, w = CALLS[name], torch.randn(3, 4, 8), torch.randn(8)
    grad = torch.func.grad(lambda x, w: call(x, w).square().sum(), argnums=1)
    shared = torch.vmap(grad, in_dims=(0, None))(batch, w)
    torch.testing.assert_close(shared, torch.stack([grad(x, w) for x in batch]))
    weights = torch.randn(3, 8)
    own = torch.vmap(call)(batch, weights)
    torch.testing.assert_close(own, torch.stack([call(x, w) for x, w in zip(batch, weights, strict=True)]))


@pytest.mark.parametrize("name", CALLS)
def test_an_empty_batch(name: str) -> None:
    batch, weights = torch.randn(0, 4, 8), torch.randn(8, 0)
    call = CALLS[name]
    assert torch.vmap(call, in_dims=(0, 1))(batch, weights).shape == (0, *call(torch.randn(4, 8), torch.ones(8)).shape)
    grad = torch.func.grad(lambda x, w: call(x, w).square().sum(), argnums=(0, 1))
    dx, dw = torch.vmap(grad, in_dims=(0, 1))(batch, weights)
    assert (dx.shape, dw.shape) == ((0, 4, 8), (0, 8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_upstream_gradients(name: str, device: str) -> None:
    """`is_grads_batched` is a vmap of its own over the backward pass of a plain call."""
    x, w = (torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 8), (8,)))
    y = CALLS[name](x, w)
    upstream = torch.randn(4, *y.shape, device=device)
    batched = torch.autograd.grad(y, (x, w), upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, (x, w), dy, retain_graph=True) for dy in upstream]
    torch.testing.assert_close(batched, tuple(map(torch.stack, zip(*each, strict=True))))
